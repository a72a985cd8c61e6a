"""Elastic long-context training of Hugging Face decoders: Ulysses attention on Ray, exact in every layout."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ray_ulysses.attention.batch import shard_batch, unshard
    from ray_ulysses.attention.ulysses import apply_ulysses, remove_ulysses
    from ray_ulysses.commands.library import plan, train
    from ray_ulysses.engine.loss import causal_lm_loss, loss_scale
    from ray_ulysses.engine.plugins import Plugin
    from ray_ulysses.engine.preferences import Preference, document_log_probs, preference_loss
    from ray_ulysses.parallel.mesh import SequenceMesh

__all__ = ["Plugin", "SequenceMesh", "apply_ulysses", "causal_lm_loss", "loss_scale", "plan", "remove_ulysses"]
__all__ += ["Preference", "document_log_probs", "preference_loss", "shard_batch", "train", "unshard"]
__version__ = "0.1.0"

_HOMES = {"SequenceMesh": "parallel.mesh", "Plugin": "engine.plugins", "plan": "commands.library"}
_HOMES |= {"train": "commands.library", "apply_ulysses": "attention.ulysses", "remove_ulysses": "attention.ulysses"}
_HOMES |= {"shard_batch": "attention.batch", "unshard": "attention.batch"}
_HOMES |= dict.fromkeys(("causal_lm_loss", "loss_scale"), "engine.loss")
_HOMES |= dict.fromkeys(("Preference", "document_log_probs", "preference_loss"), "engine.preferences")


def __getattr__(name: str) -> object:
    """Import a library function on first use, so that importing the package does not import torch."""
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
