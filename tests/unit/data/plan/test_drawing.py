"""The order in which documents are drawn: a fair permutation, independent of block boundaries."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_ulysses.data.plan.drawing import CHUNK, COUNTERS, Drawing, Permutation
from ray_ulysses.data.plan.rows import Fragments, Pieces
from ray_ulysses.data.plan.segment import PlanSettings

SEEDS = (7, 0, 1)


@pytest.mark.parametrize("block_pieces", [100, CHUNK - 1, CHUNK, CHUNK + 1, 10 * CHUNK])
def test_every_document_and_fragment_is_drawn_at_its_place(block_pieces: int) -> None:
    lengths = (np.arange(3 * CHUNK + 5) * 37 % 900 + 2).astype(np.uint32)
    sizes = np.array([0, 2 * CHUNK - 3, lengths.size], dtype=np.int64)
    fragments = Fragments(
        document=np.array([4, 9]), start=np.array([2, 0], dtype=np.int64), length=np.array([5, 3], dtype=np.int64)
    )
    drawing = Drawing(lengths, sizes, PlanSettings(seed=7, context_tokens=1000, pad_multiple=8, rows_per_step=1))
    counters = np.zeros(len(COUNTERS), dtype=np.int64)
    blocks = list(drawing.pieces(np.diff(sizes).tolist(), SEEDS, fragments, counters, block_pieces=block_pieces))
    found = Pieces.join(blocks)
    order = Permutation.seeded(lengths.size + 2, *SEEDS).elements(0, lengths.size + 2)
    whole = order < lengths.size
    assert np.array_equal(found.document, np.where(whole, order, np.where(order == lengths.size, 4, 9)))
    assert np.array_equal(found.length[whole], lengths[order[whole]])
    assert found.start[~whole].tolist() == [fragments.start[one - lengths.size] for one in order[~whole]]
    assert found.has_next.tolist() == (~whole & (found.start + found.length < lengths[found.document])).tolist()
    assert {block.size for block in blocks[:-1]} <= {block_pieces}


@settings(deadline=None)  # the first call compiles
@given(size=st.integers(1, 3000), seed=st.integers(0, 2**63))
def test_a_permutation_has_every_element_once(size: int, seed: int) -> None:
    assert np.array_equal(np.sort(Permutation.seeded(size, seed).elements(0, size)), np.arange(size))
    large = Permutation.seeded(10**12 + size, seed).elements(10**12 - 1, 10**12 + 1)
    assert len(set(large.tolist())) == 2 and (large < 10**12 + size).all()


def test_permutations_of_many_seeds_are_as_even_as_fair_shuffles() -> None:
    size, draws = 64, 3000
    orders = np.stack([Permutation.seeded(size, seed).elements(0, size) for seed in range(draws)])
    counts = np.stack([np.bincount(orders[:, place], minlength=size) for place in range(size)])
    expected = draws / size
    chi_square = ((counts - expected) ** 2 / expected).sum() / (size - 1) ** 2
    assert 0.9 < chi_square < 1.1, "1 for a fair shuffle"
    neighbours = (np.abs(np.diff(orders, axis=1)) == 1).mean()
    assert abs(neighbours - 2 / size) < 0.003
