"""Decides whether a run is to continue on more workers than it has (pure)."""

from __future__ import annotations

_GAIN_PER_COST = 10.0
"""Growing restarts the workers, and may fail: it has to save this many times what it costs."""
_HORIZON_S = 24 * 3600.0
"""Nodes that come and go with spot prices rarely stay for longer than a day."""


def is_worth_growing(workers: int, possible: int, *, seconds_left: float | None, restart_s: float) -> bool:
    """Return whether restarting the workers at a larger number saves enough time.

    Args:
        workers: Workers now.
        possible: Workers that the nodes have room for.
        seconds_left: Time that the run still takes at the present number; None where it is not known, which counts as
            the whole horizon.
        restart_s: Seconds from the last step before a restart to the first one after it.
    """
    if possible <= workers:
        return False
    left = _HORIZON_S if seconds_left is None else min(seconds_left, _HORIZON_S)
    # Steps take about as much less time as there are more workers.
    saved_s = left * (1.0 - workers / possible)
    return saved_s >= _GAIN_PER_COST * restart_s
