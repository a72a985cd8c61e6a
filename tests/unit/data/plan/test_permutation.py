from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_ulysses.data.plan.drawing import Permutation


@settings(deadline=None)  # the first call compiles
@given(size=st.integers(1, 3000), seed=st.integers(0, 2**63))
def test_every_element_comes_once(size: int, seed: int) -> None:
    order = Permutation.seeded(size, seed).elements(0, size)
    assert np.array_equal(np.sort(order), np.arange(size))


def test_an_order_follows_its_seeds_alone() -> None:
    order = Permutation.seeded(1000, 1, 2).elements(0, 1000)
    assert np.array_equal(order, Permutation.seeded(1000, 1, 2).elements(0, 1000))
    assert not np.array_equal(order, Permutation.seeded(1000, 2, 1).elements(0, 1000))
    assert not np.array_equal(order, Permutation.seeded(1000, 1, 3).elements(0, 1000))


def test_an_order_is_as_even_as_a_shuffle() -> None:
    """Each element's mean place over many seeds, and neighbours that stay neighbours, as chance would have it."""
    size, draws = 64, 3000
    orders = np.stack([Permutation.seeded(size, seed).elements(0, size) for seed in range(draws)])
    counts = np.stack([np.bincount(orders[:, place], minlength=size) for place in range(size)])
    expected = draws / size
    chi_square = ((counts - expected) ** 2 / expected).sum() / (size - 1) ** 2
    assert 0.9 < chi_square < 1.1, "1 for a fair shuffle"
    neighbours = (np.abs(np.diff(orders, axis=1)) == 1).mean()
    assert abs(neighbours - 2 / size) < 0.003


def test_a_place_of_a_very_large_order_is_known_at_once() -> None:
    order = Permutation.seeded(10**12, 5)
    found = np.concatenate([order.elements(0, 2), order.elements(10**12 - 1, 10**12)])
    assert len(set(found.tolist())) == 3
    assert (found < 10**12).all()
