"""Streams that start, restart or break after any number of rows, for a branched plan with source and label weights."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from ray_ulysses.data.plan.corpus_set import CorpusSet, open_sources, plan_input
from ray_ulysses.data.plan.plan import Plan
from ray_ulysses.data.plan.plan_files import load_plan, write_segment
from ray_ulysses.data.plan.stages import remainder_after
from ray_ulysses.data.read import row_source, streamed_source
from ray_ulysses.data.read.blocks import Block, pack
from ray_ulysses.data.read.reader import RowReader, RowSlice
from ray_ulysses.data.read.row_source import DirectSource, ReadAhead
from ray_ulysses.data.read.streamed_source import StreamedSource
from ray_ulysses.errors import RunError, UserError
from tests.breadth import fast_only
from tests.polling import wait_until
from tests.unit.data.corpora import varied_texts
from tests.unit.data.read.test_streamed_source import (
    SETTINGS,
    CallingReader,
    assert_all_same,
    options_of,
    plain_and_weighted,
)
from tests.unit.data.tokenize.test_supervision import prepare_rows

PLACES = [(0, 1, 0, 1, 1), (1, 2, 0, 1, 1), (0, 3, 1, 2, 1), (3, 4, 0, 1, 1), (0, 1, 3, 4, 2), (1, 2, 1, 4, 4)]
"""Rank and size of data parallelism, rank and size of sequence parallelism, and ring size."""
BRANCH_STEP = 3
TWO_BLOCKS = 8
"""Maximum number of rows in the first two blocks."""


_corpora = functools.cache(CorpusSet)


class GatedStreams:
    """A stream that starts, or breaks, exactly when ``num_direct`` rows were read directly.

    The stream stalls after ``num_blocks`` blocks. ``asked`` has the rows requested from each stream.
    """

    def __init__(self, num_direct: int, error: Exception | None = None, num_blocks: int = 1000) -> None:
        self.num_direct, self._error, self.num_blocks, self.num_open = num_direct, error, num_blocks, 0
        self.asked: list[list[int]] = []
        self.may_come, self.is_stalled = threading.Event(), threading.Event()

    def read(self, blocks: Sequence[Block], stopped: threading.Event) -> Generator[pa.Table, None, None]:
        self.num_open += 1
        self.asked.append([slot.row for block in blocks for slot in block.opened()[1]])
        try:
            wait_until(lambda: self.may_come.is_set() or stopped.is_set(), "the stream may come", every_s=0.001)
            if self._error is not None:
                raise self._error
            for block in [] if stopped.is_set() else blocks[: self.num_blocks]:
                sources, slots = block.opened()
                yield pack(_corpora(sources), slots)
            if len(blocks) > self.num_blocks:
                self.is_stalled.set()
                stopped.wait(60.0)
        finally:
            self.num_open -= 1

    def before_direct_read(self) -> None:
        """Start the stream, and wait for its first row, before the last direct read."""
        self.num_direct -= 1
        if self.num_direct <= 0:
            self.may_come.set()
            wait_until(lambda: SeenReadAhead.newest.is_ready, "the stream has come", every_s=0.001)


class SeenReadAhead(ReadAhead[Any]):
    """Reads a stream ahead, and lets the test see whether a row is ready."""

    newest: SeenReadAhead

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        SeenReadAhead.newest = self


class Overlooked(SeenReadAhead):
    """Reports its first row only after ``num_left`` more rows were read directly."""

    num_left = 3

    @property
    def is_ready(self) -> bool:
        return self.has_row and self.num_left <= 0

    @property
    def has_row(self) -> bool:
        return super().is_ready


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """A plan of two corpora with weights, one of them with prompts and with weights of labels, and of a branch with a
    third, other weights, longer rows, and fewer of them in a step than three or four ranks take at once.
    """
    root = tmp_path_factory.mktemp("branched")
    plain, weighted = plain_and_weighted(root, 36)
    joined = prepare_rows(root / "joined", [{"text": text} for text in varied_texts(6, seed=1)], text_field="text")
    first = plan_input(open_sources([(plain, 0.7), (weighted, 0.3)]))
    then = plan_input(open_sources([(plain, 0.3), (weighted, 0.5), (str(joined.path), 0.2)]))
    write_segment(root / "plan", 0, first, SETTINGS)
    change = replace(SETTINGS, context_tokens=512, rows_per_step=2)
    remainder = remainder_after(load_plan(root / "plan"), BRANCH_STEP, then.sources, change)
    write_segment(root / "plan", 1, then, change, remainder)
    found = load_plan(root / "plan")
    assert BRANCH_STEP + 4 < found.num_steps < BRANCH_STEP + 9, found.num_steps
    return found


@pytest.fixture(autouse=True)
def no_thread_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Check that every read-ahead thread has ended after the test."""
    monkeypatch.setattr(streamed_source, "ReadAhead", SeenReadAhead)
    yield
    wait_until(lambda: not reading(), "the threads have ended", timeout_s=10.0)


