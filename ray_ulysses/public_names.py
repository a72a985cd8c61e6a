"""The module of each function and class of the public library."""

from __future__ import annotations

_NAMES = {
    "attention.batch": "shard_batch unshard",
    "attention.ulysses": "apply_ulysses remove_ulysses",
    "commands.library": "plan train",
    "engine.heads": "classification_loss contrastive_loss contrastive_objective document_vectors",
    "engine.loss": "causal_lm_loss loss_scale",
    "engine.plugins": "Plugin",
    "engine.preferences": "Preference document_log_probs preference_loss",
    "parallel.mesh": "SequenceMesh",
}
HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}
