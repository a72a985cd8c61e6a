"""The planner's estimate of a step that no configuration describes, for benchmarks and tests."""

from __future__ import annotations

from typing import Any

from ray_ulysses.config import Config
from ray_ulysses.model_shape import ModelShape
from ray_ulysses.planner.memory import MemoryEstimate, configured_memory


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
    """Return the memory of one rank.

    Args:
        shape: The model.
        world_size: Workers.
        sp_size: Ranks that share a row.
        context_tokens: Tokens of the longest row.
        ring_size: Ring degree within ``sp_size``.
        dtype: Type of compute.
        init: Where the weights come from.
        accelerator: Whether each rank has a device.
        host_buffers: Copies of a rank's state in host memory.
        peer_memory: Whether the newest state is kept in the memory of nodes as well.
        memory: Further settings of ``memory``.
    """
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