def reading() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "ray-ulysses-read-ahead"]


def streamed(
    plan: Plan,
    streams: GatedStreams,
    place: tuple[int, ...] = PLACES[0],
    before: Callable[[], None] | None = None,
    **options: Any,
) -> StreamedSource:
    reader = CallingReader(_corpora(plan.newest.sources), plan, before or streams.before_direct_read)
    options = {"waits_for_first_step": False, "block_tokens": 2200, **options_of(place), **options}
    return StreamedSource(reader, plan, streams=streams, **options)


def direct(plan: Plan, steps: range, place: tuple[int, ...] = PLACES[0]) -> list[list[RowSlice]]:
    source = DirectSource(RowReader(_corpora(plan.newest.sources), plan), plan, **options_of(place))
    found = [list(source.step(step)) for step in steps]
    source.close()
    return found


@pytest.mark.parametrize("place", fast_only(PLACES, PLACES[0], PLACES[2]), ids=str)
def test_from_any_step_on_and_after_any_number_of_rows_read_directly_the_rows_are_the_direct_readers(
    plan: Plan, place: tuple[int, ...]
) -> None:
    for first in range(1, plan.num_steps + 1):
        steps = range(first, plan.num_steps + 1)
        expected = direct(plan, steps, place)
        num_rows = sum(not one.is_filler for slices in expected for one in slices)
        for num_direct in range(1, TWO_BLOCKS + 2):
            streams = GatedStreams(num_direct)
            source, read_directly = streamed(plan, streams, place), 0
            for step, theirs in zip(steps, expected, strict=True):
                assert_all_same(list(source.step(step)), theirs)
                rows = sum(not one.is_filler for one in theirs)
                wanted = min(rows, max(0, num_direct - read_directly))
                assert source.num_direct == wanted, f"from step {first} on, in step {step} after {num_direct} rows"
                read_directly += rows
            assert streams.num_direct == max(0, num_direct - num_rows), "each row once"
            source.close()


def test_the_stream_starts_after_the_first_step_with_the_rows_that_are_not_read_yet(plan: Plan) -> None:
    for first in range(1, plan.num_steps - 3):
        steps = range(first, plan.num_steps + 1)
        expected = direct(plan, steps)
        # More rows than the first step has and the second step reads ahead.
        streams = GatedStreams(len(expected[0]) + 4)
        source = streamed(plan, streams, waits_for_first_step=True)
        assert_all_same(list(source.step(first)), expected[0])
        assert source.num_direct == len(expected[0]) and not streams.asked
        received = [one for step in steps[1:] for one in source.step(step)]
        assert_all_same(received, [one for slices in expected[1:] for one in slices])
        asked = [row for rows in streams.asked for row in rows]
        assert 0 < len(asked) <= len(received), "no row of the first step is read again"
        assert asked == [one.row for one in received][-len(asked) :]
        source.close()


def test_rows_that_were_read_directly_while_the_stream_was_ready_are_dropped_from_it(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streamed_source, "ReadAhead", Overlooked)
    expected = [one for slices in direct(plan, range(1, 4)) for one in slices]
    streams = GatedStreams(0)
    streams.may_come.set()

    def before() -> None:
        newest = SeenReadAhead.newest
        assert isinstance(newest, Overlooked)
        wait_until(lambda: newest.has_row, "the stream has a row", every_s=0.001)
        newest.num_left -= 1

    source = streamed(plan, streams, before=before)
    assert_all_same([one for step in range(1, 4) for one in source.step(step)], expected)
    source.close()


