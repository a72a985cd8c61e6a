"""Streamed rows are those of the direct reader, whatever blocks they come in; what goes wrong on the way is noticed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_ulysses.data.plan.corpus_set import CorpusSet, open_sources, plan_input
from ray_ulysses.data.plan.plan import Plan
from ray_ulysses.data.plan.plan_files import load_plan, write_segment
from ray_ulysses.data.plan.rows import Piece
from ray_ulysses.data.plan.segment import PlanSettings
from ray_ulysses.data.read import streamed_source
from ray_ulysses.data.read.blocks import Block, Slot, pack, unpack
from ray_ulysses.data.read.digest import slice_checksum
from ray_ulysses.data.read.reader import RowReader, RowSlice, slice_ranges, slice_row
from ray_ulysses.data.read.row_source import DirectSource
from ray_ulysses.data.read.streamed_source import StreamedSource
from ray_ulysses.errors import RunError, UserError
from tests.unit.data.corpora import MemoryStore, varied_texts
from tests.unit.data.read.test_row_source import assert_same
from tests.unit.data.tokenize.test_supervision import prepare_rows

PLACES = [(1, 1, 1), (2, 1, 1), (3, 2, 1), (1, 4, 2)]


class LocalStreams:
    """Packs blocks in this process, as tasks do, after ``change`` has had its way with their tables."""

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


class SlowReader(RowReader):
    """Reads a row only once something has come of a stream, after ``num_early`` rows: else no row would be streamed."""

    def __init__(self, reader: RowReader, plan: Plan, streams: LocalStreams, num_early: int = 0) -> None:
        super().__init__(CorpusSet(reader.sources), plan)
        self._streams, self._num_early = streams, num_early

    def read(self, *args: Any) -> RowSlice:
        self._num_early -= 1
        if self._num_early < 0:
            assert self._streams.has_come.wait(60.0)
            # A row or two are read before the source sees it.
            time.sleep(0.02)
        return super().read(*args)


def streamed(folder: Path, streams: LocalStreams, num_early: int = 0, **options: Any) -> StreamedSource:
    reader, plan = opened(folder)
    reader = SlowReader(reader, plan, streams, num_early)
    return StreamedSource(reader, plan, streams=streams, waits_for_first_step=False, **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan of a plain corpus and one with prompts and weights."""
    root = tmp_path_factory.mktemp("streamed")
    texts = varied_texts(60, longest=300)
    plain = prepare_rows(root / "plain", [{"text": text} for text in texts], text_field="text")
    rows = [{"p": text[: len(text) // 2 + 1], "c": text, "w": 0.5 + number % 3} for number, text in enumerate(texts)]
    weighted = prepare_rows(root / "weighted", rows, prompt_field="p", completion_field="c", weight_field="w")
    corpora = open_sources([(str(plain.path), None), (str(weighted.path), None)])
    settings = PlanSettings(seed=1, context_tokens=256, pad_multiple=8, rows_per_step=5)
    write_segment(root / "plan", 0, plan_input(corpora), settings)
    return root / "plan"


def options_of(place: tuple[int, int, int], rank: int = 0) -> dict[str, Any]:
    dp_size, sp_size, ring_size = place
    return {
        "dp_rank": rank % dp_size, "dp_size": dp_size, "sp_rank": rank % sp_size, "sp_size": sp_size,
        "ring_size": ring_size, "timeout_s": 60.0,
    }  # fmt: skip


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


@pytest.mark.parametrize("block_tokens", [1, 600, 1 << 20])
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_streamed_rows_are_the_direct_readers(folder: Path, place: tuple[int, int, int], block_tokens: int) -> None:
    reader, plan = opened(folder)
    for rank, first in ((0, 1), (3, 3)):
        options = options_of(place, rank)
        streams = LocalStreams()
        steps = range(first, plan.num_steps + 1)
        ours = rows_of(streamed(folder, streams, block_tokens=block_tokens, max_blocks=3, **options), steps)
        theirs = rows_of(DirectSource(reader, plan, **options), steps)
        assert len(ours) > 5
        assert_all_same(ours, theirs)
        assert streams.num_ended == len(streams.windows) > 0
        if block_tokens == 1:
            assert max(map(len, streams.windows)) == 3 and {1} == {n for window in streams.windows for n in window}


def test_the_first_blocks_of_a_window_are_small(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed_source, "FIRST_BLOCK_TOKENS", 256)
    streams = LocalStreams()
    rows_of(streamed(folder, streams, **options_of((1, 1, 1))), range(1, load_plan(folder).num_steps + 1))
    assert streams.windows[0][0] <= 2 < streams.windows[0][2]
    assert sorted(streams.windows[0][:-1]) == streams.windows[0][:-1], "each has more rows than the one before"


def test_a_window_of_short_rows_is_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step waits while a window is made: of rows of 512 tokens four million would be eight thousand."""
    monkeypatch.setattr(streamed_source, "MAX_ROWS", 3)
    monkeypatch.setattr(streamed_source, "_MAX_WINDOW_ROWS", 7)
    streams = LocalStreams()
    rows = rows_of(streamed(folder, streams, **options_of((1, 1, 1))), range(1, load_plan(folder).num_steps + 1))
    assert len(rows) > 20 and streams.windows[0] == streams.windows[1] == [3, 3, 3]
    for window in streams.windows:
        assert max(window) <= 3 and sum(window) <= 9


def test_blocks_may_be_cut_or_joined_on_the_way(folder: Path) -> None:
    reader, plan = opened(folder)
    expected = rows_of(DirectSource(reader, plan, **options_of((1, 1, 1))), range(1, plan.num_steps + 1))
    for change in (
        lambda tables: [pa.concat_tables(tables)],
        lambda tables: [table.slice(n, 1) for table in tables for n in range(table.num_rows)],
    ):
        source = streamed(folder, LocalStreams(change), block_tokens=600, **options_of((1, 1, 1)))
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
def test_what_goes_wrong_on_the_way_is_noticed(folder: Path, change: Any, said: str) -> None:
    source = streamed(folder, LocalStreams(change), block_tokens=1, **options_of((1, 1, 1)))
    with pytest.raises(RunError, match=said):
        rows_of(source, range(1, load_plan(folder).num_steps + 1))
    source.close()


def test_a_row_that_cannot_be_read_is_an_error_in_its_place(folder: Path) -> None:
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
    """A stream that never gives a block."""
    stopped.wait(60.0)
    yield from ()


def test_a_stream_that_does_not_come_in_time_is_an_error(folder: Path) -> None:
    streams = LocalStreams()
    streams.read = never_read  # type: ignore[method-assign]
    source = streamed(folder, streams, 1000, **{**options_of((1, 1, 1)), "timeout_s": 0.2, "prefetch_rows": 1})

    def train_slowly() -> None:
        for step in range(1, 5):
            for _ in source.step(step):
                time.sleep(0.1)

    with pytest.raises(RunError, match=r"step \d+: the stream has not started within 0\.2 s .*cluster\.data_cpus"):
        train_slowly()
    source.close()


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    place=st.sampled_from([(1, 1), (2, 1), (4, 2), (4, 4)]),
    has_weights=st.booleans(),
)
def test_a_slice_travels_whole(lengths: list[int], place: tuple[int, int], has_weights: bool) -> None:
    store = MemoryStore([length + 20 for length in lengths], has_weights=has_weights)
    pieces = [
        Piece(document=number, start=number, length=length, has_next_label=number % 3 == 0)
        for number, length in enumerate(lengths)
    ]
    row_tokens = -(-sum(lengths) // 16) * 16
    for sp_rank in range(place[0]):
        sent = slice_row(store, 3, row_tokens, pieces, sp_rank, *place)
        ranges = np.array(slice_ranges(pieces, row_tokens, sp_rank, *place), dtype=np.int64).reshape(-1, 3)
        (received,) = unpack(pack(store, [Slot(row=3, ranges=ranges)]))
        found = slice_row(received, 3, row_tokens, pieces, sp_rank, *place)
        assert_same(found, sent)
        assert slice_checksum(found) == slice_checksum(sent) and received.num_left == 0
