"""Streamed rows equal those of the direct reader for any blocks, and transport errors are detected."""

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
from ray_ulysses.data.plan.segment import PlanSettings
from ray_ulysses.data.read import streamed_source
from ray_ulysses.data.read.blocks import Block, Slot, pack, unpack
from ray_ulysses.data.read.digest import slice_checksum
from ray_ulysses.data.read.reader import RowReader, RowSlice, slice_ranges, slice_row
from ray_ulysses.data.read.row_source import DirectSource
from ray_ulysses.data.read.streamed_source import StreamedSource
from ray_ulysses.errors import RunError, UserError
from tests.unit.data.corpora import MemoryStore, varied_texts
from tests.unit.data.read.test_label_weights import pieces_of
from tests.unit.data.read.test_row_source import assert_same
from tests.unit.data.tokenize.test_supervision import prepare_rows

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


def test_a_stream_that_does_not_start_in_time_is_an_error(folder: Path) -> None:
    streams = LocalStreams()
    streams.read = never_read  # type: ignore[method-assign]
    source = streamed(folder, streams, False, **{**options_of(ALONE), "timeout_s": 0.2, "prefetch_rows": 1})

    def train_slowly() -> None:
        for step in range(1, 5):
            for _ in source.step(step):
                time.sleep(0.1)

    with pytest.raises(RunError, match=r"step \d+: the stream did not start within 0\.2 s .*cluster\.data_cpus"):
        train_slowly()
    source.close()


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
