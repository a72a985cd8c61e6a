"""Pairs nodes for peer memory: each node's state is copied to a partner in another zone where there is one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping


def partners(zones: Mapping[str, str | None]) -> dict[str, str | None]:
    """Return the node that keeps a copy of each node's state (pure).

    Each node keeps exactly one other node's copy, so that all need the same memory. As many nodes as possible have
    their partner in another zone.

    Args:
        zones: The failure domain of each node, such as its availability zone; None where it is unknown.

    Returns:
        The partner of each node; None for a single node.
    """
    sizes = Counter(zone or "" for zone in zones.values())
    # Largest zone first, zones together, stable names: the same nodes give the same pairs.
    ring = sorted(zones, key=lambda node: (-sizes[zones[node] or ""], zones[node] or "", node))
    if len(ring) < 2:
        return dict.fromkeys(ring)
    # Moving on by the largest zone's size leaves every zone, unless that zone holds more than half of the nodes: then
    # moving on by the number of the others takes as many as there are others out of it.
    largest = max(sizes.values())
    shift = min(largest, len(ring) - largest) or 1
    return {node: ring[(index + shift) % len(ring)] for index, node in enumerate(ring)}
