"""How many failures a run survives: those of a window of time, and none from before its last progress (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class PastFailure:
    """A failure that was charged.

    Attributes:
        time: When, in seconds since the epoch.
        step: The newest committed step then; None where it was not known.
    """

    time: float
    step: int | None


def failures_that_count(past: Sequence[PastFailure], *, now: float, step: int | None, window_s: float) -> int:
    """Return how many of the earlier failures count beside one that happens now.

    A checkpoint that was committed since then is progress: a fault that comes back before the next checkpoint is one of
    the program, and one that comes after is bad luck.

    Args:
        past: Earlier failures of the same command.
        now: Now, in seconds since the epoch.
        step: The newest committed step; None where it is not known, which is no progress.
        window_s: Older failures don't count.
    """
    return sum(
        now - failure.time <= window_s and not (step is not None and failure.step is not None and failure.step < step)
        for failure in past
    )
