"""Sharded checkpoints that are committed by a manifest and can be loaded at any world size."""

from importlib import import_module
from typing import TYPE_CHECKING

from ray_ulysses.checkpoint.choice import Choice, Damage, newest_committed, set_aside
from ray_ulysses.checkpoint.errors import CheckpointError, DamagedCheckpointError, FencedError
from ray_ulysses.checkpoint.manifest import CheckpointMeta, CheckpointRef, Manifest, read_manifest
from ray_ulysses.checkpoint.retention import KeepRules, Retention
from ray_ulysses.checkpoint.state import ShardedState, StateDescription, TensorPart, TensorSpec

if TYPE_CHECKING:
    from ray_ulysses.checkpoint.load import load_parts
    from ray_ulysses.checkpoint.messenger import RankMessenger, TorchRankMessenger
    from ray_ulysses.checkpoint.save import save_checkpoint

__all__ = [
    "CheckpointError", "CheckpointMeta", "CheckpointRef", "Choice", "Damage", "DamagedCheckpointError", "FencedError",
    "KeepRules", "Manifest", "RankMessenger", "Retention", "ShardedState", "StateDescription", "TensorPart",
    "TensorSpec", "TorchRankMessenger", "load_parts", "newest_committed", "read_manifest", "save_checkpoint",
    "set_aside",
]  # fmt: skip
_HOMES = {"load_parts": "load", "save_checkpoint": "save"}


def __getattr__(name: str) -> object:
    """Lazily import the names that need torch, so that listing checkpoints does not import torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'messenger')}"), name)
