"""Rows cut for a ring: the same tokens, labels and positions, only held elsewhere; law 3 at any split."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_ulysses.data.plan.plan import Plan
from ray_ulysses.data.plan.rows import Piece
from ray_ulysses.data.plan.segment import PlanSettings
from ray_ulysses.data.read.digest import add_digests, row_digest, slice_checksum
from ray_ulysses.data.read.reader import IGNORE_INDEX, RowReader, RowSlice, slice_row
from ray_ulysses.data.read.row_source import DirectSource
from ray_ulysses.parallel.layout import held_ranges
from tests.breadth import examples
from tests.unit.data.corpora import MemoryStore
from tests.unit.data.plans import build_plan

# 2 x 6 x 2 is the least multiple that all of these can cut.
PAD = 24
SPLITS = [(1, 1), (2, 1), (3, 1), (2, 2), (3, 3), (4, 2), (6, 2), (6, 3), (6, 6), (12, 2), (12, 4)]
World = tuple[int, tuple[int, int]]
worlds = st.lists(st.tuples(st.integers(1, 3), st.sampled_from(SPLITS)), min_size=1, max_size=6)
corpora = st.lists(st.integers(1, 150), min_size=1, max_size=20).filter(lambda lengths: max(lengths) > 1)


def planned(lengths: list[int], rows_per_step: int = 3, seed: int = 0) -> tuple[MemoryStore, Plan, RowReader]:
    store = MemoryStore(lengths)
    plan_settings = PlanSettings(seed=seed, context_tokens=2 * PAD, pad_multiple=PAD, rows_per_step=rows_per_step)
    plan = build_plan(store.lengths, store.fingerprint, plan_settings)
    return store, plan, RowReader(store, plan)


def whole_row(slices: list[RowSlice], name: str) -> list[int]:
    """Put the slices' values where they belong in the row."""
    values = np.full(slices[0].row_tokens, -7, dtype=np.int64)
    for one in slices:
        place = 0
        for start, stop in held_ranges(one.row_tokens, one.sp_rank, one.sp_size, one.ring_size):
            values[start:stop] = getattr(one, name)[place : place + stop - start]
            place += stop - start
        assert place == getattr(one, name).size == one.row_tokens // one.sp_size
    return [int(value) for value in values]


@pytest.mark.parametrize("split", SPLITS, ids=lambda split: f"sp{split[0]}-ring{split[1]}")
@given(lengths=corpora, seed=st.integers(0, 99))
@settings(max_examples=examples(25))
def test_slices_of_any_split_make_the_same_row(split: tuple[int, int], lengths: list[int], seed: int) -> None:
    _, plan, reader = planned(lengths, seed=seed)
    for row in range(plan.num_rows):
        alone = reader.read("train", row, 0, 1)
        slices = [reader.read("train", row, rank, *split) for rank in range(split[0])]
        for name in ("input_ids", "labels", "position_ids"):
            assert whole_row(slices, name) == getattr(alone, name).tolist()
        assert add_digests(*map(slice_checksum, slices)) == slice_checksum(alone)


def test_a_label_crosses_the_border_of_chunks_that_lie_on_different_ranks() -> None:
    store = MemoryStore([9, 16])
    pieces = [
        Piece(document=document, start=0, length=length, has_next_label=False)
        for document, length in enumerate((9, 15))
    ]
    # Six tokens a chunk: the first document goes over a border, the second over two.
    outer, inner = (slice_row(store, 0, 24, pieces, rank, 2, 2) for rank in range(2))
    b = 100_000
    assert outer.input_ids.tolist() == [*range(6), *range(b + 9, b + 15)]
    assert outer.labels.tolist() == [*range(1, 7), *range(b + 10, b + 15), IGNORE_INDEX]
    assert inner.input_ids.tolist() == [6, 7, 8, *range(b, b + 9)]
    assert inner.labels.tolist() == [7, 8, IGNORE_INDEX, *range(b + 1, b + 10)]
    assert inner.position_ids.tolist() == [6, 7, 8, *range(9)]
    assert outer.position_ids.tolist() == [*range(6), *range(9, 15)]


def test_a_rank_of_a_ring_reads_only_its_two_ranges() -> None:
    store = MemoryStore([48])
    slice_row(store, 0, 48, [Piece(document=0, start=0, length=48, has_next_label=False)], 0, 2, 2)
    # 12 tokens and the label of the last of them; then the 12 at the end, of which the last has no label.
    assert store.num_tokens_read == 12 + 1 + 12


