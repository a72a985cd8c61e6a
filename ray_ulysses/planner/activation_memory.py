"""Estimates the activation memory of a step: tensors saved for the backward pass, and temporaries.

The terms follow the allocations of Transformers' Llama and of this package's functions.
`benchmarks/results/memory_model.md` compares the estimates with measured peaks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ray_ulysses.config.running import KeptActivation
from ray_ulysses.model_shape import WHOLE_HEAD_NORMS, ModelShape
from ray_ulysses.parallel.layout import (
    HeadPlan,
    TileSetting,
    assign_heads,
    loss_tile_tokens,
    mlp_tile_tokens,
    norm_tile_vectors,
)
from ray_ulysses.planner.memory_terms import FP32_BYTES, MemoryTerm, in_passes, term

_INPUTS, _OUTPUTS, _OUTPUTS_OF_MIXERS = (
    "layer inputs, kept", "attention outputs, kept", "recurrent layer outputs, kept"
)  # fmt: skip
KEPT_TERMS: dict[KeptActivation, tuple[str, ...]] = {
    "layer_inputs": (_INPUTS,),
    "attention_outputs": (_OUTPUTS, _OUTPUTS_OF_MIXERS),
}
"""Names of the terms that each entry of ``memory.offload_activations`` moves to host memory."""
_VALUES_OF_NORM = 5
"""Number of fp32 values that a norm's backward pass allocates per input value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSplit:
    """Attention settings that affect memory. ``copies_to_fp32`` is true for CPU kernels in half precision."""

    ulysses_size: int
    ring_size: int
    head_groups: int
    kept: Literal["both", "kernel", "none"]
    copies_to_fp32: bool = False

    def heads(self, shape: ModelShape) -> HeadPlan:
        """Return the head plan. With more ranks than heads, which `problems` refuses, assume one head per rank."""
        return assign_heads(shape.num_heads, shape.num_kv_heads, min(self.ulysses_size, shape.num_heads))

    def widths(self, shape: ModelShape, head_groups: int = 1) -> Widths:
        """Return the number of features per local token in the kernel's layout, on the rank with the most heads.

        A head group has at least one KV head.
        """
        heads = self.heads(shape)
        kv_per_group = -(-heads.max_kv_heads // min(head_groups, heads.max_kv_heads))
        queries = heads.max_heads * kv_per_group / heads.max_kv_heads
        (q, k), (output, v) = (
            (round(queries * self.ulysses_size * width), kv_per_group * self.ulysses_size * width)
            for width in (shape.head_dim, shape.value_dim)
        )
        return Widths(queries=q, keys=k, values=v, outputs=output)


@dataclass(frozen=True, kw_only=True, slots=True)
class Widths:
    """Numbers of features per token in attention's inputs and outputs."""

    queries: int
    keys: int
    values: int
    outputs: int

    @property
    def inputs(self) -> int:
        """Number of features of queries, keys and values."""
        return self.queries + self.keys + self.values


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiles:
    """Number of tokens per tile, for MLPs, for norms of hidden states, and for norms of queries."""

    mlp: int
    norm: int
    query_norm: int

    @classmethod
    def chosen(cls, setting: TileSetting, tokens: int, shape: ModelShape) -> Tiles:
        """Return the tile sizes for a ``memory.mlp_tile`` setting and a number of tokens per rank."""
        return cls(
            mlp=mlp_tile_tokens(setting, tokens, shape.mlp_width) if shape.has_mlp_modules else tokens,
            norm=norm_tile_vectors(setting, tokens, shape.hidden_size, shape.hidden_size),
            query_norm=tokens
            if shape.model_type in WHOLE_HEAD_NORMS
            else norm_tile_vectors(setting, tokens * shape.num_heads, shape.head_dim, shape.hidden_size)
            // shape.num_heads,
        )


def activation_terms(
    shape: ModelShape, tokens: int, split: AttentionSplit, value: int, tiles: Tiles, *, checkpointed: bool
) -> list[MemoryTerm]:
    """Return the memory terms of the decoder's layers, for ``tokens`` tokens per rank and ``value`` bytes per value."""
    hidden, layers = shape.hidden_size, shape.num_layers
    text = f"{tokens:,} tokens per rank x 2 x {shape.head_dim} x {value} bytes: rotary cosines and sines"
    terms = [in_passes("rotations", tokens * 2 * shape.head_dim * value, text)]
    saved = _saved(shape, tokens, split, value, tiles, checkpointed=checkpointed)
    if checkpointed:
        text = (
            f"{layers} layers x {tokens:,} tokens per rank x {hidden * shape.streams} x {value} bytes: saved by "
            "gradient checkpointing"
        )
        terms.append(in_passes(_INPUTS, layers * tokens * hidden * shape.streams * value, text))
        terms += [*_kept_attention(shape, tokens, split, value), *_kept_mixers(shape, tokens, split, value), *saved]
    else:
        kept = sum(one.bytes for one in saved) * layers
        text = f"{layers} layers x {kept // layers:,} bytes each, because memory.gradient_checkpointing is false"
        terms.append(in_passes("activations of all layers", kept, text))
    text = f"{tokens:,} tokens per rank x {hidden} x {value} bytes: the input of a layer's backward pass"
    terms.append(term("gradient of a layer's output", tokens * hidden * value, "layer", text))
    return [
        *terms,
        *_router_scores(shape, tokens, value),
        *_sums_with_adapter(shape, value, checkpointed=checkpointed or tiles.mlp < tokens),
        _mlp_backward(shape, tokens, value, tiles, checkpointed=checkpointed),
        *_attention_backward(shape, tokens, split, value, tiles),
    ]


def _saved(
    shape: ModelShape, tokens: int, split: AttentionSplit, value: int, tiles: Tiles, *, checkpointed: bool
) -> list[MemoryTerm]:
    hidden, widths = shape.hidden_size, split.widths(shape)
    # A norm saves its input in fp32, normalized values and scaled values. In fp32, the first norm saves the layer's
    # input itself, which checkpointing saves anyway.
    first, second = (0 if value == FP32_BYTES and checkpointed else FP32_BYTES) + 2 * value, FP32_BYTES + 2 * value
    what = "its input in fp32, normalized and scaled values"
    if tiles.norm < tokens:
        first, second, what = (
            value if checkpointed else 2 * value,
            2 * value,
            "its result, and its input unless it is the layer's",
        )
    text = f"{tokens:,} tokens per rank x {hidden} x {first} bytes: {what}"
    terms = [term("a layer's first norm", tokens * hidden * first, "layer", text)]
    text = f"{tokens:,} tokens per rank x {hidden} x {second} bytes: {what}"
    terms.append(term("a layer's second norm", tokens * hidden * second, "mlp", text))
    if shape.has_head_norms:
        width = (shape.num_heads + shape.num_kv_heads) * shape.head_dim
        each, what = FP32_BYTES + value, "their input in fp32 and normalized values"
        if tiles.query_norm < tokens:
            each, what = value, "their input"
        text = f"{tokens:,} tokens per rank x {width} x {each} bytes: {what}"
        terms.append(term("norms of queries and keys", tokens * width * each, "layer", text))
    text = f"{tokens:,} tokens per rank x {value} bytes x the widths of q, k and v in the kernel's layout"
    terms.append(term("attention q, k and v", tokens * value * widths.inputs, "layer", text))
    if split.kept == "none" or not checkpointed:
        each = widths.outputs * value + widths.queries // shape.head_dim * FP32_BYTES
        text = f"{tokens:,} tokens per rank x {each:,} bytes: output and log-sum-exp in the kernel's layout"
        terms.append(term("attention output", tokens * each, "layer", text))
    if split.ulysses_size > 1 and not (split.kept == "both" and checkpointed and split.head_groups == 1):
        width = shape.num_heads * shape.value_dim
        text = f"{tokens:,} tokens per rank x {width} x {value} bytes: input of the output projection"
        terms.append(term("attention output, exchanged", tokens * width * value, "mlp", text))
    if tiles.mlp >= tokens:
        each = _mlp_values(shape) * shape.mlp_width * value
        parts = "gate, up, their activation and product" if shape.is_gated else "the inner values and their activation"
        text = f"{tokens:,} tokens per rank x {each:,} bytes: {parts}"
        terms.append(term("one MLP", tokens * each, "mlp", text))
    return terms


def _mlp_values(shape: ModelShape) -> int:
    """Return the number of values of an MLP's width that its forward saves per token."""
    return 4 if shape.is_gated else 2


def _router_scores(shape: ModelShape, tokens: int, value: int) -> list[MemoryTerm]:
    experts = shape.experts
    if experts is None or not experts.has_router_loss:
        return []
    layers = shape.num_layers - experts.dense_layers
    text = (
        f"{layers} layers x {tokens:,} tokens per rank x {experts.count} experts x {value} bytes: scores for the "
        "router loss, later their gradients"
    )
    return [in_passes("router scores", layers * tokens * experts.count * value, text)]


def _sums_with_adapter(shape: ModelShape, value: int, *, checkpointed: bool) -> list[MemoryTerm]:
    """Return the memory of experts with their adapter's product; without recomputation, every layer keeps its sum."""
    part = shape.part
    if part is None or not part.summed:
        return []
    # All gradients, and the sum whose gradient is computed last. The other sums are already freed.
    text = (
        f"({part.largest_sum:,} + {part.largest_in_sum:,}) x {value} bytes: gradients of a layer's experts plus their "
        "adapter, and the largest of these sums"
    )
    terms = [term("experts plus adapter", (part.largest_sum + part.largest_in_sum) * value, "mlp", text)]
    if not checkpointed:
        kept = part.summed - part.largest_sum
        text = f"{kept:,} x {value} bytes: saved, because memory.gradient_checkpointing is false"
        terms.append(in_passes("experts plus adapter, other layers", kept * value, text))
    return terms


def _mlp_backward(shape: ModelShape, tokens: int, value: int, tiles: Tiles, *, checkpointed: bool) -> MemoryTerm:
    """Return the larger of the temporaries of the MLP's backward pass and of the preceding norm's backward pass."""
    tile, of_norm = tiles.mlp, tiles.norm * _VALUES_OF_NORM * FP32_BYTES
    if tiles.norm < tokens:
        # Over tiles, the gradients of the norm's result and input are allocated for all tokens.
        of_norm += tokens * 2 * value
    norm = of_norm * shape.hidden_size
    # An adapter adds its product and a scaled copy to the product with frozen weights. That of experts is in their sum.
    of_adapter = 2 if shape.part is not None and shape.part.added and not shape.part.summed else 0
    if checkpointed and tile >= tokens:
        # During the norm's backward pass, the MLP's saved tensors and its input are already freed.
        norm -= tokens * (_mlp_values(shape) * shape.mlp_width + shape.hidden_size) * value
    if tile < tokens:
        values = 2 + _mlp_values(shape) + of_adapter
        each, weights = values * shape.mlp_width * value, shape.mlp_parameters
        weights *= not shape.has_adapter
        size = tile * each + tokens * shape.hidden_size * value + weights * (FP32_BYTES + value)
        text = (
            f"{tile:,} tokens of {tokens:,} per rank (memory.mlp_tile) x {each:,} bytes: {values} values of its width; "
            f"plus {tokens:,} x {shape.hidden_size * value:,} bytes: its input's gradient; plus {weights:,} weights x "
            f"{FP32_BYTES + value} bytes: their gradients summed in fp32, and the gradients of one tile"
        )
        name = "one MLP, tiled"
    else:
        # The product of gate and up is freed before the last gradient is allocated.
        values = 2 + of_adapter
        each = values * shape.mlp_width * value
        size, name = tokens * each, "one MLP, backward"
        text = f"{tokens:,} tokens per rank x {each:,} bytes: {values} gradients of its width"
    if norm > size:
        text = (
            f"{tiles.norm:,} tokens of {tokens:,} per rank x {shape.hidden_size} x {_VALUES_OF_NORM} x {FP32_BYTES} "
            "bytes: values in fp32; plus, over tiles, the gradients of its result and its input"
        )
        size, name = norm, "a norm, backward"
    return term(name, size, "mlp", text)


def _kept_attention(shape: ModelShape, tokens: int, split: AttentionSplit, value: int) -> list[MemoryTerm]:
    if split.kept == "none":
        return []
    is_both = split.kept == "both" and split.ulysses_size > 1 and split.head_groups == 1
    heads = split.heads(shape)
    # The kernel's layout has one rank's heads (here of the rank with the most) for the tokens of all ranks of the
    # group. The model's layout has all heads for the slice. Use integers, because host memory is reserved by them.
    in_kernel = heads.max_heads * len(heads.ranks)
    width = shape.output_width // shape.num_heads * (in_kernel + (shape.num_heads if is_both else 0))
    each = width * value + shape.num_layers * shape.attentions * in_kernel * FP32_BYTES
    layouts = "in the layouts of kernel and model" if is_both else "in one layout"
    text = (
        f"{shape.num_layers} layers x {tokens:,} tokens per rank x {each // shape.num_layers:,} bytes: output "
        f"{layouts} and log-sum-exp (memory.attention_output={split.kept})"
    )
    return [in_passes(_OUTPUTS, tokens * each, text)]


def _kept_mixers(shape: ModelShape, tokens: int, split: AttentionSplit, value: int) -> list[MemoryTerm]:
    """Return the results of recurrent layers that gradient checkpointing saves: the exchanged outputs."""
    if not shape.mixer_width or split.kept != "both" or split.ulysses_size == 1:
        return []
    text = (
        f"{tokens:,} tokens per rank x {shape.mixer_width} x {value} bytes: inputs of the output projections "
        f"of {shape.mixer_layers} recurrent layers (memory.attention_output=both)"
    )
    return [in_passes(_OUTPUTS_OF_MIXERS, tokens * shape.mixer_width * value, text)]


def _attention_backward(
    shape: ModelShape, tokens: int, split: AttentionSplit, value: int, tiles: Tiles
) -> list[MemoryTerm]:
    """Return the larger of the temporaries of attention's backward pass and of the query norm's backward pass.

    The peak is during the kernel. The exchanges before and after the kernel take less memory.
    """
    widths = split.widths(shape, split.head_groups if split.ulysses_size > 1 else 1)
    # Without a ring, the gradients to send are allocated while the kernel's fp32 gradients still exist.
    sent = 0 if split.ring_size > 1 else widths.inputs
    each, what = (
        (widths.outputs + sent) * value + widths.inputs * FP32_BYTES,
        "output, and of q, k and v in the layout of the exchange",
    )
    copied = 0
    if split.copies_to_fp32:
        # In the ring steps with the most buffers, half of a rank's queries attend to all keys.
        queries, outputs = (one // min(2, split.ring_size) for one in (widths.queries, widths.outputs))
        made = queries + widths.keys + widths.values
        each, what = 2 * widths.outputs * value + made * FP32_BYTES, "output and its gradient"
        copied = (2 * outputs + made) * FP32_BYTES
    text = f"{tokens:,} tokens per rank x {each} bytes: {what}, and the gradients of q, k and v in fp32"
    terms = [term("attention gradients", tokens * each, "attention", text)]
    if copied:
        text = f"{tokens:,} tokens per rank x {copied} bytes: q, k, v, output and its gradient in fp32, on a CPU"
        terms.append(term("attention inputs in fp32", tokens * copied, "attention", text))
    if split.ring_size > 1:
        each = (widths.keys + widths.values) * (2 * value + 3 * FP32_BYTES) + widths.queries * FP32_BYTES
        text = (
            f"{tokens:,} tokens per rank x {each} bytes: keys and values, in use and in transit; their gradients in "
            "fp32, computed, sent and received; and the queries' gradients in fp32"
        )
        terms.append(term("ring buffers", tokens * each, "attention", text))
    if shape.has_head_norms and tiles.query_norm >= tokens:
        each = shape.num_heads * shape.head_dim * _VALUES_OF_NORM * FP32_BYTES
        if tokens * each > sum(one.bytes for one in terms):
            text = f"{tokens:,} tokens per rank x {each:,} bytes: {_VALUES_OF_NORM} values of each query in fp32"
            return [term("norm of queries, backward", tokens * each, "attention", text)]
    return terms


def loss_terms(
    shape: ModelShape, tokens: int, value: int, setting: TileSetting, norm_tile: int, *, z_loss: bool = False
) -> list[MemoryTerm]:
    """Return the memory terms of the loss and of the preceding norm.

    For ``tokens`` and ``value``, see `activation_terms`. ``norm_tile`` is the norm's number of tokens per tile.
    """
    each, what = FP32_BYTES + 2 * value, "its input in fp32, and two values of each"
    if norm_tile < tokens:
        each, what = 2 * value, "its input and its result"
    text = f"{tokens:,} tokens per rank x {shape.hidden_size} x {each} bytes: {what}"
    terms = [term("final norm", tokens * shape.hidden_size * each, "loss", text)]
    # At the peak, the logits are already freed.
    each, tile = (5 if z_loss else 3) * FP32_BYTES, loss_tile_tokens(setting, tokens, shape.vocab_size)
    values = "log-probabilities, their gradient and the logits' gradient"
    if z_loss:
        values = "logits, and four temporaries of their gradient with two losses (optimizer.z_loss)"
    what = "untiled" if setting == "off" else f"of {tokens:,} per rank"
    text = (
        f"{tile:,} tokens {what} (memory.loss_tile={setting}) x vocabulary {shape.vocab_size:,} x {each} bytes: "
        f"{values}, in fp32"
    )
    logits = tile * shape.vocab_size * each
    if setting == "off":
        return [*terms, term("logits", logits, "loss", text)]
    # When a tile's gradient of the head is computed, only the gradient of the tile's logits is left.
    head = shape.embedding_parameters if shape.head_is_trained else 0
    of_tile = (tile * shape.vocab_size + head) * value
    if of_tile > logits:
        logits = of_tile
        text = (
            f"({tile:,} tokens of {tokens:,} per rank (memory.loss_tile={setting}) x vocabulary "
            f"{shape.vocab_size:,} + {head:,} parameters) x {value} bytes: one tile's gradients of the logits and of "
            "the head"
        )
    terms.append(term("logits", logits, "loss", text))
    # With a single tile, no separate sums are allocated while its logits exist.
    summed = 0 if tile >= tokens else head * FP32_BYTES
    text = (
        f"{tokens:,} tokens per rank x {shape.hidden_size:,} x {value} bytes + {summed:,} bytes: gradients of the "
        "hidden states and of the output head (summed over tiles in fp32), computed in the forward pass"
    )
    terms.append(term("gradients of the head's tiles", tokens * shape.hidden_size * value + summed, "loss", text))
    return terms
