"""When a loss counts as a spike."""

from __future__ import annotations

import pytest

from ray_ulysses.elastic.outliers import LEAST_STEPS, spike_bound


def test_a_loss_far_above_the_newest_ones_is_a_spike() -> None:
    losses = [9.0, *([2.0, 2.1, 1.9, 2.2, 1.8] * 10)]
    # Of the last 50 the median is 2.0, and half of them are within 0.1 of it.
    assert spike_bound(losses, 6.0) == pytest.approx(2.6)
    assert spike_bound([3.0 * loss for loss in losses], 6.0) == pytest.approx(7.8), "it follows the unit"
    # One spike among them moves neither.
    assert spike_bound([*losses, 50.0], 6.0) == pytest.approx(2.6)


def test_nothing_is_a_spike_among_few_steps_and_equal_losses_need_a_difference() -> None:
    assert spike_bound([2.0] * (LEAST_STEPS - 1), 6.0) is None
    assert spike_bound([2.0] * LEAST_STEPS, 6.0) == pytest.approx(2.0 + 6.0 * 0.02)
