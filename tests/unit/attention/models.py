"""Tiny decoders for tests of what happens inside a model."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB = 61
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def tiny_model(model_type: str = "llama", *, meta: bool = False, **changes: Any) -> Any:
    """Return a small model of an architecture; on ``meta`` it costs nothing and can only be looked at."""
    config = AutoConfig.for_model(model_type, **{**SIZES, **changes})
    with torch.device("meta" if meta else "cpu"):
        torch.manual_seed(7)
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def magnified(model: Any) -> Any:
    """Return the model with larger weights, so that attention is far from uniform and mistakes show."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    return model
