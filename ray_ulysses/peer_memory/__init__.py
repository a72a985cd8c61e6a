"""Peer memory: per-node agents that keep the newest training state in RAM on two nodes, and a store on top of them."""

from ray_ulysses.peer_memory.agent import PeerMemoryAgent
from ray_ulysses.peer_memory.store import AgentAddresses, PeerMemoryStore, partners

__all__ = ["AgentAddresses", "PeerMemoryAgent", "PeerMemoryStore", "partners"]
