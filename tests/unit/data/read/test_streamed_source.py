"""Streamed rows equal those of the direct reader for any blocks, and transport errors are detected."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from ray_ulysses.data.plan.corpus_set import CorpusSet, open_sources, plan_input
from ray_ulysses.data.plan.plan import Plan
from ray_ulysses.data.plan.plan_files import load_plan, write_segment
from ray_ulysses.data.plan.segment import PlanSettings
from ray_ulysses.data.plan.stages import remainder_after
from ray_ulysses.data.read import row_source, streamed_source
from ray_ulysses.data.read.blocks import Block, Slot, pack, unpack
from ray_ulysses.data.read.digest import slice_checksum
from ray_ulysses.data.read.reader import RowReader, RowSlice, slice_ranges, slice_row
from ray_ulysses.data.read.row_source import DirectSource, ReadAhead
from ray_ulysses.data.read.streamed_source import StreamedSource
from ray_ulysses.errors import RunError, UserError
from tests.breadth import fast_only
from tests.polling import wait_until
from tests.unit.data.corpora import MemoryStore, varied_texts
from tests.unit.data.plans import memory_reader
from tests.unit.data.read.test_reader import pieces_of
from tests.unit.data.tokenize.test_supervision import prepare_rows

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


ALONE = (0, 1, 0, 1, 1)
PLACES = [(0, 1, 0, 1, 1), (1, 2, 0, 1, 1), (0, 3, 1, 2, 1), (0, 1, 3, 4, 2)]
"""Rank and size of data parallelism, rank and size of sequence parallelism, and ring size."""


SETTINGS = PlanSettings(seed=1, context_tokens=256, pad_multiple=8, rows_per_step=5)


class LocalStreams:
    """Packs blocks in this process, as tasks do; ``change`` may modify the tables."""

    def __init__(self, change: Callable[[list[pa.Table]], Sequence[pa.Table]] = list) -> None:
        self.change, self.windows, self.num_ended = change, [], 0
        self.has_come = threading.Event()

    windows: list[list[int]]

    def read(self, blocks: Sequence[Block], stopped: threading.Event) -> Generator[pa.Table, None, None]:
        self.windows.append([block.num_rows for block in blocks])
        tables = [pack(CorpusSet(sources), slots) for sources, slots in (block.opened() for block in blocks)]
        assert all(
            table["tokens"].nbytes <= block.num_bytes + 8 * (block.num_rows + 1)
            for table, block in zip(tables, blocks, strict=True)
        )
        try:
            for table in self.change(tables):
                self.has_come.set()
                yield table
        finally:
            self.has_come.set()
            self.num_ended += 1


class CallingReader(RowReader):
    """Calls ``before`` ahead of each read."""

    def __init__(self, corpora: CorpusSet, plan: Plan, before: Callable[[], None]) -> None:
        super().__init__(corpora, plan)
        self._before = before

    def read(self, *args: Any) -> RowSlice:
        self._before()
        return super().read(*args)


def streamed(folder: Path, streams: LocalStreams, is_late: bool = True, **options: Any) -> StreamedSource:
    """Return a source that reads directly only after the stream has started, if ``is_late``."""

    def before() -> None:
        assert streams.has_come.wait(60.0)
        # The source may read a row or two before it notices the stream.
        time.sleep(0.02)

    plan = load_plan(folder)
    reader = CallingReader(CorpusSet(plan.newest.sources), plan, before if is_late else lambda: None)
    return StreamedSource(reader, plan, streams=streams, waits_for_first_step=False, **options)


def plain_and_weighted(root: Path, count: int) -> list[str]:
    """Prepare a plain corpus, and one with prompts and label weights; return their paths."""
    texts = varied_texts(count, longest=300)
    rows = [{"p": text[: len(text) // 2 + 1], "c": text, "w": 0.5 + number % 3} for number, text in enumerate(texts)]
    plain = prepare_rows(root / "plain", [{"text": text} for text in texts], text_field="text")
    weighted = prepare_rows(root / "weighted", rows, prompt_field="p", completion_field="c", weight_field="w")
    return [str(plain.path), str(weighted.path)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("streamed")
    corpora = open_sources([(path, None) for path in plain_and_weighted(root, 60)])
    write_segment(root / "plan", 0, plan_input(corpora), SETTINGS)
    return root / "plan"


def options_of(place: tuple[int, ...]) -> dict[str, Any]:
    names = ("dp_rank", "dp_size", "sp_rank", "sp_size", "ring_size")
    return dict(zip(names, place, strict=True)) | {"timeout_s": 60.0}


def opened(folder: Path) -> tuple[RowReader, Plan]:
    plan = load_plan(folder)
    return RowReader(CorpusSet(plan.newest.sources), plan), plan


def rows_of(source: DirectSource, steps: range) -> list[RowSlice]:
    found = [one for step in steps for one in source.step(step)]
    source.close()
    return found


def assert_all_same(ours: Sequence[RowSlice], theirs: Sequence[RowSlice]) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("block_tokens", [1, 600])
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_streamed_rows_are_the_direct_readers(folder: Path, place: tuple[int, ...], block_tokens: int) -> None:
    reader, plan = opened(folder)
    options, streams, steps = options_of(place), LocalStreams(), range(2, plan.num_steps + 1)
    ours = rows_of(streamed(folder, streams, block_tokens=block_tokens, max_blocks=3, **options), steps)
    assert len(ours) > 5
    assert_all_same(ours, rows_of(DirectSource(reader, plan, **options), steps))
    assert streams.num_ended == len(streams.windows) > 0
    if block_tokens == 1:
        assert max(map(len, streams.windows)) == 3 and {1} == {n for window in streams.windows for n in window}


def test_the_first_blocks_of_a_window_are_small(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed_source, "FIRST_BLOCK_TOKENS", 256)
    streams = LocalStreams()
    rows_of(streamed(folder, streams, **options_of(ALONE)), range(1, load_plan(folder).num_steps + 1))
    assert streams.windows[0][0] <= 2 < streams.windows[0][2]
    assert sorted(streams.windows[0][:-1]) == streams.windows[0][:-1], "each has more rows than the one before"


def test_a_window_of_short_rows_is_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step waits while a window is planned, which takes long for thousands of short rows."""
    monkeypatch.setattr(streamed_source, "MAX_ROWS", 3)
    monkeypatch.setattr(streamed_source, "_MAX_WINDOW_ROWS", 7)
    streams = LocalStreams()
    rows = rows_of(streamed(folder, streams, **options_of(ALONE)), range(1, load_plan(folder).num_steps + 1))
    assert len(rows) > 20 and streams.windows[0] == streams.windows[1] == [3, 3, 3]
    for window in streams.windows:
        assert max(window) <= 3 and sum(window) <= 9


