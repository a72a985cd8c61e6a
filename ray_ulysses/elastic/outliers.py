"""Finds loss spikes, and ranks that stay slower than the others, for example because of a throttled GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median, median_low

RATIO = 1.3
"""A rank is slow in a window if its own compute time exceeds the median rank's by this factor. With an even number of
ranks, the lower median is used, so that one slow node of two is found."""
WINDOWS = 5
"""Number of consecutive slow windows after which a rank is reported."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Straggler:
    """A slow rank."""

    rank: int
    windows: int
    """Number of consecutive windows in which the rank was slow."""
    ratio: float
    """The rank's compute time in the newest window, divided by the median."""

    @property
    def is_named(self) -> bool:
        """Whether the rank has been slow for long enough to be reported."""
        return self.windows >= WINDOWS

    def said(self, node: str) -> str:
        """Return the warning about this rank, given its node's name."""
        return (
            f"rank {self.rank} on {node} computes {self.ratio:.1f} times as long as the median rank, in {self.windows} "
            "measurements in a row: check its GPU for throttling and its node for other work"
        )


def after_window(slow: Sequence[Straggler], compute_s: Mapping[int, float]) -> tuple[Straggler, ...]:
    """Return the ranks that were slow in the next window of steps, by rank, given those of the previous window.

    ``compute_s`` contains the seconds of each rank's own compute, without waits for other ranks, divided by the rank's
    share of the work if shares differ. A rank that is missing restarts at zero windows.
    """
    windows = {one.rank: one.windows for one in slow}
    middle = median_low(compute_s.values()) if compute_s else 0.0
    return tuple(
        Straggler(rank=rank, windows=windows.get(rank, 0) + 1, ratio=seconds / middle)
        for rank, seconds in sorted(compute_s.items())
        if middle > 0 and seconds > RATIO * middle
    )


WINDOW_STEPS = 50
"""Number of recent steps whose losses a new loss is compared with."""
LEAST_STEPS = 20
"""Number of initial steps whose losses never count as spikes, since losses fall fast at the start of a run."""
_LEAST_SPREAD = 0.01
"""Lower bound of the spread, as a fraction of the median: nearly constant losses would turn any change into a spike."""


def spike_bound(losses: Sequence[float], mads: float) -> float | None:
    """Return the loss above which the next step is a spike: median + ``mads`` x median absolute deviation.

    The result is None if there are too few steps.
    """
    window = losses[-WINDOW_STEPS:]
    if len(window) < LEAST_STEPS:
        return None
    middle = median(window)
    spread = median(abs(loss - middle) for loss in window)
    return middle + mads * max(spread, _LEAST_SPREAD * abs(middle))
