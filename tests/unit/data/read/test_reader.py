"""Rows and their slices: every split of a row has the same tokens, labels and positions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_ulysses.data.plan.corpus_set import CorpusSet, PlannedSource
from ray_ulysses.data.plan.rows import Piece
from ray_ulysses.data.plan.segment import PlanSettings
from ray_ulysses.data.read.digest import add_digests, slice_checksum
from ray_ulysses.data.read.reader import IGNORE_INDEX, RowReader, RowSlice, slice_row
from ray_ulysses.errors import UserError
from ray_ulysses.parallel.layout import held_ranges
from tests.breadth import examples
from tests.unit.data.corpora import MemoryStore, text_corpus
from tests.unit.data.plans import build_plan, memory_reader

PAD = 24
SPLITS = [(1, 1), (2, 1), (3, 1), (4, 1), (8, 1), (2, 2), (3, 3), (4, 2), (6, 2), (6, 3), (6, 6), (12, 2), (12, 4)]
"""Pairs of sp_size and ring_size; all of them can slice a row whose length is a multiple of PAD."""


def piece(document: int, start: int, length: int, has_next_label: bool = False) -> Piece:
    return Piece(document=document, start=start, length=length, has_next_label=has_next_label)


def whole_row(slices: list[RowSlice], name: str) -> list[int]:
    """Assemble a row from the values of its slices."""
    values = np.full(slices[0].row_tokens, -7, dtype=np.int64)
    for one in slices:
        place = 0
        for start, stop in held_ranges(one.row_tokens, one.sp_rank, one.sp_size, one.ring_size):
            values[start:stop] = getattr(one, name)[place : place + stop - start]
            place += stop - start
        assert place == getattr(one, name).size == one.row_tokens // one.sp_size
    return [int(value) for value in values]


def test_a_row_holds_tokens_labels_and_positions_document_by_document() -> None:
    store = MemoryStore([3, 10])
    row = slice_row(store, 5, 8, [piece(0, 0, 3), piece(1, 4, 3, has_next_label=True)], 0, 1)
    a, b = 0, 100_000
    assert row.input_ids.tolist() == [a, a + 1, a + 2, b + 4, b + 5, b + 6, 0, 0]
    assert row.labels.tolist() == [a + 1, a + 2, IGNORE_INDEX, b + 5, b + 6, b + 7, IGNORE_INDEX, IGNORE_INDEX]
    assert row.position_ids.tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert row.document_lengths == (3, 3)
    assert (row.row, row.row_tokens, row.num_supervised, row.is_filler) == (5, 8, 5, False)


@pytest.mark.parametrize("split", SPLITS, ids=lambda split: f"sp{split[0]}-ring{split[1]}")
@settings(max_examples=examples(25))
@given(lengths=st.lists(st.integers(2, 150), min_size=1, max_size=20), seed=st.integers(0, 99))
def test_the_slices_of_every_split_form_the_same_row(split: tuple[int, int], lengths: list[int], seed: int) -> None:
    _, plan, reader = memory_reader(lengths, context_tokens=2 * PAD, pad_multiple=PAD, seed=seed)
    for row in range(plan.num_rows):
        alone = reader.read("train", row, 0, 1)
        slices = [reader.read("train", row, rank, *split) for rank in range(split[0])]
        for name in ("input_ids", "labels", "position_ids"):
            assert whole_row(slices, name) == getattr(alone, name).tolist()
        assert add_digests(*map(slice_checksum, slices)) == slice_checksum(alone)
        assert sum(one.num_supervised for one in slices) == plan.stats(range(row, row + 1)).supervised[0]


def test_labels_cross_chunk_borders_between_ranks() -> None:
    store = MemoryStore([9, 16])
    # Chunks have six tokens: the first document crosses one border, the second crosses two.
    outer, inner = (slice_row(store, 0, 24, [piece(0, 0, 9), piece(1, 0, 15)], rank, 2, 2) for rank in range(2))
    b = 100_000
    assert outer.input_ids.tolist() == [*range(6), *range(b + 9, b + 15)]
    assert outer.labels.tolist() == [*range(1, 7), *range(b + 10, b + 15), IGNORE_INDEX]
    assert inner.input_ids.tolist() == [6, 7, 8, *range(b, b + 9)]
    assert inner.labels.tolist() == [7, 8, IGNORE_INDEX, *range(b + 1, b + 10)]
    assert inner.position_ids.tolist() == [6, 7, 8, *range(9)]
    assert outer.position_ids.tolist() == [*range(6), *range(9, 15)]


# One more token is read as the label of a range's last token, except at the end of the document.
@pytest.mark.parametrize(("rank", "split", "num_read"), [(1, (4, 1), 12 + 1), (0, (2, 2), 12 + 1 + 12)])
def test_a_rank_reads_only_the_tokens_of_its_slice(rank: int, split: tuple[int, int], num_read: int) -> None:
    store = MemoryStore([48])
    slice_row(store, 0, 48, [piece(0, 0, 48)], rank, *split)
    assert store.num_tokens_read == num_read


def test_a_filler_is_padding_whose_positions_continue_through_all_ranges() -> None:
    _, _, reader = memory_reader([9], context_tokens=2 * PAD, pad_multiple=PAD)
    slices = [reader.filler(rank, 4, 2) for rank in range(4)]
    assert whole_row(slices, "position_ids") == list(range(PAD))
    for one in slices:
        assert one.is_filler and one.num_supervised == 0 and one.document_lengths == ()


@pytest.mark.parametrize(("split", "setting"), [((5, 1), "sp_size=5"), ((8, 2), "sp_size=8 with .*ring_size=2")])
def test_a_row_that_a_split_can_not_divide_is_refused(split: tuple[int, int], setting: str) -> None:
    with pytest.raises(ValueError, match=rf"row 7 has 8 tokens.*parallel\.{setting}"):
        slice_row(MemoryStore([9]), 7, 8, [], 0, *split)


def test_a_plan_of_another_corpus_is_refused(tmp_path: Path) -> None:
    corpus = text_corpus(tmp_path, ["some text"])
    planned = PlannedSource(path=str(corpus.path), fingerprint="elsewhere", num_documents=1)
    settings = PlanSettings(seed=1, context_tokens=24, pad_multiple=8, rows_per_step=4)
    plan = build_plan(corpus.lengths, "elsewhere", settings)
    with pytest.raises(UserError, match=r"the corpus was replaced since planning"):
        RowReader(CorpusSet([planned]), plan).read("train", 0, 0, 1)


def test_the_evaluation_split_is_read_from_its_own_rows() -> None:
    _, plan, reader = memory_reader(range(2, 80), eval_fraction=0.3, eval_rows=4)
    for row in range(plan.evaluation.num_rows):
        found = reader.read("evaluation", row, 0, 1)
        assert found.document_lengths == tuple(p.length for p in plan.evaluation.pieces(row))
        assert found.num_supervised == plan.evaluation.stats(row, row + 1).supervised[0]