def test_blocks_may_be_cut_or_joined_on_the_way(folder: Path) -> None:
    reader, plan = opened(folder)
    expected = rows_of(DirectSource(reader, plan, **options_of(ALONE)), range(1, plan.num_steps + 1))
    for change in (
        lambda tables: [pa.concat_tables(tables)],
        lambda tables: [table.slice(n, 1) for table in tables for n in range(table.num_rows)],
    ):
        source = streamed(folder, LocalStreams(change), block_tokens=600, **options_of(ALONE))
        assert_all_same(rows_of(source, range(1, plan.num_steps + 1)), expected)


def with_tokens(change: Callable[[bytes], bytes]) -> Callable[[list[pa.Table]], list[pa.Table]]:
    def changed(table: pa.Table) -> pa.Table:
        tokens = pa.array([change(one.as_py()) for one in table["tokens"]], pa.large_binary())
        return table.set_column(2, "tokens", tokens)

    return lambda tables: [changed(table) for table in tables]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tables: tables[::-1], r"expected row \d+, received row \d+"),
        (lambda tables: tables[:1], r"expected row \d+, received nothing"),
        (with_tokens(lambda tokens: b""), r"row \d+ arrived with too few tokens"),
        (with_tokens(lambda tokens: tokens + b"ab"), r"row \d+ arrived with 1 extra tokens"),
    ],
    ids=["misordered", "lost", "cut", "longer"],
)
def test_misordered_lost_and_damaged_blocks_are_detected(folder: Path, change: Any, said: str) -> None:
    source = streamed(folder, LocalStreams(change), block_tokens=1, **options_of(ALONE))
    with pytest.raises(RunError, match=said):
        rows_of(source, range(1, load_plan(folder).num_steps + 1))
    source.close()


