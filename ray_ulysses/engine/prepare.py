"""Prepares a model for training on one rank: exact attention over sequence shards, and what saves memory or time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ray_ulysses.attention.ulysses import apply_ulysses
from ray_ulysses.engine.activation_offload import offload_activations
from ray_ulysses.engine.fused_norms import fuse_norms
from ray_ulysses.engine.model import compile_layers
from ray_ulysses.engine.tiled_mlp import tile_mlps
from ray_ulysses.planner.memory import configured_memory
from ray_ulysses.planner.settings import kept_attention, mlp_tile

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from ray_ulysses.config import Config
    from ray_ulysses.model_shape import ModelShape
    from ray_ulysses.parallel.mesh import SequenceMesh


def prepare_model(
    model: PreTrainedModel, config: Config, shape: ModelShape, mesh: SequenceMesh, device: torch.device
) -> None:
    """Change a model, in place, as the configuration asks. Call this function before building the engine."""
    memory = config.memory
    apply_ulysses(model, mesh, attention=config.model.attention, head_groups=memory.attention_head_groups)
    if config.model.fused_norms and device.type == "cuda":
        fuse_norms(model)
    most_tokens = -(-config.data.context_tokens // mesh.sp_size)
    tile_mlps(model, mlp_tile(config), most_tokens, compiled=config.model.compile == "mlp")
    budget_bytes = configured_memory(config, shape).offloaded_bytes
    offload_activations(
        model, memory.offload_activations, keep=kept_attention(config), budget_bytes=budget_bytes, device=device
    )
    if config.model.compile is True:
        compile_layers(model)
