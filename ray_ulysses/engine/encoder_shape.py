"""Measures the shape of an encoder on its modules, because its configuration does not show all sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from ray_ulysses.config import Config
from ray_ulysses.engine.model import check_architecture, planned_model
from ray_ulysses.engine.tiled_mlp import find_mlps
from ray_ulysses.errors import UserError
from ray_ulysses.model_shape import ModelShape


def is_bidirectional(config: Config) -> bool:
    """Return whether a run's model attends in both directions.

    Raises:
        UserError: The model configuration can't be read, or the model can't be trained exactly.
    """
    task = config.objective.task
    if task in ("sequence_classification", "embedding"):
        return check_architecture(config).bidirectional() is not None
    return task == "masked_lm"


def with_encoder(config: Config, shape: ModelShape) -> ModelShape:
    """Return a model's shape, measured on its modules on the meta device if it attends in both directions.

    Raises:
        UserError: The model configuration can't be read, or the model can't be trained exactly.
    """
    if not is_bidirectional(config):
        return shape
    model: Any = planned_model(config)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embedding is None or (head is None and config.objective.task == "masked_lm"):
        raise UserError(f"model_type={shape.model_type!r}: has no output head over a vocabulary; use another encoder")
    is_tied = head is None or head.weight is embedding.weight
    # Tables of positions and segments, norms and biases are not used in matrix products.
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding) and module is not embedding]
    parameters = list(model.parameters())
    vectors = sum(one.numel() for one in parameters if one.dim() < 2)
    rest = sum(one.numel() for one in parameters) - shape.hidden_size
    rest -= (1 if is_tied else 2) * shape.embedding_parameters
    inner = (shape.intermediate_size, 2 * shape.intermediate_size)
    matrices = (one for one in parameters if one.dim() == 2 and shape.hidden_size in one.shape)
    in_mlps = sum(one.numel() for one in matrices if any(size in inner for size in one.shape))
    return replace(
        shape,
        tied_embeddings=is_tied,
        layer_parameters=rest // shape.num_layers,
        other_parameters=rest % shape.num_layers,
        is_exact=True,
        counted_idle=vectors + sum(module.weight.numel() for module in tables),
        attention_width=2 * shape.attention_width,
        is_gated=in_mlps >= 3 * shape.num_layers * shape.hidden_size * shape.intermediate_size,
        has_mlp_modules=any(True for _ in find_mlps(model)),
    )