def test_padding_counts_positions_on_through_both_ranges() -> None:
    _, _, reader = planned([9])
    slices = [reader.filler(rank, 4, 2) for rank in range(4)]
    assert whole_row(slices, "position_ids") == list(range(PAD))
    assert all(one.is_filler and one.num_supervised == 0 for one in slices)


def test_a_row_that_a_ring_can_not_cut_is_refused() -> None:
    store = MemoryStore([9])
    with pytest.raises(ValueError, match=r"row 5 .*12|12 .*row 5") as caught:
        slice_row(store, 5, 12, [], 0, 4, 2)
    assert "parallel.sp_size=4" in str(caught.value) and "ring_size=2" in str(caught.value)


def receive_step(reader: RowReader, plan: Plan, step: int, world: World) -> list[RowSlice]:
    """What all ranks of a world of ``(dp, (sp, ring))`` receive in one step."""
    dp_size, (sp_size, ring_size) = world
    received = []
    for dp_rank in range(dp_size):
        for sp_rank in range(sp_size):
            source = DirectSource(reader, plan, dp_rank, dp_size, sp_rank, sp_size, ring_size=ring_size)
            received += list(source.step(step))
            source.close()
    return received


@settings(max_examples=examples(25))
@given(lengths=corpora, rows_per_step=st.integers(1, 5), sequence=worlds)
def test_every_planned_token_is_received_exactly_once_at_any_sequence_of_splits(
    lengths: list[int], rows_per_step: int, sequence: list[World]
) -> None:
    store, plan, reader = planned(lengths, rows_per_step)
    inputs: Counter[int] = Counter()
    labels: Counter[int] = Counter()
    for step in range(1, plan.num_steps + 1):
        slices = receive_step(reader, plan, step, sequence[(step - 1) % len(sequence)])
        supervised = [int(label) for one in slices for label in one.labels if label != IGNORE_INDEX]
        assert len(supervised) == plan.step_tokens(step), "the denominator must not depend on the split"
        labels.update(supervised)
        for row in {one.row for one in slices if not one.is_filler}:
            parts = [one for one in slices if one.row == row]
            assert sorted(one.sp_rank for one in parts) == list(range(parts[0].sp_size)), "a slice is lost or twice"
            inputs.update(whole_row(parts, "input_ids")[: sum(parts[0].document_lengths)])
    pieces = [piece for row in range(plan.num_rows) for piece in plan.pieces(row)]
    tokens = [store.token(piece.document, piece.start + at) for piece in pieces for at in range(piece.length)]
    assert inputs == Counter(tokens)
    assert labels == Counter(
        store.token(document, at) for document, size in enumerate(lengths) for at in range(1, size)
    )


@settings(max_examples=examples(15))
@given(lengths=corpora, rows_per_step=st.integers(1, 5), one=worlds, other=worlds)
def test_the_digest_of_a_run_is_the_same_at_any_sequence_of_splits(
    lengths: list[int], rows_per_step: int, one: list[World], other: list[World]
) -> None:
    _, plan, reader = planned(lengths, rows_per_step)

    def digest(sequence: list[World]) -> int:
        sums: dict[int, int] = {}
        for step in range(1, plan.num_steps + 1):
            for received in receive_step(reader, plan, step, sequence[(step - 1) % len(sequence)]):
                sums[received.row] = add_digests(sums.get(received.row, 0), slice_checksum(received))
        return add_digests(*(row_digest(row, value) for row, value in sums.items()))

    assert digest(one) == digest(other)


def test_two_ranges_that_change_places_change_the_checksum() -> None:
    _, _, reader = planned([100])
    outer = reader.read("train", 0, 0, 2, 2)
    half = outer.input_ids.size // 2
    arrays = {name: np.roll(getattr(outer, name), half) for name in ("input_ids", "labels", "position_ids")}
    swapped = RowSlice(
        row=outer.row,
        sp_rank=0,
        sp_size=2,
        ring_size=2,
        row_tokens=outer.row_tokens,
        document_lengths=outer.document_lengths,
        **arrays,
    )
    assert slice_checksum(swapped) != slice_checksum(outer)


def test_the_data_plane_imports_without_torch() -> None:
    code = "import sys, ray_ulysses.data, ray_ulysses.data.read.row_source; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
