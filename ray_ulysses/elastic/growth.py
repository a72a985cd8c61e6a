"""Decides whether a run is to continue on more workers than it has (pure)."""

from __future__ import annotations

from collections.abc import Mapping

from ray_ulysses.elastic.placement import WorkerRange, place_workers

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


def place_more(workers: int, free: Mapping[str, int], wanted: WorkerRange) -> dict[str, int]:
    """Return how many workers join those that train, by node id; none where no whole group of them has room.

    Args:
        workers: Workers now.
        free: Workers that each node has room for beside them.
        wanted: The run's range of workers.
    """
    most = (wanted.most - workers) // wanted.sp_size * wanted.sp_size
    if most < wanted.sp_size:
        return {}
    return place_workers(free, WorkerRange(least=wanted.sp_size, most=most, sp_size=wanted.sp_size)) or {}
