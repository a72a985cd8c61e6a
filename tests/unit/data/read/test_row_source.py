from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from ray_ulysses.data.plan.plan import Plan
from ray_ulysses.data.plan.segment import PlanSettings
from ray_ulysses.data.read.reader import RowReader, RowSlice
from ray_ulysses.data.read.row_source import DirectSource
from ray_ulysses.errors import UserError
from tests.unit.data.corpora import MemoryStore
from tests.unit.data.plans import build_plan

LENGTHS = [int(length) for length in np.random.default_rng(0).integers(2, 90, 60)]


def plan_of(store: MemoryStore, rows_per_step: int = 5) -> Plan:
    settings = PlanSettings(seed=1, context_tokens=32, pad_multiple=8, rows_per_step=rows_per_step, epochs=2)
    return build_plan(store.lengths, store.fingerprint, settings)


def assert_same(ours: RowSlice, theirs: RowSlice) -> None:
    for name in RowSlice.__slots__:
        assert np.array_equal(getattr(ours, name), getattr(theirs, name)), name


def plain(reader: RowReader, plan: Plan, step: int, dp: tuple[int, int], sp: tuple[int, int]) -> Iterator[RowSlice]:
    for micro_batch in plan.step_schedule(step, dp[1]):
        row = micro_batch[dp[0]]
        yield reader.filler(*sp) if row is None else reader.read("train", row, *sp)


@pytest.mark.parametrize(("dp_size", "sp_size"), [(1, 1), (2, 2), (3, 4), (4, 1)])
@pytest.mark.parametrize("prefetch_rows", [0, 1, 7])
def test_reading_ahead_changes_nothing(dp_size: int, sp_size: int, prefetch_rows: int) -> None:
    store = MemoryStore(LENGTHS)
    plan = plan_of(store)
    reader = RowReader(store, plan)
    rank = (dp_size - 1, sp_size - 1)
    source = DirectSource(reader, plan, rank[0], dp_size, rank[1], sp_size, prefetch_rows=prefetch_rows)
    for step in range(1, plan.num_steps + 1):
        ours = list(source.step(step))
        theirs = list(plain(reader, plan, step, (rank[0], dp_size), (rank[1], sp_size)))
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_same(one, other)
    source.close()


def test_a_source_starts_at_every_step() -> None:
    store = MemoryStore(LENGTHS)
    plan = plan_of(store)
    reader = RowReader(store, plan)
    for first in range(1, plan.num_steps + 1):
        source = DirectSource(reader, plan, 0, 2, 0, 1)
        for step in range(first, min(first + 2, plan.num_steps) + 1):
            for one, other in zip(source.step(step), plain(reader, plan, step, (0, 2), (0, 1)), strict=True):
                assert_same(one, other)
        source.close()


def test_a_step_that_was_left_half_way_begins_anew() -> None:
    store = MemoryStore(LENGTHS)
    plan = plan_of(store)
    source = DirectSource(RowReader(store, plan), plan, 0, 1, 0, 1)
    half = source.step(2)
    first = next(half)
    again = list(source.step(2))
    assert_same(again[0], first)
    assert len(again) == 5
    source.close()


def test_a_failed_read_is_raised_where_the_row_is_asked_for() -> None:
    class Broken(MemoryStore):
        def read(self, document: int, start: int, length: int) -> NDArray[np.int64]:
            raise UserError("the shard x can't be read")

    store = Broken(LENGTHS)
    plan = plan_of(store)
    source = DirectSource(RowReader(store, plan), plan, 0, 1, 0, 1)
    for _ in range(2):
        with pytest.raises(UserError, match=r"the shard x can't be read"):
            next(source.step(1))
    source.close()


def test_closing_leaves_no_thread() -> None:
    store = MemoryStore(LENGTHS)
    plan = plan_of(store)
    source = DirectSource(RowReader(store, plan), plan, 0, 1, 0, 1)
    next(source.step(1))
    source.close()
    source.close()
    assert not [thread for thread in threading.enumerate() if "read-ahead" in thread.name]


def test_a_step_beyond_the_plan_is_refused() -> None:
    store = MemoryStore(LENGTHS)
    plan = plan_of(store)
    source = DirectSource(RowReader(store, plan), plan, 0, 1, 0, 1)
    with pytest.raises(ValueError, match=r"is not in"):
        next(source.step(plan.num_steps + 1))
