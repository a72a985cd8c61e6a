"""Estimates the memory of one rank, term by term, with arithmetic that can be checked by hand.

It is a first estimate and not a measurement: padding of the partitions, the allocator's fragmentation and the kernels'
workspaces are left out, and temporaries are counted as the formulas say that they are allocated together.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal

from ray_ulysses.config.running import KeptActivation
from ray_ulysses.model_shape import ModelShape
from ray_ulysses.parallel.tiles import TileSetting
from ray_ulysses.planner.activation_memory import (
    KEPT_TERMS,
    AttentionSplit,
    Tiles,
    activation_terms,
    loss_terms,
)
from ray_ulysses.planner.memory_terms import GIB, MemoryTerm, Phase, always
from ray_ulysses.planner.state_memory import StateSharing, device_state, host_state, load_terms

BYTES_PER_VALUE: dict[str, int] = {"bf16": 2, "fp32": 4}
LAYERS_ON_DEVICE = 2
"""Layers whose offloaded activations are on the device at once: one that is used, and one whose copies run."""
_RUNTIME = always(
    "runtime", 2 * GIB, "an assumption: the device's context, loaded kernels and NCCL's buffers; not yet measured"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """The memory of one rank, on its device and on its host.

    Attributes:
        device: Terms on the accelerator (on the host if training runs on CPU).
        host: Additional terms in host memory.
        note: How the numbers were obtained.
    """

    device: tuple[MemoryTerm, ...]
    host: tuple[MemoryTerm, ...]
    note: str = "a first estimate by formula, not a measurement"

    @property
    def device_bytes(self) -> int:
        """The largest sum of device terms that are allocated together."""
        return _peak(self.device)

    @property
    def host_bytes(self) -> int:
        """The same on the host."""
        return _peak(self.host)

    @property
    def offloaded_bytes(self) -> int:
        """Host memory of the activations that are kept there."""
        return sum(one.bytes for one in self.host if any(one.name in names for names in KEPT_TERMS.values()))


def _peak(terms: tuple[MemoryTerm, ...]) -> int:
    total: dict[Phase, int] = {}
    for one in terms:
        total[one.phase] = total.get(one.phase, 0) + one.bytes
    in_layer = total.get("layer", 0) + max(total.get("mlp", 0), total.get("attention", 0))
    return max(total.get("load", 0), total.get("always", 0) + max(total.get("loss", 0), in_layer))


def estimate(
    shape: ModelShape,
    *,
    world_size: int,
    sp_size: int,
    context_tokens: int,
    ring_size: int = 1,
    dtype: Literal["bf16", "fp32"] = "bf16",
    zero_stage: Literal[1, 2, 3] = 3,
    offload_optimizer: Literal["none", "cpu", "nvme"] = "none",
    offload_param: Literal["none", "cpu"] = "none",
    gradient_checkpointing: bool = True,
    attention_output: Literal["both", "kernel", "none"] = "both",
    offload_activations: Collection[KeptActivation] = (),
    attention_chunks: int = 1,
    loss_tile: TileSetting = "auto",
    mlp_tile: TileSetting = "auto",
    init: Literal["pretrained", "random"] = "pretrained",
    accelerator: bool = True,
    host_buffers: int = 2,
    peer_memory: bool = False,
) -> MemoryEstimate:
    """Return every term of the memory of one rank while it trains rows of a full context, one at a time.

    Args:
        shape: The model.
        world_size: Workers; ZeRO shards over all of them.
        sp_size: Ranks that share a row.
        context_tokens: Tokens of the longest row.
        ring_size: Ring degree within ``sp_size``.
        dtype: Type of compute.
        zero_stage: Shards the optimizer's state (1), also the gradients (2), or also the weights (3).
        offload_optimizer: Where the optimizer's state is stored.
        offload_param: Where a rank's share of the weights is stored at stage 3.
        gradient_checkpointing: Whether layers are recomputed in the backward pass.
        attention_output: What gradient checkpointing keeps of attention's output.
        offload_activations: What of that, and of the layers' inputs, is kept in host memory.
        attention_chunks: Chunks in which heads are exchanged and attended.
        loss_tile: Tokens per rank whose logits exist at once.
        mlp_tile: Tokens per rank that an MLP processes at once.
        init: Where the weights come from.
        accelerator: Whether each rank has a device, which has a runtime, and kernels for bf16.
        host_buffers: Copies of a rank's state in host memory from which checkpoints are written.
        peer_memory: Whether the newest state is kept in the memory of nodes as well.
    """
    local_tokens, value = -(-context_tokens // sp_size), BYTES_PER_VALUE[dtype]
    tiles = Tiles.chosen(mlp_tile, local_tokens, shape)
    sharing = StateSharing(
        stage=zero_stage, world_size=world_size, value_bytes=value, offload=offload_optimizer,
        host_buffers=host_buffers, peer_memory=peer_memory, offload_param=offload_param,
    )  # fmt: skip
    attention = AttentionSplit(
        ulysses_size=sp_size // ring_size, ring_size=ring_size, chunks=attention_chunks, kept=attention_output,
        copies_to_fp32=dtype == "bf16" and not accelerator,
    )  # fmt: skip
    kept = activation_terms(shape, local_tokens, attention, value, tiles, checkpointed=gradient_checkpointing)
    device, activations = _offloaded(device_state(shape, sharing) + kept, offload_activations, shape.num_layers)
    on_host, *on_device = load_terms(shape, init, sharing)
    device += [*loss_terms(shape, local_tokens, value, loss_tile, tiles.norm), *on_device, *[_RUNTIME] * accelerator]
    return MemoryEstimate(device=tuple(device), host=(*host_state(shape, sharing), *activations, on_host))


def _offloaded(
    device: list[MemoryTerm], offloaded: Collection[KeptActivation], num_layers: int
) -> tuple[list[MemoryTerm], list[MemoryTerm]]:
    """Return the terms on the device and in host memory, where those of ``offloaded`` are moved."""
    rest: list[MemoryTerm] = []
    host: list[MemoryTerm] = []
    for one in device:
        kind = next((kind for kind in offloaded if one.name in KEPT_TERMS[kind]), None)
        if kind is None:
            rest.append(one)
            continue
        layers = min(LAYERS_ON_DEVICE, num_layers)
        text = f"{layers} of {num_layers} layers' at once: on their way to host memory, or back ahead of their use"
        rest.append(always(f"{one.name.removesuffix(', kept')}, in flight", one.bytes * layers // num_layers, text))
        host.append(replace(one, source=f"{one.source}; memory.offload_activations has {kind}"))
    return rest, host