def test_an_unreadable_row_is_replaced_by_its_error(folder: Path) -> None:
    class Broken(MemoryStore):
        def read(self, document: int, start: int, length: int) -> Any:
            if document == 1:
                raise UserError("the shard is broken")
            return super().read(document, start, length)

    slots = [Slot(row=row, ranges=np.array([[row, 0, 4]])) for row in range(3)]
    received = list(unpack(pack(Broken([9, 9, 9]), slots)))
    assert [one.error for one in received] == ["", "the shard is broken", ""]
    assert received[2].tokens.tolist() == [200_000, 200_001, 200_002, 200_003]


def never_read(blocks: Any, stopped: threading.Event) -> Generator[pa.Table, None, None]:

    stopped.wait(60.0)
    yield from ()


def test_a_stream_that_does_not_start_in_time_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hours = itertools.count(step=3600.0)
    monkeypatch.setattr(streamed_source, "time", SimpleNamespace(monotonic=lambda: next(hours)))
    streams = LocalStreams()
    streams.read = never_read  # type: ignore[method-assign]
    options = {**options_of(ALONE), "timeout_s": 60.0, "prefetch_rows": 1}
    said = r"step \d+: the stream did not start within 60 s .*cluster\.data_cpus"
    with contextlib.closing(streamed(folder, streams, False, **options)) as source, pytest.raises(RunError, match=said):
        deque(itertools.chain.from_iterable(map(source.step, range(1, 5))), maxlen=0)


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    place=st.sampled_from([(1, 1), (2, 1), (4, 2), (4, 4)]),
    has_weights=st.booleans(),
)
def test_a_slice_travels_whole(lengths: list[int], place: tuple[int, int], has_weights: bool) -> None:
    store, pieces = MemoryStore([length + 20 for length in lengths], has_weights=has_weights), pieces_of(lengths)
    row_tokens = -(-sum(lengths) // 16) * 16
    for sp_rank in range(place[0]):
        sent = slice_row(store, 3, row_tokens, pieces, sp_rank, *place)
        ranges = np.array(slice_ranges(pieces, row_tokens, sp_rank, *place), dtype=np.int64).reshape(-1, 3)
        (received,) = unpack(pack(store, [Slot(row=3, ranges=ranges)]))
        found = slice_row(received, 3, row_tokens, pieces, sp_rank, *place)
        assert_same(found, sent)
        assert slice_checksum(found) == slice_checksum(sent) and received.num_left == 0


MORE_PLACES = [(0, 1, 0, 1, 1), (1, 2, 0, 1, 1), (0, 3, 1, 2, 1), (3, 4, 0, 1, 1), (0, 1, 3, 4, 2), (1, 2, 1, 4, 4)]
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
def branched(tmp_path_factory: pytest.TempPathFactory) -> Plan:
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


def gated(
    branched: Plan,
    streams: GatedStreams,
    place: tuple[int, ...] = MORE_PLACES[0],
    before: Callable[[], None] | None = None,
    **options: Any,
) -> StreamedSource:
    reader = CallingReader(_corpora(branched.newest.sources), branched, before or streams.before_direct_read)
    options = {"waits_for_first_step": False, "block_tokens": 2200, **options_of(place), **options}
    return StreamedSource(reader, branched, streams=streams, **options)


def direct(branched: Plan, steps: range, place: tuple[int, ...] = MORE_PLACES[0]) -> list[list[RowSlice]]:
    source = DirectSource(RowReader(_corpora(branched.newest.sources), branched), branched, **options_of(place))
    found = [list(source.step(step)) for step in steps]
    source.close()
    return found


@pytest.mark.parametrize("place", fast_only(MORE_PLACES, MORE_PLACES[0], MORE_PLACES[2]), ids=str)
def test_from_any_step_on_and_after_any_number_of_rows_read_directly_the_rows_are_the_direct_readers(
    branched: Plan, place: tuple[int, ...]
) -> None:
    for first in range(1, branched.num_steps + 1):
        steps = range(first, branched.num_steps + 1)
        expected = direct(branched, steps, place)
        num_rows = sum(not one.is_filler for slices in expected for one in slices)
        for num_direct in range(1, TWO_BLOCKS + 2):
            streams = GatedStreams(num_direct)
            source, read_directly = gated(branched, streams, place), 0
            for step, theirs in zip(steps, expected, strict=True):
                assert_all_same(list(source.step(step)), theirs)
                rows = sum(not one.is_filler for one in theirs)
                wanted = min(rows, max(0, num_direct - read_directly))
                assert source.num_direct == wanted, f"from step {first} on, in step {step} after {num_direct} rows"
                read_directly += rows
            assert streams.num_direct == max(0, num_direct - num_rows), "each row once"
            source.close()


def test_the_stream_starts_after_the_first_step_with_the_rows_that_are_not_read_yet(branched: Plan) -> None:
    for first in range(1, branched.num_steps - 3):
        steps = range(first, branched.num_steps + 1)
        expected = direct(branched, steps)
        # More rows than the first step has and the second step reads ahead.
        streams = GatedStreams(len(expected[0]) + 4)
        source = gated(branched, streams, waits_for_first_step=True)
        assert_all_same(list(source.step(first)), expected[0])
        assert source.num_direct == len(expected[0]) and not streams.asked
        received = [one for step in steps[1:] for one in source.step(step)]
        assert_all_same(received, [one for slices in expected[1:] for one in slices])
        asked = [row for rows in streams.asked for row in rows]
        assert 0 < len(asked) <= len(received), "no row of the first step is read again"
        assert asked == [one.row for one in received][-len(asked) :]
        source.close()


def test_rows_that_were_read_directly_while_the_stream_was_ready_are_dropped_from_it(
    branched: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streamed_source, "ReadAhead", Overlooked)
    expected = [one for slices in direct(branched, range(1, 4)) for one in slices]
    streams = GatedStreams(0)
    streams.may_come.set()

    def before() -> None:
        newest = SeenReadAhead.newest
        assert isinstance(newest, Overlooked)
        wait_until(lambda: newest.has_row, "the stream has a row", every_s=0.001)
        newest.num_left -= 1

    source = gated(branched, streams, before=before)
    assert_all_same([one for step in range(1, 4) for one in source.step(step)], expected)
    source.close()


@pytest.mark.parametrize("num_direct", [2, 7, 100])
def test_a_step_that_is_asked_for_again_starts_over(branched: Plan, num_direct: int) -> None:
    """The step is interrupted after each of its slices, before and after the stream has started."""
    (expected,) = direct(branched, range(2, 3))
    for taken in range(len(expected) + 1):
        streams = GatedStreams(num_direct)
        source = gated(branched, streams)
        begun = source.step(2)
        assert_all_same([next(begun) for _ in range(taken)], expected[:taken])
        assert_all_same(list(source.step(2)), expected)
        assert source.num_direct == len(expected) if num_direct == 100 else source.num_direct <= num_direct
        source.close()
        assert streams.num_open == 0


def test_a_row_that_cannot_be_read_directly_ends_its_step_and_the_stream_and_may_be_asked_for_again(
    branched: Plan,
) -> None:
    expected, fails = direct(branched, range(1, 3)), iter([False, False, True])

    def before() -> None:
        if next(fails, False):
            raise UserError("the shard is away")

    streams = GatedStreams(1000)
    source = gated(branched, streams, before=before)
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
    branched: Plan, num_direct: int
) -> None:
    expected = [one for slices in direct(branched, range(1, 3)) for one in slices]
    source = gated(branched, GatedStreams(num_direct, RunError("its node is gone")))
    received: list[RowSlice] = []
    steps = itertools.chain.from_iterable(map(source.step, (1, 2)))
    with pytest.raises(RunError, match=r"^its node is gone$"):
        received.extend(steps)
    assert_all_same(received, expected[:num_direct])
    source.close()


def test_a_plan_that_ends_before_the_stream_comes_ends_it(branched: Plan) -> None:
    streams = GatedStreams(1000)
    source, last = gated(branched, streams), branched.num_steps
    assert_all_same(list(source.step(last)), *direct(branched, range(last, last + 1)))
    assert source.num_direct == len(branched.step_rows(last))
    wait_until(lambda: streams.num_open == 0 and not reading(), "all has ended, and nobody has asked for it")
    source.close()


@pytest.mark.parametrize("waits", ["first block", "second block", "direct reader"])
def test_a_source_can_be_closed_during_a_wait(branched: Plan, waits: str, monkeypatch: pytest.MonkeyPatch) -> None:
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

    source = gated(branched, streams, before=before)
    assert_all_same([next(source.step(1))], direct(branched, range(1, 2))[0][:1])
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
    assert_all_same(list(source.step(2)), *direct(branched, range(2, 3)))
    source.close()
