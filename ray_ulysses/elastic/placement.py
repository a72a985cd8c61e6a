"""Places the workers of a run on nodes: as many as fit, each sequence-parallel group on one node where one holds it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerRange:
    """The limits of a run's number of workers; both are multiples of ``sp_size``."""

    least: int
    most: int
    sp_size: int

    @property
    def is_fixed(self) -> bool:
        """Whether only one number of workers will do."""
        return self.least == self.most


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
