"""Places the workers of a run on nodes: as many as fit, each sequence-parallel group on one node where one holds it.

It also decides with how many workers a run starts, and when it is restarted at another number (pure).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerRange:
    """The limits of a run's number of workers; both are multiples of ``sp_size``."""

    least: int
    most: int
    sp_size: int


def place_workers(room: Mapping[str, int], wanted: WorkerRange, first: Collection[str] = ()) -> dict[str, int] | None:
    """Return how many workers each node gets (pure).

    Groups are placed whole on single nodes, on the nodes that hold most of them first. Only where that gives fewer
    workers than the run needs at least do groups span nodes, which costs network traffic in every layer, and every step
    waits for the slowest group; the first node of a group is then the one with the most room left. Where no node has
    room for a whole group, every group spans nodes, and there are as many as the nodes together have room for.

    Args:
        room: Workers that each node has room for, by node id.
        wanted: The run's range of workers.
        first: Nodes that are taken before others that hold as many groups.

    Returns:
        Workers by node id, in the order in which ranks are to be assigned, so that a group's ranks are contiguous;
        None if the nodes hold fewer than ``wanted.least`` workers.
    """
    sp_size = wanted.sp_size
    # Ties go to the smaller id, so that the same nodes give the same placement.
    order = sorted(room, key=lambda node: (-(room[node] // sp_size), node not in first, node))
    placed: dict[str, int] = {}
    for node in order:
        workers = min(room[node], wanted.most - sum(placed.values())) // sp_size * sp_size
        if workers > 0:
            placed[node] = workers
    if sum(placed.values()) >= wanted.least:
        return placed
    spanned = 0 if placed else min(sum(room.values()), wanted.most) // sp_size * sp_size
    missing = max(wanted.least, spanned) - sum(placed.values())
    left = {node: room[node] - placed.get(node, 0) for node in order}
    if sum(left.values()) < missing:
        return None
    spanning: dict[str, int] = {}
    for node in sorted(left, key=lambda node: (-left[node], node)):
        taken = min(left[node], missing - sum(spanning.values()))
        if taken > 0:
            spanning[node] = taken
    # Nodes that hold whole groups only come first: their ranks then stay aligned with the groups.
    aligned = {node: workers for node, workers in placed.items() if node not in spanning}
    return aligned | {node: placed.get(node, 0) + spanning[node] for node in spanning}


def nodes_to_use(
    nodes: Collection[str],
    slow: Mapping[str, float],
    in_use: Collection[str],
    workers: Callable[[Collection[str]], int],
) -> frozenset[str]:
    """Return the nodes to use: without the slow ones, as far as a run is faster without them.

    Every rank waits for the slowest, so fewer workers pay off where they are faster by as much.

    Args:
        nodes: The nodes that stay.
        slow: How many times as long as the median's the compute of a slow node takes, by node; infinite for a broken
            one.
        in_use: The nodes where workers are; of slow ones they are used first, so that no run changes between them.
        workers: Returns how many workers nodes hold; 0 if they are too few for a run.
    """
    usable = {node for node in nodes if node not in slow}
    every = workers(nodes)
    for node in sorted(slow.keys() & set(nodes), key=lambda one: (one not in in_use, slow[one])):
        gain = max(slow[one] for one in nodes if one not in usable)
        others = workers(usable)
        if others and others * gain > every:
            break
        usable.add(node)
    return frozenset(usable)


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


def decide_placement(
    seen: Sizing, *, free: Mapping[str, int], total: Mapping[str, int], wanted: WorkerRange, now: float
) -> tuple[Sizing, dict[str, int] | None]:
    """Decide where to start workers now.

    Args:
        seen: The state of these decisions.
        free: Workers that each node has room for now.
        total: Workers that each node would have room for if nothing else ran there.
        wanted: The range of the run.
        now: Seconds on a clock that only moves forward.

    Returns:
        The next state, and workers by node id; None to look again a moment later.
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
    """Decide whether to restart training workers elsewhere or at another number.

    Args:
        seen: The state of these decisions.
        placed: Workers by node id, as they train now.
        room: Workers that each node that stays has room for, those of this run included.
        wanted: The range of the run.
        now: Seconds on a clock that only moves forward.
        grow_interval_s: Shortest time between two considerations of growth.

    Returns:
        The next state, and the restart: away from nodes that are going to be taken, where the others hold
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
