"""Peer memory: agents that keep the newest training state in the memory of two nodes, and the store over them."""

from ray_ulysses.peer_memory.agent import PeerMemoryAgent
from ray_ulysses.peer_memory.store import AgentAddresses, PeerMemoryStore, partners

__all__ = ["AgentAddresses", "PeerMemoryAgent", "PeerMemoryStore", "partners"]
