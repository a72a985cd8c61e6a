"""When a loss counts as a spike."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_ulysses.elastic.outliers import LEAST_STEPS, WINDOW_STEPS, spike_bound

LOSSES = st.lists(st.floats(0.01, 20.0), min_size=LEAST_STEPS, max_size=2 * WINDOW_STEPS)


def test_a_loss_far_above_the_newest_ones_is_a_spike() -> None:
    losses = [9.0, *([2.0, 2.1, 1.9, 2.2, 1.8] * 10)]
    # Of the last 50 the median is 2.0, and half of them are within 0.1 of it.
    assert spike_bound(losses, 6.0) == pytest.approx(2.6)
    # One spike among them moves neither.
    assert spike_bound([*losses, 50.0], 6.0) == pytest.approx(2.6)


def test_nothing_is_a_spike_among_few_steps_and_equal_losses_need_a_difference() -> None:
    assert spike_bound([2.0] * (LEAST_STEPS - 1), 6.0) is None
    assert spike_bound([2.0] * LEAST_STEPS, 6.0) == pytest.approx(2.0 + 6.0 * 0.02)


@given(LOSSES, st.floats(0.5, 50.0), st.floats(0.1, 10.0))
def test_the_bound_follows_the_unit_and_grows_with_the_setting(losses: list[float], mads: float, unit: float) -> None:
    bound = spike_bound(losses, mads)
    assert bound is not None and bound == spike_bound(losses[-WINDOW_STEPS:], mads)
    assert spike_bound([unit * loss for loss in losses], mads) == pytest.approx(unit * bound)
    assert spike_bound(losses, 2 * mads) > bound > sorted(losses[-WINDOW_STEPS:])[len(losses[-WINDOW_STEPS:]) // 2 - 1]
    # A step at the median of the others is none.
    assert sum(loss > bound for loss in losses[-WINDOW_STEPS:]) <= len(losses[-WINDOW_STEPS:]) / 2
