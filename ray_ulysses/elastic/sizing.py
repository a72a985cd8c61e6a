"""Decides with how many workers a run starts, and when it is restarted at another number (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ray_ulysses.elastic.placement import WorkerRange, place_workers

SETTLE_S = 5.0
"""Nodes that come within this time are one reason to grow, and room that is about to become free is waited for."""
LEAVE_S = 2.0
"""Nodes that are announced to go within this time are left together; every second is one of their last."""
_GAIN_PER_COST = 10.0
"""Growing restarts the workers, and may fail: it has to save this many times what it costs."""
_HORIZON_S = 24 * 3600.0
"""Nodes that come and go with spot prices rarely stay for longer than a day."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizing:
    """The state of the decisions about a run's size."""

    since: float | None = None
    """When the nodes first differed from what the run has or waits for; None while they do not."""
    grew_at: float | None = None
    """When growth was last considered, whatever came of it; None if never."""

    def waited(self, now: float) -> tuple[Sizing, float]:
        """Return the state after a look that found a difference, and for how long there has been one."""
        since = now if self.since is None else self.since
        return replace(self, since=since), now - since


@dataclass(frozen=True, kw_only=True, slots=True)
class Resize:
    """A restart of workers that train."""

    workers: int
    must: bool
    """Whether nodes are going to be taken away; otherwise it may not be worth its cost."""


def decide_start(
    seen: Sizing, *, free: Mapping[str, int], total: Mapping[str, int], wanted: WorkerRange, now: float
) -> tuple[Sizing, dict[str, int] | None]:
    """Return where workers are started now.

    Args:
        seen: What was seen before.
        free: Workers that each node has room for now.
        total: Workers that each node would have room for if nothing else ran there.
        wanted: The range of the run.
        now: Seconds on a clock that only moves forward.

    Returns:
        What has been seen by now, and workers by node id; None to look again a moment later.
    """
    placed = place_workers(free, wanted)
    if _num(placed) < _num(place_workers(total, wanted)):
        # Workers that ended a moment ago, or a run that is about to end, still hold some of the room.
        seen, waited_s = seen.waited(now)
        if placed is None or waited_s < SETTLE_S:
            return seen, None
    return replace(seen, since=None), placed


def decide_resize(
    seen: Sizing,
    *,
    placed: Mapping[str, int],
    room: Mapping[str, int],
    wanted: WorkerRange,
    now: float,
    grow_interval_s: float,
) -> tuple[Sizing, Resize | None]:
    """Return whether workers that train are to be started again elsewhere or at another number.

    Args:
        seen: What was seen before.
        placed: Workers by node id, as they train now.
        room: Workers that each node that stays has room for, those of this run included.
        wanted: The range of the run.
        now: Seconds on a clock that only moves forward.
        grow_interval_s: Shortest time between two considerations of growth.

    Returns:
        What has been seen by now, and the restart: away from nodes that are going to be taken, where the others hold
        enough workers, or onto room that has become free; None to leave the workers alone.
    """
    possible = place_workers(room, wanted)
    leaves = any(node not in room for node in placed)
    may_grow = seen.grew_at is None or now - seen.grew_at >= grow_interval_s
    if possible is None or not (leaves or (may_grow and _num(possible) > _num(placed))):
        return replace(seen, since=None), None
    seen, waited_s = seen.waited(now)
    if waited_s < (LEAVE_S if leaves else SETTLE_S):
        return seen, None
    settled = replace(seen, since=None, grew_at=seen.grew_at if leaves else now)
    return settled, Resize(workers=_num(possible), must=leaves)


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


def _num(placed: Mapping[str, int] | None) -> int:
    return 0 if placed is None else sum(placed.values())
