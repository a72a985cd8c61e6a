from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_ulysses.data.plan.corpus_set import CorpusSet, PlannedSource
from ray_ulysses.data.plan.rows import Piece
from ray_ulysses.data.plan.segment import PlanSettings
from ray_ulysses.data.read.reader import IGNORE_INDEX, RowReader, RowSlice, slice_row
from ray_ulysses.errors import UserError
from tests.unit.data.corpora import MemoryStore, text_corpus
from tests.unit.data.plans import build_plan

SETTINGS = PlanSettings(seed=1, context_tokens=24, pad_multiple=8, rows_per_step=4)


def piece(document: int, start: int, length: int, has_next_label: bool = False) -> Piece:
    return Piece(document=document, start=start, length=length, has_next_label=has_next_label)


def join(slices: list[RowSlice], name: str) -> list[int]:
    return [int(value) for one in slices for value in getattr(one, name)]


def test_a_row_holds_tokens_labels_and_positions_document_by_document() -> None:
    store = MemoryStore([3, 10])
    row = slice_row(store, 5, 8, [piece(0, 0, 3), piece(1, 4, 3, has_next_label=True)], 0, 1)
    a, b = 0, 100_000
    assert row.input_ids.tolist() == [a, a + 1, a + 2, b + 4, b + 5, b + 6, 0, 0]
    assert row.labels.tolist() == [a + 1, a + 2, IGNORE_INDEX, b + 5, b + 6, b + 7, IGNORE_INDEX, IGNORE_INDEX]
    assert row.position_ids.tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert row.document_lengths == (3, 3)
    assert (row.row, row.row_tokens, row.num_supervised, row.is_filler) == (5, 8, 5, False)


@pytest.mark.parametrize("sp_size", [1, 2, 4, 8])
@given(lengths=st.lists(st.integers(2, 70), min_size=1, max_size=12), seed=st.integers(0, 99))
def test_slices_of_any_sp_join_to_the_same_row(sp_size: int, lengths: list[int], seed: int) -> None:
    store = MemoryStore(lengths)
    plan = build_plan(store.lengths, store.fingerprint, replace(SETTINGS, seed=seed))
    reader = RowReader(store, plan)
    for row in range(plan.num_rows):
        whole = reader.read("train", row, 0, 1)
        slices = [reader.read("train", row, rank, sp_size) for rank in range(sp_size)]
        for name in ("input_ids", "labels", "position_ids"):
            assert join(slices, name) == getattr(whole, name).tolist()
            assert all(getattr(one, name).shape == (whole.row_tokens // sp_size,) for one in slices)
        assert sum(one.num_supervised for one in slices) == plan.stats(range(row, row + 1)).supervised[0]


@pytest.mark.parametrize("sp_size", [1, 2, 4, 8])
@given(lengths=st.lists(st.integers(2, 70), min_size=1, max_size=12))
def test_labels_never_cross_documents_nor_padding(sp_size: int, lengths: list[int]) -> None:
    store = MemoryStore(lengths)
    plan = build_plan(store.lengths, store.fingerprint, SETTINGS)
    reader = RowReader(store, plan)
    for row in range(plan.num_rows):
        slices = [reader.read("train", row, rank, sp_size) for rank in range(sp_size)]
        inputs, labels = join(slices, "input_ids"), join(slices, "labels")
        used = sum(slices[0].document_lengths)
        assert all(label == IGNORE_INDEX for label in labels[used:])
        # A token's value names its document and place: its label is the next place of the same document.
        assert all(label in (IGNORE_INDEX, token + 1) for token, label in zip(inputs, labels, strict=True))
        assert all(label % 100_000 < lengths[label // 100_000] for label in labels if label != IGNORE_INDEX)


def test_a_rank_reads_only_the_tokens_of_its_slice() -> None:
    store = MemoryStore([64])
    slice_row(store, 0, 64, [piece(0, 0, 64)], 1, 4)
    assert store.num_tokens_read == 16 + 1


def test_a_filler_is_all_padding() -> None:
    store = MemoryStore([9])
    filler = RowReader(store, build_plan(store.lengths, "memory", SETTINGS)).filler(1, 2)
    assert filler.is_filler and filler.row == -1 and filler.row_tokens == 8
    assert filler.document_lengths == () and filler.num_supervised == 0
    assert filler.position_ids.tolist() == [4, 5, 6, 7]


def test_an_sp_size_that_does_not_divide_a_row_is_refused() -> None:
    store = MemoryStore([9])
    reader = RowReader(store, build_plan(store.lengths, "memory", SETTINGS))
    with pytest.raises(
        ValueError, match=r"row 0 has 16 tokens, .*not a multiple of the 3 that parallel\.sp_size=3 needs"
    ):
        reader.read("train", 0, 0, 3)


def test_a_plan_of_another_corpus_is_refused(tmp_path: Path) -> None:
    corpus = text_corpus(tmp_path, ["some text"])
    planned = PlannedSource(path=str(corpus.path), fingerprint="elsewhere", num_documents=1)
    plan = build_plan(corpus.lengths, "elsewhere", SETTINGS)
    with pytest.raises(UserError, match=r"the corpus was replaced since planning"):
        RowReader(CorpusSet([planned]), plan).read("train", 0, 0, 1)


def test_the_evaluation_split_is_read_from_its_own_rows() -> None:
    store = MemoryStore(list(range(2, 80)))
    plan = build_plan(store.lengths, "memory", replace(SETTINGS, eval_fraction=0.3, eval_rows=4))
    reader = RowReader(store, plan)
    for row in range(plan.evaluation.num_rows):
        found = reader.read("evaluation", row, 0, 1)
        assert found.document_lengths == tuple(p.length for p in plan.evaluation.pieces(row))
        assert found.num_supervised == plan.evaluation.stats(row, row + 1).supervised[0]
