"""A first estimate of the memory of one rank, term by term: pure arithmetic that a person can check by hand.

It is an estimate, not a measurement: padding of the partitions, the allocator's fragmentation and kernels' workspaces
are left out, and temporaries are counted by what the formulas say stays alive together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ray_ulysses.model_shape import ModelShape
from ray_ulysses.parallel.heads import HeadPlan, assign_heads

GIB = 1 << 30
BYTES_PER_VALUE: dict[str, int] = {"bf16": 2, "fp32": 4}
_FP32 = 4

# DeepSpeed 0.19's default of `stage3_max_live_parameters`: weights that may stay gathered for later use.
_LIVE_PARAMETERS = 1_000_000_000
# What engine/zero.py sets as `reduce_bucket_size`: one buffer of so many gradients is made at the start.
_REDUCE_BUCKET = 50_000_000
_ACCELERATOR_RUNTIME_BYTES = 2 * GIB

Phase = Literal["always", "loss", "layer", "save", "load"]
"""When a term is alive: through a whole step; beside that only in the loss, in one layer's backward pass or while a
checkpoint is written, no two of which come together; or only while the model is loaded, before all others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryTerm:
    """One part of the memory of a rank.

    Attributes:
        name: What it is.
        bytes: How much.
        phase: When it is alive.
        source: Where the number comes from, as a sentence.
    """

    name: str
    bytes: int
    phase: Phase
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """The memory of one rank, on its device and on its host.

    Attributes:
        device: Terms on the accelerator (on the host, where training runs on CPU).
        host: Terms in host memory beside them.
        note: What kind of number this is.
    """

    device: tuple[MemoryTerm, ...]
    host: tuple[MemoryTerm, ...]
    note: str = "a first estimate by formula, not a measurement"

    @property
    def device_bytes(self) -> int:
        """The largest sum of device terms that are alive together."""
        return _peak(self.device)

    @property
    def host_bytes(self) -> int:
        """The same on the host."""
        return _peak(self.host)


@dataclass(frozen=True, kw_only=True, slots=True)
class _AttentionSplit:
    """How attention is shared among ranks, and what of it is kept."""

    ulysses_size: int
    ring_size: int
    chunks: int
    kept: Literal["both", "kernel", "none"]

    def heads(self, shape: ModelShape) -> HeadPlan:
        """Return the heads of each rank; what there can't be is refused elsewhere."""
        return assign_heads(shape.num_heads, shape.num_kv_heads, min(self.ulysses_size, shape.num_heads))


