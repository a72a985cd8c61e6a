"""Decides whether the loss of a step is a spike (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

WINDOW_STEPS = 50
"""The newest steps that a loss is compared with."""
LEAST_STEPS = 20
"""With fewer of them nothing is a spike: at the start of a run losses fall fast."""
_LEAST_SPREAD = 0.01
"""The spread counts as at least this share of the median: losses that hardly differ would make anything a spike."""


def spike_bound(losses: Sequence[float], mads: float) -> float | None:
    """Return the loss above which the next step is a spike: median + ``mads`` x median absolute deviation.

    Returns:
        The bound; None as long as there are too few steps.
    """
    window = losses[-WINDOW_STEPS:]
    if len(window) < LEAST_STEPS:
        return None
    middle = median(window)
    spread = median(abs(loss - middle) for loss in window)
    return middle + mads * max(spread, _LEAST_SPREAD * abs(middle))
