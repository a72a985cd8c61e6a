"""Failures count within a window, and not beyond the last progress."""

from __future__ import annotations

import pytest

from ray_ulysses.elastic.causes import failures_that_count
from ray_ulysses.tracking.events import StartFailed

DAY = 86400.0


def failed(time: float, step: int | None, number: int | None = 1) -> StartFailed:
    return StartFailed(time=time, attempt=1, reason="lost", committed_step=step, failure=number)


@pytest.mark.parametrize(
    ("past", "now", "step", "count"),
    [
        pytest.param([(0.0, 10), (60.0, 10), (120.0, 10)], 180.0, 10, 3, id="no progress"),
        pytest.param([(0.0, 10), (60.0, 10), (120.0, 20)], 180.0, 20, 1, id="a newer checkpoint forgives"),
        pytest.param([(0.0, 10), (60.0, 10), (120.0, 20)], 180.0, 30, 0, id="forgives all"),
        pytest.param([(0.0, 10), (60.0, 10)], DAY + 30.0, 10, 1, id="outside of the window"),
        pytest.param([(0.0, 10), (1.0, None)], 2.0, None, 2, id="a storage that does not say is no progress"),
        pytest.param([(1.0, None)], 2.0, 10, 1, id="it did not say before"),
        pytest.param([(0.0, 10, None), (1.0, 10, None), (3.0, 10)], 4.0, 10, 1, id="not charged"),
    ],
)
def test_failures_count_without_progress_within_the_window(
    past: list[tuple[float, int]], now: float, step: int | None, count: int
) -> None:
    assert failures_that_count([failed(*one) for one in past], now=now, step=step, window_s=DAY) == count


def test_a_month_of_lost_workers_ends_no_run() -> None:
    past = [failed(day * DAY / 2, 100 * day) for day in range(30)]
    for day in range(1, 31):
        assert failures_that_count(past[:day], now=day * DAY / 2, step=100 * day, window_s=DAY) == 0
