"""Counts the failures that are charged to a run: those of a window of time and since its last progress (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ray_ulysses.tracking.events import EndEvent


def has_progressed(*, began_at: int, step: int | None, memory_step: int | None) -> bool:
    """Return whether an attempt left a whole state that is newer than the one from which it began.

    Workers that form again after such an attempt lose next to nothing, so that its failure is not charged to the run.

    Args:
        began_at: The step from which the attempt began.
        step: The newest committed step; None if unknown.
        memory_step: The newest step of which peer memory holds a whole state; None without.
    """
    return max((one for one in (step, memory_step) if one is not None), default=began_at) > began_at


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
