"""Places a run's workers on nodes: as many as fit, and each sequence-parallel group on one node if possible.

Also decides how many workers a run starts with, and when it restarts with a different number.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerRange:
    """Limits of a run's number of workers, both multiples of ``sp_size``."""

    least: int
    most: int
    sp_size: int


def place_workers(room: Mapping[str, int], wanted: WorkerRange, first: Collection[str] = ()) -> dict[str, int] | None:
    """Return the number of workers for each node, or None if fewer than ``wanted.least`` workers fit.

    Each group is placed on a single node, starting with the nodes that fit the most groups. Groups span nodes only if
    the run would otherwise get less than its minimum number of workers: a spanning group causes network traffic in
    every layer, and every step waits for the slowest group. Spanning groups start on the node with the most capacity
    left. If no node fits a complete group, all groups span nodes, and as many groups are formed as fit in total.

    ``room`` is the number of workers that fit on each node. Among nodes that fit equally many groups, those in
    ``first`` are preferred. The result is in the order in which ranks are assigned, so that a group's ranks are
    contiguous.
    """
    sp_size = wanted.sp_size
    # Ties go to the smaller node ID, so that the same nodes give the same placement.
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
    # Nodes without spanning groups come first, so that their ranks stay aligned with the groups.
    aligned = {node: workers for node, workers in placed.items() if node not in spanning}
    return aligned | {node: placed.get(node, 0) + spanning[node] for node in spanning}


def nodes_to_use(
    nodes: Collection[str],
    slow: Mapping[str, float],
    in_use: Collection[str],
    workers: Callable[[Collection[str]], int],
) -> frozenset[str]:
    """Return the nodes to use, without the slow nodes if the run is faster without them.

    Every rank waits for the slowest rank, so fewer workers pay off if they are faster by at least the same factor.

    Args:
        nodes: Available nodes.
        slow: Compute time of each slow node relative to the median, by node; infinite for a broken node.
        in_use: Nodes that run workers. Among slow nodes, these are used first, so that a run does not alternate.
        workers: Returns the number of workers that fit on the given nodes, or 0 if these are too few for the run.
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
"""Seconds to wait for further nodes before growing, and for resources that are about to become free."""
LEAVE_S = 2.0
"""Seconds to wait for further preemption notices, so that one restart vacates all affected nodes."""
_GAIN_PER_COST = 10.0
"""Factor by which the time saved by growing must exceed the time for the restart: growing may fail."""
_HORIZON_S = 24 * 3600.0
"""Longest time over which savings count, in seconds: spot nodes rarely stay for longer than a day."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizing:
    """State of the decisions about a run's size."""

    since: float | None = None
    """Time at which the available nodes began to differ from the nodes in use or awaited; None if they are the same."""
    grew_at: float | None = None
    """Time at which growth was last considered, regardless of the outcome, or None if never."""

    def waited(self, now: float) -> tuple[Sizing, float]:
        """Return the state with `since` set, and the seconds since then, for nodes that currently differ."""
        since = now if self.since is None else self.since
        return replace(self, since=since), now - since


@dataclass(frozen=True, kw_only=True, slots=True)
class Resize:
    """A restart of training workers."""

    workers: int
    must: bool
    """Whether the restart is necessary because nodes will be lost. Otherwise it may not be worth its cost."""


def decide_placement(
    seen: Sizing, *, free: Mapping[str, int], total: Mapping[str, int], wanted: WorkerRange, now: float
) -> tuple[Sizing, dict[str, int] | None]:
    """Decide where to start workers at the monotonic time ``now``.

    Return the next state, and the workers by node ID, or None to try again a moment later. ``free`` is the number of
    workers that currently fit on each node, and ``total`` the number that would fit if nothing else ran there.
    """
    placed = place_workers(free, wanted)
    if _num(placed) < _num(place_workers(total, wanted)):
        # Workers that have just ended, or a run that is about to end, may still occupy resources.
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
    """Decide at the monotonic time ``now`` whether to restart training on other nodes or with more or fewer workers.

    Return the next state, and the restart, or None to leave the workers unchanged. A restart vacates nodes that will be
    lost, if the other nodes fit enough workers, or uses resources that have become free. ``placed`` are the training
    workers by node ID, and ``room`` is the number of workers that fit on each remaining node, counting this run's own
    workers. ``grow_interval_s`` is the shortest time between two considerations of growth.
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
    """Return whether restarting with as many workers as are possible saves enough time.

    ``seconds_left`` is the remaining time of the run at its current size, or None if unknown, which is treated as a
    day. ``restart_s`` is the time from the last step before a restart to the first step after it.
    """
    if possible <= workers:
        return False
    left = _HORIZON_S if seconds_left is None else min(seconds_left, _HORIZON_S)
    # The duration of a step is roughly inversely proportional to the number of workers.
    saved_s = left * (1.0 - workers / possible)
    return saved_s >= _GAIN_PER_COST * restart_s


def _num(placed: Mapping[str, int] | None) -> int:
    return 0 if placed is None else sum(placed.values())
