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
from ray_ulysses.parallel.heads import HeadPlan, assign_heads
from ray_ulysses.parallel.tiles import TileSetting, loss_tile_tokens, mlp_tile_tokens
from ray_ulysses.planner.memory_terms import FP32_BYTES, GIB, MemoryTerm, Phase, always, term
from ray_ulysses.planner.state_memory import StateSharing, device_state, host_state, load_terms

BYTES_PER_VALUE: dict[str, int] = {"bf16": 2, "fp32": 4}
LAYERS_ON_DEVICE = 2
"""Layers whose offloaded activations are on the device at once: one that is used, and one whose copies run."""
_KEPT_TERMS: dict[KeptActivation, str] = {
    "layer_inputs": "layer inputs, kept",
    "attention_outputs": "attention outputs, kept",
}
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
        return sum(one.bytes for one in self.host if one.name in _KEPT_TERMS.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class _AttentionSplit:
    """The sharding of attention, and what of it is kept."""

    ulysses_size: int
    ring_size: int
    chunks: int
    kept: Literal["both", "kernel", "none"]

    def heads(self, shape: ModelShape) -> HeadPlan:
        """Return the heads of each rank; impossible layouts are refused elsewhere."""
        return assign_heads(shape.num_heads, shape.num_kv_heads, min(self.ulysses_size, shape.num_heads))


def _peak(terms: tuple[MemoryTerm, ...]) -> int:
    total: dict[Phase, int] = {}
    for one in terms:
        total[one.phase] = total.get(one.phase, 0) + one.bytes
    load, always = total.pop("load", 0), total.pop("always", 0)
    return max(load, always + max(total.values(), default=0))


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
        context_tokens: Longest row, in tokens.
        ring_size: Ring degree within ``sp_size``.
        dtype: Type of compute.
        zero_stage: Shards the optimizer's state (1), also the gradients (2), or also the weights (3).
        offload_optimizer: Where the optimizer's state is stored.
        offload_param: Where a rank's share of the weights is stored at stage 3.
        gradient_checkpointing: Whether layers are recomputed in the backward pass.
        attention_output: What gradient checkpointing keeps of attention's output.
        offload_activations: What of that, and of the layers' inputs, is kept in host memory.
        attention_chunks: Number of chunks in which heads are exchanged and attended.
        loss_tile: Tokens per rank whose logits exist at once.
        mlp_tile: Tokens per rank that an MLP processes at once.
        init: Where the weights come from.
        accelerator: Whether each rank has a device, whose runtime takes memory too.
        host_buffers: Copies of a rank's state in host memory from which checkpoints are written.
        peer_memory: Whether the newest state is kept in the memory of nodes as well.
    """
    local_tokens, value = -(-context_tokens // sp_size), BYTES_PER_VALUE[dtype]
    sharing = StateSharing(
        stage=zero_stage, world_size=world_size, value_bytes=value, offload=offload_optimizer,
        host_buffers=host_buffers, peer_memory=peer_memory, offload_param=offload_param,
    )  # fmt: skip
    attention = _AttentionSplit(
        ulysses_size=sp_size // ring_size, ring_size=ring_size, chunks=attention_chunks, kept=attention_output
    )
    kept = _activations(shape, local_tokens, attention, value, mlp_tile, checkpointed=gradient_checkpointing)
    device, activations = _offloaded(device_state(shape, sharing) + kept, offload_activations, shape.num_layers)
    device += _loss(shape, local_tokens, value, loss_tile)
    on_host, on_device = load_terms(shape, init, sharing)
    device += [one for one in (on_device, _RUNTIME if accelerator else None) if one is not None]
    return MemoryEstimate(device=tuple(device), host=(*host_state(shape, sharing), *activations, on_host))


def _offloaded(
    device: list[MemoryTerm], offloaded: Collection[KeptActivation], num_layers: int
) -> tuple[list[MemoryTerm], list[MemoryTerm]]:
    """Return the terms on the device and in host memory, where those of ``offloaded`` are moved."""
    rest: list[MemoryTerm] = []
    host: list[MemoryTerm] = []
    for one in device:
        kind = next((kind for kind in offloaded if one.name == _KEPT_TERMS[kind]), None)
        if kind is None:
            rest.append(one)
            continue
        layers = min(LAYERS_ON_DEVICE, num_layers)
        text = f"{layers} of {num_layers} layers' at once: on their way to host memory, or back ahead of their use"
        rest.append(always(f"{one.name.removesuffix(', kept')}, in flight", one.bytes * layers // num_layers, text))
        host.append(replace(one, source=f"{one.source}; memory.offload_activations has {kind}"))
    return rest, host


def _activations(
    shape: ModelShape, tokens: int, split: _AttentionSplit, value: int, setting: TileSetting, *, checkpointed: bool
) -> list[MemoryTerm]:
    mlp_tile = mlp_tile_tokens(setting, tokens, shape.intermediate_size)
    hidden, layers = shape.hidden_size, shape.num_layers
    one_layer = [_around(shape, tokens, value), *_attention(shape, tokens, split, value)]
    mlp = _mlp(shape, tokens, value, mlp_tile)
    if checkpointed:
        text = (
            f"{layers} layers x {tokens:,} tokens per rank x {hidden} x {value} bytes: what gradient checkpointing "
            "keeps of each layer"
        )
        saved = term(_KEPT_TERMS["layer_inputs"], layers * tokens * hidden * value, "always", text)
        return [saved, *_kept_attention(shape, tokens, split, value), *one_layer, mlp]
    is_tiled = mlp_tile < tokens
    one_layer += [] if is_tiled else [mlp]
    kept = sum(one.bytes for one in one_layer) * layers
    text = f"{layers} layers x {kept // layers:,} bytes of one, since memory.gradient_checkpointing is false"
    return [term("activations of all layers", kept, "always", text), *([mlp] if is_tiled else [])]


def _around(shape: ModelShape, tokens: int, value: int) -> MemoryTerm:
    # Two norms, each with an fp32 copy, a normalized and a scaled output; the residual sums; the attention's output.
    each = shape.hidden_size * (2 * (FP32_BYTES + 2 * value) + 3 * value)
    text = f"{tokens:,} tokens per rank x {each:,} bytes: norms with fp32 copies, and residuals"
    return term("one layer outside attention and MLP", tokens * each, "layer", text)


def _mlp(shape: ModelShape, tokens: int, value: int, tile: int) -> MemoryTerm:
    # gate, up, their activation and product are kept for the backward pass, which adds two gradients.
    each = 6 * shape.intermediate_size * value
    if tile >= tokens:
        text = f"{tokens:,} tokens per rank x {each:,} bytes: six values of its width (four kept, two gradients)"
        return term("one MLP", tokens * each, "layer", text)
    weights = 3 * shape.hidden_size * shape.intermediate_size
    text = (
        f"{tile:,} tokens of {tokens:,} per rank (memory.mlp_tile) x {each:,} bytes: six values of its width; and "
        f"{tokens:,} x {2 * shape.hidden_size * value:,} bytes: its input and its gradient; and {weights:,} weights x "
        f"{FP32_BYTES + value} bytes: their gradients, summed in fp32, and those of one tile"
    )
    size = tile * each + tokens * 2 * shape.hidden_size * value + weights * (FP32_BYTES + value)
    return term("one MLP, tiled", size, "layer", text)


def _kept_attention(shape: ModelShape, tokens: int, split: _AttentionSplit, value: int) -> list[MemoryTerm]:
    """Return what gradient checkpointing keeps of attention in every layer, so that it is not recomputed."""
    if split.kept == "none":
        return []
    is_both = split.kept == "both" and split.ulysses_size > 1 and split.chunks == 1
    heads = split.heads(shape)
    # The kernel's layout has the heads of the rank with the most, for the tokens of all ranks that exchange; the
    # model's has all heads of this rank's slice. In whole numbers, by which host memory is reserved.
    in_kernel = heads.max_heads * len(heads.ranks)
    width = shape.attention_width // shape.num_heads * (in_kernel + (shape.num_heads if is_both else 0))
    each = width * value + shape.num_layers * in_kernel * FP32_BYTES
    layouts = "in the layouts of kernel and model" if is_both else "in one layout"
    text = (
        f"{shape.num_layers} layers x {tokens:,} tokens per rank x {each // shape.num_layers:,} bytes: output "
        f"{layouts} and log-sum-exp (memory.attention_output={split.kept})"
    )
    return [term(_KEPT_TERMS["attention_outputs"], tokens * each, "always", text)]


def _attention(shape: ModelShape, tokens: int, split: _AttentionSplit, value: int) -> list[MemoryTerm]:
    heads = split.heads(shape)
    query = shape.num_heads * shape.head_dim
    # After the exchange the rank with the most heads has this many features of the tokens of its part of the row. A
    # chunk has at least one key-value head of a rank, and only what is exchanged is chunked.
    chunks = min(split.chunks, heads.max_kv_heads) if split.ulysses_size > 1 else 1
    kv_per_chunk = -(-heads.max_kv_heads // chunks)
    share = kv_per_chunk / heads.max_kv_heads
    query_after = heads.max_heads * split.ulysses_size * shape.head_dim * share
    kv_after = kv_per_chunk * split.ulysses_size * shape.head_dim
    kept = 2 * query + shape.num_kv_heads * 2 * shape.head_dim
    size = round(tokens * value * (kept + 2 * query_after + 2 * kv_after))
    text = (
        f"{tokens:,} tokens per rank x {value} bytes x the widths of q, k, v and output, and their gradients in the "
        "kernel's layout"
    )
    terms = [term("attention q, k, v and output", size, "layer", text)]
    text = f"{tokens:,} tokens per rank x {shape.num_heads} heads x 4 bytes: kept for the softmax's backward"
    terms.append(term("attention log-sum-exp", tokens * shape.num_heads * FP32_BYTES, "layer", text))
    if split.ulysses_size > 1:
        exchange = round(2 * (query_after + 2 * kv_after))
        text = (
            f"{tokens:,} tokens per rank x {value} bytes x {exchange}: q, k and v in one payload, sent and received "
            "(the output's, and the gradients', are no larger)"
        )
        terms.append(term("all-to-all buffers", tokens * value * exchange, "layer", text))
    if split.ring_size > 1:
        each = round(2 * kv_after * (2 * value + 3 * FP32_BYTES) + query_after * FP32_BYTES)
        text = (
            f"{tokens:,} tokens per rank x {each} bytes: keys and values held and on their way, their gradients in "
            "fp32 made, sent and received, and the queries' in fp32"
        )
        terms.append(term("ring buffers", tokens * each, "layer", text))
    return terms


def _loss(shape: ModelShape, tokens: int, value: int, setting: TileSetting) -> list[MemoryTerm]:
    # Log-probabilities, and the gradients of these and of the logits; the logits themselves are freed before.
    each, tile = 3 * FP32_BYTES, loss_tile_tokens(setting, tokens, shape.vocab_size)
    what = "untiled" if setting == "off" else f"of {tokens:,} per rank"
    text = (
        f"{tile:,} tokens {what} (memory.loss_tile={setting}) x vocabulary {shape.vocab_size:,} x {each} bytes: "
        "log-probabilities, their gradient and that of the logits, in fp32"
    )
    terms = [term("logits", tile * shape.vocab_size * each, "loss", text)]
    if setting != "off":
        hidden = tokens * shape.hidden_size * value
        each = FP32_BYTES + value
        text = (
            f"{tokens:,} tokens per rank x {shape.hidden_size:,} x {value} bytes + {shape.embedding_parameters:,} "
            f"parameters x {each} bytes: gradients of the hidden states and of the output head (summed in fp32, and of "
            "one tile), which are made in the forward pass"
        )
        terms.append(term("gradients of the head's tiles", hidden + shape.embedding_parameters * each, "loss", text))
    return terms
