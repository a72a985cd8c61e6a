"""Peer memory: agents that keep the newest training state in the memory of two nodes, and the store over them."""

from ray_ulysses.vault.agent import VaultAgent
from ray_ulysses.vault.store import VaultAddresses, VaultStore, partners

__all__ = ["VaultAddresses", "VaultAgent", "VaultStore", "partners"]