@pytest.mark.parametrize("num_direct", [2, 7, 100])
def test_a_step_that_is_asked_for_again_starts_over(plan: Plan, num_direct: int) -> None:
    """The step is interrupted after each of its slices, before and after the stream has started."""
    (expected,) = direct(plan, range(2, 3))
    for taken in range(len(expected) + 1):
        streams = GatedStreams(num_direct)
        source = streamed(plan, streams)
        begun = source.step(2)
        assert_all_same([next(begun) for _ in range(taken)], expected[:taken])
        assert_all_same(list(source.step(2)), expected)
        assert source.num_direct == len(expected) if num_direct == 100 else source.num_direct <= num_direct
        source.close()
        assert streams.num_open == 0


def test_a_row_that_cannot_be_read_directly_ends_its_step_and_the_stream_and_may_be_asked_for_again(plan: Plan) -> None:
    expected, fails = direct(plan, range(1, 3)), iter([False, False, True])

    def before() -> None:
        if next(fails, False):
            raise UserError("the shard is away")

    streams = GatedStreams(1000)
    source = streamed(plan, streams, before=before)
    step = source.step(1)
    assert_all_same([next(step), next(step)], expected[0][:2])
    with pytest.raises(UserError, match=r"^the shard is away$"):
        next(step)
    assert streams.num_open == 0
    for number, theirs in enumerate(expected, start=1):
        assert_all_same(list(source.step(number)), theirs)
    source.close()


@pytest.mark.parametrize("num_direct", [1, 4, 6])
def test_a_stream_that_breaks_while_rows_are_read_directly_is_an_error_in_its_place(
    plan: Plan, num_direct: int
) -> None:
    expected = [one for slices in direct(plan, range(1, 3)) for one in slices]
    source = streamed(plan, GatedStreams(num_direct, RunError("its node is gone")))
    received: list[RowSlice] = []
    steps = itertools.chain.from_iterable(map(source.step, (1, 2)))
    with pytest.raises(RunError, match=r"^its node is gone$"):
        received.extend(steps)
    assert_all_same(received, expected[:num_direct])
    source.close()


def test_a_plan_that_ends_before_the_stream_comes_ends_it(plan: Plan) -> None:
    streams = GatedStreams(1000)
    source, last = streamed(plan, streams), plan.num_steps
    assert_all_same(list(source.step(last)), *direct(plan, range(last, last + 1)))
    assert source.num_direct == len(plan.step_rows(last))
    wait_until(lambda: streams.num_open == 0 and not reading(), "all has ended, and nobody has asked for it")
    source.close()


@pytest.mark.parametrize("waits", ["first block", "second block", "direct reader"])
def test_a_source_can_be_closed_during_a_wait(plan: Plan, waits: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hanging direct read is abandoned; its thread ends once the read returns."""
    for module in (row_source, streamed_source):
        monkeypatch.setattr(module, "CLOSE_TIMEOUT_S", 0.1 if waits == "direct reader" else 60.0)
    answers, is_asked = threading.Event(), threading.Event()
    streams = GatedStreams(1 if waits == "second block" else 1000, num_blocks=1)

    def before() -> None:
        streams.before_direct_read()
        if waits == "direct reader" and streams.num_direct < 999:
            is_asked.set()
            assert answers.wait(60.0)

    source = streamed(plan, streams, before=before)
    assert_all_same([next(source.step(1))], direct(plan, range(1, 2))[0][:1])
    if waits == "direct reader":
        assert is_asked.wait(60.0)
    if waits == "second block":
        wait_until(streams.is_stalled.is_set, "it waits for the second block")
    source.close()
    if waits == "direct reader":
        assert reading(), "its read lasts"
        answers.set()
    wait_until(lambda: streams.num_open == 0 and not reading(), "all has ended")
    # A closed source can be used again.
    streams.num_blocks = 1000
    assert_all_same(list(source.step(2)), *direct(plan, range(2, 3)))
    source.close()
