"""Failures count within a window, and not beyond the last progress."""

from __future__ import annotations

from ray_ulysses.elastic.causes import failures_that_count
from ray_ulysses.tracking.events import StartFailed

DAY = 86400.0


def _failed(time: float, step: int | None, number: int | None = 1) -> StartFailed:
    return StartFailed(time=time, attempt=1, reason="lost", committed_step=step, failure=number)


def _past(*failures: tuple[float, int | None]) -> list[StartFailed]:
    return [_failed(time, step) for time, step in failures]


def test_failures_without_progress_count() -> None:
    past = _past((0.0, 10), (60.0, 10), (120.0, 10))
    assert failures_that_count(past, now=180.0, step=10, window_s=DAY) == 3


def test_a_newer_checkpoint_forgives_what_came_before_it() -> None:
    past = _past((0.0, 10), (60.0, 10), (120.0, 20))
    assert failures_that_count(past, now=180.0, step=20, window_s=DAY) == 1
    assert failures_that_count(past, now=180.0, step=30, window_s=DAY) == 0


def test_a_failure_outside_of_the_window_does_not_count() -> None:
    past = _past((0.0, 10), (60.0, 10))
    assert failures_that_count(past, now=DAY + 30.0, step=10, window_s=DAY) == 1


def test_a_month_of_lost_workers_ends_no_run_and_a_fault_of_the_program_does() -> None:
    past: list[StartFailed] = []
    for day in range(30):
        now, step = day * DAY / 2, 100 * day
        assert failures_that_count(past, now=now, step=step, window_s=DAY) == 0
        past.append(_failed(now, step))
    crashing: list[StartFailed] = []
    for count in range(4):
        assert failures_that_count(crashing, now=60.0 * count, step=50, window_s=DAY) == count
        crashing.append(_failed(60.0 * count, 50))


def test_a_storage_that_does_not_say_is_no_progress() -> None:
    assert failures_that_count(_past((0.0, 10), (1.0, None)), now=2.0, step=None, window_s=DAY) == 2
    assert failures_that_count(_past((1.0, None)), now=2.0, step=10, window_s=DAY) == 1


def test_what_was_not_charged_does_not_count() -> None:
    preempted = [_failed(float(time), 10, number=None) for time in range(3)]
    assert failures_that_count([*preempted, _failed(3.0, 10)], now=4.0, step=10, window_s=DAY) == 1
