"""Finds ranks that stay slower than the others, as on a throttled GPU, and spikes of the loss (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median, median_low

RATIO = 1.3
"""A rank is slow in a window where its own compute takes more than this multiple of the median rank's. Of an even
number of ranks the faster of the two in the middle counts, so that one slow node of two is found."""
WINDOWS = 5
"""A rank that is slow in this many windows in a row is named."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Straggler:
    """A rank that is slow."""

    rank: int
    windows: int
    """Consecutive windows in which it was slow."""
    ratio: float
    """Its compute time over the median's, in the newest one."""

    @property
    def is_named(self) -> bool:
        """Whether it has been slow for long enough to be named."""
        return self.windows >= WINDOWS

    def said(self, node: str) -> str:
        """Return the warning, with the name of the rank's node."""
        return (
            f"rank {self.rank} on {node} computes {self.ratio:.1f} times as long as the median rank, in {self.windows} "
            "measurements in a row: check its GPU for throttling and its node for other work"
        )


def after_window(slow: Sequence[Straggler], compute_s: Mapping[int, float]) -> tuple[Straggler, ...]:
    """Return the ranks that were slow in one more window of steps, by rank.

    Args:
        slow: The slow ranks of the window before.
        compute_s: Seconds that each rank has spent on its own compute, without waits for others, by rank, divided by
            its share of the work where shares differ. A rank that is missing is counted anew.
    """
    windows = {one.rank: one.windows for one in slow}
    middle = median_low(compute_s.values()) if compute_s else 0.0
    return tuple(
        Straggler(rank=rank, windows=windows.get(rank, 0) + 1, ratio=seconds / middle)
        for rank, seconds in sorted(compute_s.items())
        if middle > 0 and seconds > RATIO * middle
    )


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
