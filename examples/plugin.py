"""Two plugins: callbacks with a loss, and a model class.

Train with both from this repository's root: `export PYTHONPATH=$PWD`, then `ray-ulysses train CONFIG
--set 'run.plugins=[examples.plugin:Focal, examples.plugin:Squared]' --set model.config.model_type=squared_llama`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from ray_ulysses import Plugin


class SquaredLlamaConfig(LlamaConfig):
    """Llama's configuration under another name."""

    model_type = "squared_llama"


class SquaredMLP(nn.Module):
    """An MLP with the activation ``relu(x)**2`` (https://arxiv.org/abs/2109.08668)."""

    def __init__(self, config: SquaredLlamaConfig) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden_BLH: torch.Tensor) -> torch.Tensor:
        """Return the MLP's output, of the same shape."""
        return self.down_proj(self.up_proj(hidden_BLH).relu().square())


class SquaredLlama(LlamaForCausalLM):
    """Llama with another MLP."""

    config_class = SquaredLlamaConfig

    def __init__(self, config: SquaredLlamaConfig) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = SquaredMLP(config)
        self.post_init()


class Squared(Plugin):
    """Trains the model above."""

    model_class = SquaredLlama


class Focal(Plugin):
    """Trains with the focal loss, and writes events to the file PLUGIN_FILE."""

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the loss."""
        self._write("step", step, metrics["loss"])

    def on_evaluation(self, step: int, loss: float) -> None:
        """Write the evaluation loss."""
        self._write("evaluation", step, loss)

    def on_checkpoint(self, step: int, path: str) -> None:
        """Write the checkpoint's folder."""
        self._write("checkpoint", step, path)

    def on_end(self, step: int, status: str) -> None:
        """Write how training ended."""
        self._write("end", step, status)

    def token_loss(self, log_probs_T: torch.Tensor, labels_T: torch.Tensor) -> torch.Tensor:
        """Return the focal loss, which gives less weight to tokens that the model already predicts well."""
        return -(1 - log_probs_T.exp()).square() * log_probs_T

    def _write(self, *event: Any) -> None:
        with open(os.environ.get("PLUGIN_FILE", "/dev/null"), "a") as file:
            file.write(json.dumps(event) + "\n")
