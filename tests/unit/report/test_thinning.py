from __future__ import annotations

import itertools

import numpy as np
import pytest

from ray_ulysses.report.drawing import not_finite, thin


@pytest.mark.parametrize("spike", [-7.0, 99.5])
@pytest.mark.parametrize("place", [0, 1, 50_000, 54_321, 99_999])
def test_no_spike_is_dropped(spike: float, place: int) -> None:
    y = np.sin(np.arange(100_000) / 1000)
    y[place] = spike
    columns, values = thin(np.arange(100_000, dtype=np.float64), y, columns=100)
    assert len(values) <= 400
    assert values[columns == place] == [spike]


def test_a_thinned_curve_keeps_the_extremes_and_the_order() -> None:
    rng = np.random.default_rng(0)
    x, y = np.cumsum(rng.random(50_000)), rng.standard_normal(50_000)
    columns, values = thin(x, y, columns=64)
    assert (np.diff(columns) > 0).all()
    edges = np.linspace(x[0], x[-1], 65)
    for low, high in itertools.pairwise(edges):
        inside, kept = y[(x >= low) & (x < high)], values[(columns >= low) & (columns < high)]
        assert (kept.min(), kept.max()) == (inside.min(), inside.max())


def test_few_points_are_unchanged_and_non_finite_points_are_separate() -> None:
    x, y = np.arange(5.0), np.array([1.0, np.nan, 3.0, np.inf, 5.0])
    assert [list(one) for one in thin(x, y)] == [[0, 2, 4], [1, 3, 5]]
    assert list(not_finite(x, y)) == [1, 3]
    many = not_finite(np.arange(10_000.0), np.full(10_000, np.nan), columns=10)
    assert list(many[:2]) == [0, 1000] and len(many) == 10
