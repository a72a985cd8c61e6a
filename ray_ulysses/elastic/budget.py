"""Counts the failures that are charged to a run: those of a window of time and since its last progress (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ray_ulysses.tracking.events import EndEvent


def failures_that_count(past: Sequence[EndEvent], *, now: float, step: int | None, window_s: float) -> int:
    """Return how many of the earlier failures count beside one that happens now.

    A checkpoint that was committed since a failure is progress: a fault that recurs before the next checkpoint is the
    program's, and one that recurs after it is bad luck.

    Args:
        past: Earlier failures of the same command; those that were not charged don't count.
        now: Now, in seconds since the epoch.
        step: The newest committed step; None if unknown, which is no progress.
        window_s: Older failures don't count.
    """
    return sum(
        failure.failure is not None
        and now - failure.time <= window_s
        and not (step is not None and failure.committed_step is not None and failure.committed_step < step)
        for failure in past
    )
