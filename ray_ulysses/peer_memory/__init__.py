"""Peer memory: one agent per node keeps files in RAM, and a store on top keeps each shard on two nodes."""

from ray_ulysses.peer_memory.agent import PeerMemoryAgent
from ray_ulysses.peer_memory.store import AgentAddresses, PeerMemoryStore, partners

__all__ = ["AgentAddresses", "PeerMemoryAgent", "PeerMemoryStore", "partners"]
