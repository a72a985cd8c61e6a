"""Elastic long-context training of Hugging Face decoders: Ulysses attention on Ray, exact in every layout."""

from importlib import import_module
from typing import TYPE_CHECKING

from ray_ulysses.public_names import HOMES

if TYPE_CHECKING:
    from ray_ulysses.attention.batch import shard_batch, unshard
    from ray_ulysses.attention.ulysses import apply_ulysses, remove_ulysses
    from ray_ulysses.commands.library import plan, train
    from ray_ulysses.engine.heads import classification_loss, contrastive_loss, contrastive_objective, document_vectors
    from ray_ulysses.engine.loss import causal_lm_loss, loss_scale
    from ray_ulysses.engine.plugins import Plugin
    from ray_ulysses.engine.preferences import Preference, document_log_probs, preference_loss
    from ray_ulysses.parallel.mesh import SequenceMesh

__all__ = ["Plugin", "SequenceMesh", "apply_ulysses", "causal_lm_loss", "loss_scale", "plan", "remove_ulysses"]
__all__ += ["Preference", "document_log_probs", "preference_loss", "shard_batch", "train", "unshard"]
__all__ += ["classification_loss", "contrastive_loss", "contrastive_objective", "document_vectors"]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """Import a library function on first use, so that importing the package does not import torch."""
    if name in HOMES:
        return getattr(import_module(f"{__name__}.{HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
