"""The planner's estimate of a step that no configuration file describes."""

from __future__ import annotations

from typing import Any

from ray_ulysses.config import Config
from ray_ulysses.model_shape import ModelShape
from ray_ulysses.planner.memory import MemoryEstimate, configured_memory

_STATE = {
    "weights, sharded", "weights, whole", "weights, gathered", "master weights, fp32", "AdamW moments, fp32",
    "gradients, fp32", "gradients, before reduction", "bucket of gradients", "temporaries of AdamW",
}  # fmt: skip


def estimate(
    shape: ModelShape,
    *,
    world_size: int,
    sp_size: int,
    context_tokens: int,
    ring_size: int = 1,
    dtype: str = "bf16",
    init: str = "pretrained",
    accelerator: bool = True,
    host_buffers: int = 2,
    peer_memory: bool = False,
    **memory: Any,
) -> MemoryEstimate:
    """Return the memory of one rank; ``memory`` are further settings of the section of that name."""
    config = Config.model_validate(
        {
            "run": {"name": "planned", "storage": "/runs"},
            "model": {"config": {"model_type": shape.model_type}, "path": "/model", "init": init, "dtype": dtype},
            "data": {"path": "/corpus", "context_tokens": context_tokens, "rows_per_step": world_size},
            "parallel": {"sp_size": sp_size, "ring_size": ring_size},
            "memory": memory,
            "checkpoint": {"host_buffers": host_buffers},
            "elastic": {"peer_memory": peer_memory},
            "cluster": {"workers": world_size, "gpus_per_worker": int(accelerator)},
        }
    )
    return configured_memory(config, shape)


def step_terms(shape: ModelShape, **settings: Any) -> MemoryEstimate:
    """Return the device's terms of a step alone: without training state, the engine's buffers and loading."""
    device = estimate(shape, **settings).device
    return MemoryEstimate(device=tuple(t for t in device if t.name not in _STATE and t.phase != "load"), host=())
