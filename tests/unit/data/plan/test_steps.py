from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_ulysses.data.plan.steps import assign_rows, balance_windows, num_micro_batches, step_times


@given(costs=st.lists(st.integers(0, 1000), min_size=1, max_size=40), dp_size=st.integers(1, 9))
def test_every_row_of_a_step_is_dealt_once(costs: list[int], dp_size: int) -> None:
    rows = range(100, 100 + len(costs))
    dealt = assign_rows(rows, costs, dp_size)
    assert len(dealt) == num_micro_batches(len(costs), dp_size)
    assert all(len(micro_batch) == dp_size for micro_batch in dealt)
    flat = [row for micro_batch in dealt for row in micro_batch]
    assert sorted(row for row in flat if row is not None) == list(rows)
    assert sum(row is None for row in flat) == len(dealt) * dp_size - len(costs)
    assert all(None not in micro_batch for micro_batch in dealt[:-1])


def test_micro_batches_hold_neighbours_in_cost_and_alternate_direction() -> None:
    assert assign_rows([0, 1, 2, 3, 4], [10, 50, 20, 40, 30], 2) == ((1, 3), (2, 4), (0, None))


@given(
    costs=st.lists(st.integers(1, 1000), min_size=1, max_size=60),
    rows_per_step=st.integers(1, 12),
    dp_size=st.integers(1, 5),
)
def test_imbalance_is_the_lockstep_time_of_the_dealing(costs: list[int], rows_per_step: int, dp_size: int) -> None:
    lockstep = 0
    for first in range(0, len(costs), rows_per_step):
        rows = range(first, min(first + rows_per_step, len(costs)))
        for micro_batch in assign_rows(rows, [costs[row] for row in rows], dp_size):
            lockstep += max(costs[row] for row in micro_batch if row is not None)
    expected = lockstep * dp_size / sum(costs)
    times = step_times(np.asarray(costs), rows_per_step, dp_size)
    assert times.imbalance == pytest.approx(expected, rel=1e-12)
    assert 1.0 - 1e-12 <= times.bound <= times.imbalance * (1 + 1e-12)
    assert times.fast <= 1.0 + 1e-12
    assert times.slow >= 1.0 - 1e-12


def test_the_bound_is_the_mean_of_the_ranks_or_the_dearest_row() -> None:
    assert step_times(np.array([8, 1, 1, 2, 6, 6]), 3, 2).bound == pytest.approx((8 + 7) * 2 / 24)


@given(
    costs=st.lists(st.integers(0, 1000), max_size=80),
    rows_per_step=st.integers(1, 9),
    num_steps=st.integers(1, 5),
    first_row=st.integers(0, 50),
)
def test_windows_move_rows_only_within_themselves(
    costs: list[int], rows_per_step: int, num_steps: int, first_row: int
) -> None:
    order = balance_windows(np.asarray(costs, dtype=np.int64), rows_per_step, num_steps, first_row)
    window = rows_per_step * num_steps
    places = np.arange(len(costs))
    assert sorted(order.tolist()) == places.tolist()
    assert np.array_equal((order + first_row) // window, (places + first_row) // window)


def test_each_step_of_a_window_holds_rows_of_all_costs() -> None:
    order = balance_windows(np.arange(64)[::-1].copy(), 16, 4)
    sums = np.arange(64)[::-1][order].reshape(4, 16).sum(axis=1)
    assert np.ptp(sums) == 0
    groups = np.sort(order.reshape(4, 4, 4), axis=2)
    assert (np.diff(groups, axis=2) == 1).all(), "a step holds groups of neighbours"
