from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from ray_ulysses.data.plan.plan import Plan
from ray_ulysses.data.read.reader import RowReader, RowSlice
from ray_ulysses.data.read.row_source import DirectSource
from ray_ulysses.errors import UserError
from tests.unit.data.corpora import MemoryStore
from tests.unit.data.plans import memory_reader

LENGTHS = [int(length) for length in np.random.default_rng(0).integers(2, 90, 60)]


def planned() -> tuple[Plan, RowReader]:
    return memory_reader(LENGTHS, context_tokens=32, rows_per_step=5, epochs=2)[1:]


def assert_same(ours: RowSlice, theirs: RowSlice) -> None:
    for name in RowSlice.__slots__:
        one, other = getattr(ours, name), getattr(theirs, name)
        assert np.array_equal(one, other), name
        assert not isinstance(one, np.ndarray) or one.dtype == other.dtype, name


def plain(reader: RowReader, plan: Plan, step: int, dp: tuple[int, int], sp: tuple[int, int]) -> Iterator[RowSlice]:
    for micro_batch in plan.step_schedule(step, dp[1]):
        row = micro_batch[dp[0]]
        yield reader.filler(*sp) if row is None else reader.read("train", row, *sp)


def test_a_source_starts_at_every_step() -> None:
    plan, reader = planned()
    for first in range(1, plan.num_steps + 1):
        # Without reading ahead, and up to seven rows ahead.
        dp, sp = [((0, 2), (0, 1)), ((2, 3), (3, 4))][first % 2]
        source = DirectSource(reader, plan, *dp, *sp, prefetch_rows=first % 8)
        for step in range(first, min(first + 2, plan.num_steps) + 1):
            for one, other in zip(source.step(step), plain(reader, plan, step, dp, sp), strict=True):
                assert_same(one, other)
        source.close()
    with pytest.raises(ValueError, match=r"is not in"):
        next(source.step(plan.num_steps + 1))


def test_an_interrupted_step_starts_over_and_no_thread_is_left() -> None:
    plan, reader = planned()
    source = DirectSource(reader, plan, 0, 1, 0, 1)
    first = next(source.step(2))
    again = list(source.step(2))
    assert_same(again[0], first)
    assert len(again) == 5
    next(source.step(3))
    source.close()
    source.close()
    assert not [thread for thread in threading.enumerate() if "read-ahead" in thread.name]


def test_a_failed_read_is_raised_at_its_row() -> None:
    class Broken(MemoryStore):
        def read(self, document: int, start: int, length: int) -> NDArray[np.int64]:
            raise UserError("the shard x can't be read")

    plan, _ = planned()
    source = DirectSource(RowReader(Broken(LENGTHS), plan), plan, 0, 1, 0, 1)
    for _ in range(2):
        with pytest.raises(UserError, match=r"the shard x can't be read"):
            next(source.step(1))
    source.close()
