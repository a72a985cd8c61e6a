"""Measures the shape of a masked language model on its modules, because its configuration does not show all sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn

from ray_ulysses.engine.model import planned_model
from ray_ulysses.engine.tiled_mlp import find_mlps

if TYPE_CHECKING:
    from ray_ulysses.config import Config
    from ray_ulysses.model_shape import ModelShape


def with_encoder(config: Config, shape: ModelShape) -> ModelShape:
    """Return the shape of a masked language model, measured on its modules, on the meta device.

    Raises:
        UserError: The model configuration can't be read, or the model can't be trained exactly.
    """
    model: Any = planned_model(config)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = head.weight is embedding.weight
    # Tables of positions and segments, norms and biases are not used in matrix products.
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding) and module is not embedding]
    vectors = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() < 2)
    rest = sum(parameter.numel() for parameter in model.parameters()) - shape.hidden_size
    rest -= (1 if is_tied else 2) * shape.embedding_parameters
    inner = (shape.intermediate_size, 2 * shape.intermediate_size)
    in_mlps = sum(
        parameter.numel()
        for parameter in model.parameters()
        if parameter.dim() == 2
        and shape.hidden_size in parameter.shape
        and any(size in inner for size in parameter.shape)
    )
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
