"""Estimates the memory of one rank, term by term, with arithmetic that can be checked by hand.

The result is an estimate, not a measurement. It omits partition padding, allocator fragmentation and kernel
workspaces, and makes assumptions about which temporaries exist at the same time.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from ray_ulysses.config import Config
from ray_ulysses.config.running import KeptActivation
from ray_ulysses.config.stages import stage_configs
from ray_ulysses.model_shape import ModelShape
from ray_ulysses.planner.activation_memory import (
    KEPT_TERMS,
    AttentionSplit,
    Tiles,
    activation_terms,
    loss_terms,
)
from ray_ulysses.planner.memory_terms import GIB, MemoryTerm, Phase, always, in_passes
from ray_ulysses.planner.settings import kept_attention, mlp_tile, ring_size
from ray_ulysses.planner.state_memory import StateSharing, device_state, host_state, load_terms

LAYERS_ON_DEVICE = 2
"""Number of layers whose offloaded activations are on the device at the same time: one in use and one being copied."""
_MOMENTS: tuple[tuple[Phase, ...], ...] = (
    ("load",),
    ("always", "passes", "loss"),
    ("always", "passes", "layer", "mlp"),
    ("always", "passes", "layer", "attention"),
    ("always", "update"),
)
"""Each entry lists phases whose memory is allocated at the same time; the peak is the largest sum of an entry."""
_RUNTIME = always("runtime", 2 * GIB, "assumed for the CUDA context, loaded kernels and NCCL buffers; not yet measured")


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Estimated memory of one rank, on its device and on its host."""

    device: tuple[MemoryTerm, ...]
    """Terms on the accelerator. If training runs on CPUs, this memory is on the host."""
    host: tuple[MemoryTerm, ...]
    note: str = "a first estimate by formula, not a measurement"
    """Origin of the numbers, as text."""

    @property
    def device_bytes(self) -> int:
        """Peak of device memory, in bytes."""
        return sum(term.bytes for term in at_peak(self.device))

    @property
    def host_bytes(self) -> int:
        """Peak of host memory, in bytes."""
        return sum(term.bytes for term in at_peak(self.host))

    @property
    def offloaded_bytes(self) -> int:
        """Host memory for offloaded activations, in bytes."""
        return sum(one.bytes for one in self.host if any(one.name in names for names in KEPT_TERMS.values()))


def at_peak(terms: Sequence[MemoryTerm]) -> tuple[MemoryTerm, ...]:
    """Return the terms that are allocated at the peak."""
    moments = (tuple(term for term in terms if term.phase in phases) for phases in _MOMENTS)
    return max(moments, key=lambda moment: sum(term.bytes for term in moment))


def configured_memory(config: Config, shape: ModelShape) -> MemoryEstimate:
    """Estimate one rank's memory while it trains on full rows, one row at a time.

    The estimate is for the run's smallest number of workers, where memory per rank is largest.
    """
    memory, sharing, ring = config.memory, StateSharing.of(config), ring_size(config, shape)
    tokens, value = -(-config.data.context_tokens // config.parallel.sp_size), sharing.value_bytes
    # CPUs need no runtime, and their attention kernels copy bf16 inputs to fp32.
    has_device = config.cluster.gpus_per_worker > 0
    tiles = Tiles.chosen(mlp_tile(config), tokens, shape)
    attention = AttentionSplit(
        ulysses_size=config.parallel.sp_size // ring,
        ring_size=ring,
        head_groups=memory.attention_head_groups,
        kept=kept_attention(config),
        copies_to_fp32=config.model.dtype == "bf16" and not has_device,
    )
    kept = activation_terms(shape, tokens, attention, value, tiles, checkpointed=memory.gradient_checkpointing)
    state = device_state(shape, sharing, has_device=has_device, is_tiled=tiles.mlp < tokens)
    device, activations = _offloaded(state + kept, memory.offload_activations, shape.num_layers)
    on_host, *on_device = load_terms(shape, config.model.init, sharing)
    z_loss = config.optimizer.z_loss > 0
    loss = loss_terms(shape, tokens, value, memory.loss_tile, tiles.norm, z_loss=z_loss)
    device += [*loss, *on_device, *[_RUNTIME] * has_device]
    return MemoryEstimate(
        device=tuple(device), host=(*host_state(shape, sharing, has_device=has_device), *activations, on_host)
    )


def run_memory(config: Config, shape: ModelShape) -> MemoryEstimate:
    """Estimate one rank's memory in a run with stages: the largest device and host memory of any stage."""
    taken = [configured_memory(own, shape) for own in stage_configs(config)]
    host = max(taken, key=lambda one: one.host_bytes)
    return replace(max(taken, key=lambda one: one.device_bytes), host=host.host)


def fits(config: Config, memory: MemoryEstimate) -> bool:
    """Return whether an estimate is within the limits of device and host memory, as far as they are set."""
    limits = ((config.device_gib, memory.device_bytes), (config.memory.host_gib, memory.host_bytes))
    return all(limit is None or taken <= limit * GIB for limit, taken in limits)


def _offloaded(
    device: list[MemoryTerm], offloaded: Collection[KeptActivation], num_layers: int
) -> tuple[list[MemoryTerm], list[MemoryTerm]]:
    """Move the terms of ``offloaded`` activations to the host; return the device terms and the host terms."""
    rest: list[MemoryTerm] = []
    host: list[MemoryTerm] = []
    for one in device:
        kind = next((kind for kind in offloaded if one.name in KEPT_TERMS[kind]), None)
        if kind is None:
            rest.append(one)
            continue
        layers = min(LAYERS_ON_DEVICE, num_layers)
        text = f"{layers} of {num_layers} layers at once, while copied to host memory or prefetched from host memory"
        rest.append(in_passes(f"{one.name.removesuffix(', kept')}, in flight", one.bytes * layers // num_layers, text))
        host.append(replace(one, source=f"{one.source}; memory.offload_activations contains {kind}"))
    return rest, host
