"""The model and data of the example loops; replace them with your own."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

STEPS = 5
ROWS_PER_STEP = 4
VOCABULARY = 64
DOCUMENT_LENGTHS = (40, 1, 23)
"""Lengths of the documents packed into each row, which do not attend to each other."""


def make_model() -> PreTrainedModel:
    """Return the model, the same on every rank."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=VOCABULARY, **sizes, **heads))


def make_row(step: int, number: int) -> torch.Tensor:
    """Return the token ids of a whole row, the same on all ranks that share it."""
    generator = torch.Generator().manual_seed(step * ROWS_PER_STEP + number)
    return torch.randint(0, VOCABULARY, (sum(DOCUMENT_LENGTHS),), generator=generator)
