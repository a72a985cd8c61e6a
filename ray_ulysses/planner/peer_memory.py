"""Estimates what keeping the newest state in the memory of nodes takes: memory, network and time."""

from __future__ import annotations

from dataclasses import dataclass

from ray_ulysses.config import Config
from ray_ulysses.model_shape import ModelShape
from ray_ulysses.planner.memory_terms import GIB
from ray_ulysses.planner.state_memory import PEER_COPIES, PEER_STATES, StateSharing

_BYTES_PER_S = GIB
"""Rate at which a worker's part is copied, summed, sent and summed again: about a CPU second per GiB was measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerMemoryFacts:
    """What peer memory takes for each worker of a run, at its smallest number of workers."""

    kept_bytes: int
    """Memory on the worker's node: two nodes' copies of two states."""
    sent_bytes: int
    """What a state sends over the network, to the partner node."""
    save_s: float
    """About how long that takes beside training, in seconds: with longer steps every step is kept."""
    limit_gib: float | None
    """Most memory per node; None for a third of what is free."""


def peer_memory_facts(config: Config, shape: ModelShape) -> PeerMemoryFacts | None:
    """Return what peer memory takes (pure); None if it is turned off."""
    if not config.elastic.peer_memory:
        return None
    part_bytes = StateSharing.of(config).stored_bytes(shape)
    return PeerMemoryFacts(
        kept_bytes=PEER_COPIES * PEER_STATES * part_bytes,
        sent_bytes=part_bytes,
        save_s=part_bytes / _BYTES_PER_S,
        limit_gib=config.elastic.peer_memory_gib,
    )