def _peak(terms: tuple[MemoryTerm, ...]) -> int:
    total: dict[Phase, int] = {}
    for term in terms:
        total[term.phase] = total.get(term.phase, 0) + term.bytes
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
    offload_optimizer: Literal["none", "cpu"] = "none",
    gradient_checkpointing: bool = True,
    attention_output: Literal["both", "kernel", "none"] = "both",
    attention_chunks: int = 1,
    init: Literal["pretrained", "random"] = "pretrained",
    accelerator: bool = True,
) -> MemoryEstimate:
    """Estimate what one rank holds while it trains rows of a full context, one at a time.

    Args:
        shape: The model.
        world_size: Workers; ZeRO-3 shards over all of them.
        sp_size: Ranks that share a row.
        context_tokens: Longest row, in tokens.
        ring_size: Ring degree within ``sp_size``.
        dtype: Type of compute.
        offload_optimizer: Where the optimizer's state lives.
        gradient_checkpointing: Whether layers are computed again in the backward pass.
        attention_output: What gradient checkpointing keeps of attention's output.
        attention_chunks: Shares in which heads are exchanged and attended.
        init: Where the weights come from, which decides what loading takes.
        accelerator: Whether ranks have a device of their own, whose runtime takes memory too.

    Returns:
        Every term with its source.
    """
    local_tokens = -(-context_tokens // sp_size)
    value = BYTES_PER_VALUE[dtype]
    device = [*_sharded_state(shape, world_size, value, on_host=offload_optimizer == "cpu")]
    device += _gathered(shape, value)
    attention = _AttentionSplit(
        ulysses_size=sp_size // ring_size, ring_size=ring_size, chunks=attention_chunks, kept=attention_output
    )
    device += _activations(shape, local_tokens, attention, value, checkpointed=gradient_checkpointing)
    device.append(_loss(shape, local_tokens, value))
    on_host, on_device = _load(shape, init, value)
    if on_device is not None:
        device.append(on_device)
    if accelerator:
        text = "an assumption: the device's context, loaded kernels and NCCL's buffers; not yet measured"
        device.append(MemoryTerm(name="runtime", bytes=_ACCELERATOR_RUNTIME_BYTES, phase="always", source=text))
    return MemoryEstimate(device=tuple(device), host=(*_host(shape, world_size, offload_optimizer == "cpu"), on_host))


def _sharded_state(shape: ModelShape, world_size: int, value: int, *, on_host: bool) -> list[MemoryTerm]:
    shard = -(-shape.num_parameters // world_size)
    terms = [
        MemoryTerm(
            name="weights, sharded",
            bytes=shard * value,
            phase="always",
            source=f"{shape.num_parameters:,} parameters / {world_size} ranks x {value} bytes: ZeRO-3 shards them",
        )
    ]
    if not on_host:
        terms += _optimizer_terms(shard, world_size)
    return terms


def _optimizer_terms(shard: int, world_size: int) -> list[MemoryTerm]:
    each = f"{shard:,} parameters a rank (1/{world_size})"
    rows = (
        ("master weights, fp32", 1, f"{each} x 4 bytes: the optimizer's own copy, which ZeRO-3 shards"),
        ("AdamW moments, fp32", 2, f"{each} x 2 x 4 bytes: mean and variance"),
        ("gradients, fp32", 1, f"{each} x 4 bytes: accumulated over the micro-batches of a step in fp32"),
    )
    return [
        MemoryTerm(name=name, bytes=shard * _FP32 * copies, phase="always", source=source)
        for name, copies, source in rows
    ]


def _gathered(shape: ModelShape, value: int) -> list[MemoryTerm]:
    bucket = _REDUCE_BUCKET + shape.embedding_parameters
    working = max(2 * shape.layer_parameters, shape.embedding_parameters)
    live = max(working, min(shape.num_parameters, _LIVE_PARAMETERS))
    return [
        MemoryTerm(
            name="weights, gathered",
            bytes=live * value,
            phase="always",
            source=f"{live:,} parameters x {value} bytes: a layer, the one fetched ahead, and what DeepSpeed keeps "
            "for reuse (stage3_max_live_parameters)",
        ),
        MemoryTerm(
            name="gradients, before reduction",
            bytes=bucket * value,
            phase="always",
            source=f"({_REDUCE_BUCKET:,} + {shape.embedding_parameters:,}) x {value} bytes: DeepSpeed's bucket "
            "(reduce_bucket_size), and the embedding's gradient, whole on every rank until it is reduced",
        ),
    ]


def _activations(
    shape: ModelShape, tokens: int, split: _AttentionSplit, value: int, *, checkpointed: bool
) -> list[MemoryTerm]:
    hidden, layers = shape.hidden_size, shape.num_layers
    one_layer = [_layer_values(shape, tokens, value), *_attention(shape, tokens, split, value)]
    if checkpointed:
        saved = MemoryTerm(
            name="layer inputs, kept",
            bytes=layers * tokens * hidden * value,
            phase="always",
            source=f"{layers} layers x {tokens:,} tokens a rank x {hidden} x {value} bytes: what gradient "
            "checkpointing keeps of each layer",
        )
        return [saved, *_kept_attention(shape, tokens, split, value), *one_layer]
    kept = sum(term.bytes for term in one_layer) * layers
    return [
        MemoryTerm(
            name="activations of all layers",
            bytes=kept,
            phase="always",
            source=f"{layers} layers x {kept // layers:,} bytes of one, since memory.gradient_checkpointing is false",
        )
    ]


def _layer_values(shape: ModelShape, tokens: int, value: int) -> MemoryTerm:
    # Two norms, each with an fp32 copy, a normalised and a scaled output; the residual sums; the attention's output.
    around = 2 * (_FP32 + 2 * value) + 3 * value
    # gate, up, their activation and product are kept for the backward pass, where two gradients join them.
    each = shape.hidden_size * around + 6 * shape.intermediate_size * value
    return MemoryTerm(
        name="one layer outside attention",
        bytes=tokens * each,
        phase="layer",
        source=f"{tokens:,} tokens a rank x {each:,} bytes: norms with fp32 copies, residuals, and six values of the "
        "MLP's width (four kept, two gradients)",
    )


def _kept_attention(shape: ModelShape, tokens: int, split: _AttentionSplit, value: int) -> list[MemoryTerm]:
    """Return what gradient checkpointing keeps of attention in every layer, so that it is not computed again."""
    if split.kept == "none":
        return []
    is_both = split.kept == "both" and split.ulysses_size > 1 and split.chunks == 1
    share = split.heads(shape).imbalance
    # The kernel's layout has the fullest rank's heads; the model's has all heads of this rank's slice.
    width = shape.num_heads * shape.head_dim * (share + 1 if is_both else share)
    each = round(width * value + shape.num_heads * share * _FP32)
    layouts = "in the layouts of kernel and model" if is_both else "in one layout"
    return [
        MemoryTerm(
            name="attention outputs, kept",
            bytes=shape.num_layers * tokens * each,
            phase="always",
            source=f"{shape.num_layers} layers x {tokens:,} tokens a rank x {each:,} bytes: output {layouts} and "
            f"log-sum-exp (memory.attention_output={split.kept})",
        )
    ]


def _attention(shape: ModelShape, tokens: int, split: _AttentionSplit, value: int) -> list[MemoryTerm]:
    heads = split.heads(shape)
    query = shape.num_heads * shape.head_dim
    # After the exchange the fullest rank has this many features of the tokens of its part of the row.
    # A chunk has one key-value head of a rank at least, and only what is exchanged comes in chunks.
    chunks = min(split.chunks, heads.max_kv_heads) if split.ulysses_size > 1 else 1
    kv_a_chunk = -(-heads.max_kv_heads // chunks)
    share = kv_a_chunk / heads.max_kv_heads
    query_after = heads.max_heads * split.ulysses_size * shape.head_dim * share
    kv_after = kv_a_chunk * split.ulysses_size * shape.head_dim
    kept = 2 * query + shape.num_kv_heads * 2 * shape.head_dim
    terms = [
        MemoryTerm(
            name="attention q, k, v and output",
            bytes=round(tokens * value * (kept + 2 * query_after + 2 * kv_after)),
            phase="layer",
            source=f"{tokens:,} tokens a rank x {value} bytes x the widths of q, k, v and output, and their gradients "
            "in the kernel's layout",
        ),
        MemoryTerm(
            name="attention log-sum-exp",
            bytes=tokens * shape.num_heads * _FP32,
            phase="layer",
            source=f"{tokens:,} tokens a rank x {shape.num_heads} heads x 4 bytes: kept for the softmax's backward",
        ),
    ]
    if split.ulysses_size > 1:
        exchange = round(2 * (query_after + 2 * kv_after))
        terms.append(
            MemoryTerm(
                name="all-to-all buffers",
                bytes=tokens * value * exchange,
                phase="layer",
                source=f"{tokens:,} tokens a rank x {value} bytes x {exchange}: q, k and v in one payload, sent and "
                "received (the output's, and the gradients', are no larger)",
            )
        )
    if split.ring_size > 1:
        each = round(2 * kv_after * (2 * value + 3 * _FP32) + query_after * _FP32)
        terms.append(
            MemoryTerm(
                name="ring buffers",
                bytes=tokens * each,
                phase="layer",
                source=f"{tokens:,} tokens a rank x {each} bytes: keys and values held and on their way, their "
                "gradients in fp32 made, sent and received, and the queries' in fp32",
            )
        )
    return terms


def _loss(shape: ModelShape, tokens: int, value: int) -> MemoryTerm:
    each = value + 3 * _FP32
    return MemoryTerm(
        name="logits",
        bytes=tokens * shape.vocab_size * each,
        phase="loss",
        source=f"{tokens:,} tokens a rank x vocabulary {shape.vocab_size:,} x {each} bytes: logits, their fp32 copy, "
        "log-probabilities and gradient, untiled in this version",
    )


def _load(shape: ModelShape, init: Literal["pretrained", "random"], value: int) -> tuple[MemoryTerm, MemoryTerm | None]:
    """Return what loading takes on the host and, where the model is not partitioned as it comes, on the device."""
    count = shape.num_parameters
    if init == "pretrained":
        text = f"{count:,} parameters x {value} bytes: Transformers reads every weight on each rank, then partitions"
        return MemoryTerm(name="the model, while it is loaded", bytes=count * value, phase="load", source=text), None
    text = f"{count:,} parameters x 4 bytes: each rank draws the whole model from the seed, in fp32"
    host = MemoryTerm(name="the model, while it is drawn", bytes=count * _FP32, phase="load", source=text)
    text = f"{count:,} parameters x {value} bytes: DeepSpeed moves the whole model to the device, then partitions"
    return host, MemoryTerm(name="the model, before it is sharded", bytes=count * value, phase="load", source=text)


def _host(shape: ModelShape, world_size: int, offloaded: bool) -> tuple[MemoryTerm, ...]:
    shard = -(-shape.num_parameters // world_size)
    saved = MemoryTerm(
        name="a checkpoint, while it is written",
        bytes=3 * shard * _FP32,
        phase="save",
        source=f"{shard:,} parameters a rank x 3 x 4 bytes: weights and moments of this rank's shard",
    )
    return (*(_optimizer_terms(shard, world_size) if offloaded else ()), saved)
