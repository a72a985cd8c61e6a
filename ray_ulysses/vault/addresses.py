"""The addresses of a run's vault agents, as one worker is given them, and which node keeps the copy of which."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class VaultAddresses:
    """The agents that a worker talks to; plain values, so that it can be pickled.

    Attributes:
        agents: ``host:port`` of each node's agent, by the node's name.
        node: The worker's own node.
        partner: The node that keeps the copy of this node's state; None for a single node.
        token: The secret that both sides of a connection know.
    """

    agents: Mapping[str, str]
    node: str
    partner: str | None
    token: str = field(repr=False)

    def order(self) -> tuple[str, ...]:
        """Return the nodes that have an agent: this one, its partner, then the others by name."""
        near = [node for node in (self.node, self.partner) if node in self.agents]
        return tuple(dict.fromkeys((*near, *sorted(self.agents))))  # type: ignore[arg-type]  # None is in no mapping


def partners(zones: Mapping[str, str | None]) -> dict[str, str | None]:
    """Return the node that keeps a copy of each node's state, in another zone where there is one (pure).

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
