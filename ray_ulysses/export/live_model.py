"""Fills the model of a run from a checkpoint by parameter names, without an engine and without writing files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from ray_ulysses.engine.model import build_model
from ray_ulysses.export.stream import ElementRange, WeightReader
from ray_ulysses.export.tensors import Stored

if TYPE_CHECKING:
    from ray_ulysses.config import Config


@torch.no_grad()
def live_model(
    config: Config,
    model_config: Mapping[str, Any],
    stored: Mapping[str, Stored],
    weights: WeightReader,
    dtype: str = "fp32",
) -> tuple[Any, list[str]]:
    """Return the model as built in training, on the host, with a checkpoint's weights.

    Args:
        config: The run's configuration.
        model_config: The model's configuration, a mapping with ``model_type``.
        stored: The place of each tensor in the checkpoint, by its name in the model.
        weights: Reads them.
        dtype: Type that the model computes in, as ``model.dtype``.

    Returns:
        The model, and the names of its weights that are not finite.
    """
    from transformers.initialization import no_init_weights

    with no_init_weights():
        # Every weight is filled from the checkpoint: nothing is initialized, and the base model is not read.
        model: Any = build_model(_filled_config(config, model_config, dtype))
    # Transformers 5.23 ties weights in the function that initializes them.
    model.tie_weights()
    return model, _fill(model, stored, weights)


def _filled_config(config: Config, model_config: Mapping[str, Any], dtype: str) -> Config:
    model = config.model.model_copy(update={"init": "random", "config": dict(model_config), "dtype": dtype})
    memory = config.memory.model_copy(update={"gradient_checkpointing": False})
    return config.model_copy(update={"model": model, "memory": memory})


def _fill(model: Any, stored: Mapping[str, Stored], weights: WeightReader) -> list[str]:
    """Fill a model's tensors; tied tensors are stored once.

    Returns:
        The names of the weights that are not finite.
    """
    targets: dict[str, torch.Tensor] = model.state_dict()
    by_key = {place.key: targets[name] for name, place in stored.items()}
    not_finite: dict[str, None] = {}
    ranges = [ElementRange(stored=place, start=0, stop=targets[name].numel()) for name, place in stored.items()]
    for part, values in weights.read_ahead(ranges):
        target = by_key[part.stored.key]
        assert target.is_contiguous(), f"{part.stored.key} is not contiguous in the model"
        target.view(-1)[part.start : part.stop].copy_(values)
        # A buffer may hold infinities, as a mask does.
        kind, name = part.stored.key.split("/", 1)
        if kind != "buffer" and not bool(values.isfinite().all()):
            not_finite[name] = None
    return list(not_finite)
