"""Finds ranks that compute more slowly than the others for long: a throttled GPU or a disturbed node (pure)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low

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
    """Windows in a row in which it was."""
    ratio: float
    """Its compute time over the median's, in the newest one."""

    @property
    def is_named(self) -> bool:
        """Whether it has been slow for long enough to be named."""
        return self.windows >= WINDOWS

    def said(self, node: str) -> str:
        """Return what a person is told, with the name of the rank's node."""
        return (
            f"rank {self.rank} on {node} computes {self.ratio:.1f} times as long as the median rank, in {self.windows} "
            "measurements in a row: check its GPU for throttling and its node for other work"
        )


def after_window(slow: Sequence[Straggler], compute_s: Mapping[int, float]) -> tuple[Straggler, ...]:
    """Return the ranks that were slow in one more window of steps, by rank.

    Args:
        slow: Those that were in the one before.
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


def nodes_to_use(
    nodes: Collection[str],
    slow: Mapping[str, float],
    in_use: Collection[str],
    workers: Callable[[Collection[str]], int],
) -> frozenset[str]:
    """Return the nodes to use: without the slow ones, as far as a run is faster without them.

    Every rank waits for the slowest, so that fewer workers pay where they are as much faster.

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
