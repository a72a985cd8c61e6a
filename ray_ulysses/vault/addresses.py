"""The addresses of a run's vault agents, as one worker is given them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class VaultAddresses:
    """The agents that a worker talks to; plain values, so that it can be pickled.

    Attributes:
        agents: ``host:port`` of each node's agent, by the node's name.
        node: The worker's own node.
        partner: The node that keeps the copy of this node's state; None for a single node.
        token: The secret that every connection begins with.
    """

    agents: Mapping[str, str]
    node: str
    partner: str | None
    token: str = field(repr=False)

    def order(self) -> tuple[str, ...]:
        """Return the nodes that have an agent: this one, its partner, then the others by name."""
        near = [node for node in (self.node, self.partner) if node in self.agents]
        return tuple(dict.fromkeys((*near, *sorted(self.agents))))  # type: ignore[arg-type]  # None is in no mapping
