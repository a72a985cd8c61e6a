"""The modelled memory and time of a configuration as it stands."""

from __future__ import annotations

from dataclasses import replace

from ray_ulysses.config import Config
from ray_ulysses.config.stages import stage_configs
from ray_ulysses.model_shape import ModelShape
from ray_ulysses.parallel.heads import assign_heads
from ray_ulysses.planner.memory import MemoryEstimate, estimate
from ray_ulysses.planner.memory_terms import GIB
from ray_ulysses.planner.settings import kept_attention, mlp_tile, ring_size, run_layout
from ray_ulysses.planner.throughput import GB, Hardware, Method, StepTime, Work, step_time


def configured_memory(config: Config, shape: ModelShape) -> MemoryEstimate:
    """Return the memory of one rank on the fewest workers of a run."""
    return estimate(
        shape,
        world_size=config.cluster.workers.min,
        sp_size=config.parallel.sp_size,
        ring_size=ring_size(config, shape),
        context_tokens=config.data.context_tokens,
        dtype=config.model.dtype,
        zero_stage=config.memory.zero_stage,
        offload_optimizer=config.memory.offload_optimizer,
        offload_param=config.memory.offload_param,
        gradient_checkpointing=config.memory.gradient_checkpointing,
        attention_output=kept_attention(config),
        offload_activations=config.memory.offload_activations,
        attention_chunks=config.memory.attention_chunks,
        mlp_tile=mlp_tile(config),
        loss_tile=config.memory.loss_tile,
        init=config.model.init,
        accelerator=config.cluster.gpus_per_worker > 0,
        host_buffers=config.checkpoint.host_buffers,
        peer_memory=config.elastic.peer_memory,
    )


def run_memory(config: Config, shape: ModelShape) -> MemoryEstimate:
    """Return the memory of one rank in the stages of a run that take the most on the device, and on the host."""
    taken = [configured_memory(own, shape) for own in stage_configs(config)]
    host = max(taken, key=lambda one: one.host_bytes)
    return replace(max(taken, key=lambda one: one.device_bytes), host=host.host)


def fits(config: Config, memory: MemoryEstimate) -> bool:
    """Return whether an estimate is within ``memory.device_gib`` and ``memory.host_gib``, as far as they are given."""
    limits = ((config.memory.device_gib, memory.device_bytes), (config.memory.host_gib, memory.host_bytes))
    return all(limit is None or taken <= limit * GIB for limit, taken in limits)


def configured_time(config: Config, shape: ModelShape, work: Work) -> StepTime | None:
    """Return the time of a step on the most workers of a run; None without a device, and for what is not modelled."""
    cluster, memory = config.cluster, config.memory
    offload, layout = memory.offload_optimizer, run_layout(config, shape)
    is_modelled = config.model.dtype == "bf16" and layout.ulysses_size <= shape.num_heads
    if cluster.device is None or cluster.gpus_per_worker == 0 or offload == "nvme" or not is_modelled:
        return None
    return step_time(
        shape,
        layout,
        work,
        Method(
            zero_stage=memory.zero_stage,
            offload_optimizer=offload,
            gradient_checkpointing=memory.gradient_checkpointing,
            attention_output=kept_attention(config),
            head_imbalance=assign_heads(shape.num_heads, shape.num_kv_heads, layout.ulysses_size).imbalance,
        ),
        Hardware(device=cluster.device, per_node=cluster.gpus_per_node, network=cluster.network_gbps * GB / 8),
    )


def full_rows(config: Config) -> Work:
    """Return the work of a step whose every row is one document of the whole context."""
    rows, context, groups = config.data.rows_per_step, config.data.context_tokens, config.dp_size
    return Work(
        tokens=rows * context, squares=rows * context**2, rows=rows, imbalance=-(-rows // groups) * groups / rows
    )
