"""Describes how the channels of recurrent layers are divided among ranks.

Between their input and output projections, short convolutions, gated delta nets, Mamba 2 and lightning attention treat
each channel or head independently, so heads can be divided among ranks like attention heads. Mamba 1 has one more
projection, from all channels to time steps and states. Its result is the sum of the ranks' partial results. A layout
maps the channels of a Transformers module's projections and parameters to heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class Block:
    """A range of consecutive channels, ordered by unit. A unit is a head, a group of heads, or a single channel."""

    units: int
    width: int = 1
    """Number of channels per unit."""
    is_exchanged: bool = True
    """Whether the recurrence uses these channels. Otherwise the channels stay on the rank that has the slice."""

    @property
    def channels(self) -> int:
        """Number of channels."""
        return self.units * self.width

    def fits(self, ranks: int) -> bool:
        """Return whether the units divide equally: the same number of units per rank, or of ranks per unit."""
        return self.units % ranks == 0 or ranks % self.units == 0


Blocks = tuple[Block, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class MixerLayout:
    """The assignment of a recurrent module's channels to units, and the names of the attributes that depend on it."""

    unit: str
    """Display name of the units, used in errors."""
    num_units: int
    """Number of units, which must be a multiple of the number of ranks."""
    projections: Mapping[str, Blocks]
    """Output channels of each input projection, by attribute name. A dotted name is in a submodule."""
    output: str
    """Attribute name of the output projection. Its input channels are ordered by unit."""
    convolution: str | None = None
    """Attribute name of the causal convolution, or None if the module has none."""
    channels: Blocks = ()
    """Channels of the convolution."""
    before: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Names of modules applied to the input before a projection, keyed by the projection's name."""
    vectors: tuple[str, ...] = ()
    """Names of parameters and buffers that are divided among ranks along their first dim larger than 1."""
    sizes: Mapping[str, Blocks] = field(default_factory=dict)
    """Names of integer attributes that store a number of channels or heads, mapped to the blocks that it counts."""
    norms: tuple[str, ...] = ()
    """Names of norms that run on every rank, either per head or on values that are the same on all ranks."""
    summed: str | None = None
    """Name of a projection from all channels after the convolution, or None. The projection has no bias, so its result
    is the sum of the ranks' partial results."""
    row_norm: str | None = None
    """Name of a norm over all heads, or None. The norm runs on the slice. Unless ``row_gate`` is set, the norm's gate
    is the projection's block that is not exchanged."""
    row_gate: str | None = None
    """Name of a projection whose sigmoid multiplies the result of ``row_norm``, or None."""
    input_scale: str | None = None
    """Name of the attribute with a scalar factor on the input, or None."""
    projection_scale: str | None = None
    """Name of the attribute with a vector of factors on the projected channels, or None."""
    is_attention: bool = False
    """Whether the module has attention's call signature: it accepts (and ignores) rotary embeddings and a mask, and
    returns a pair."""
    is_called_without_tables: bool = False
    """Whether the enclosing decoder layer drops the keyword argument that contains the document tables."""
    multiply_adds: int = 0
    """Multiply-adds of the recurrence per token, over all heads: one per state value for each update and each read of
    the state. Chunked kernels run more operations to be faster."""

    def valid_ranks(self) -> tuple[int, ...]:
        """Return the rank counts that can share the heads equally, in ascending order."""
        blocks = [block for blocks in (*self.projections.values(), self.channels) for block in blocks]
        counts = (ranks for ranks in range(1, self.num_units + 1) if self.num_units % ranks == 0)
        return tuple(ranks for ranks in counts if all(block.fits(ranks) for block in blocks if block.is_exchanged))


def arranged(tensor: torch.Tensor, blocks: Blocks, ranks: int, dim: int) -> torch.Tensor:
    """Group a tensor's exchanged channels by rank; differentiable.

    ``dim`` is the non-negative index of the channel dim.

    Returns:
        The tensor with ``dim`` replaced by two dims: ranks, and channels per rank in block order.
    """
    parts = []
    for part, block in zip(tensor.split([block.channels for block in blocks], dim=dim), blocks, strict=True):
        if not block.is_exchanged:
            continue
        if block.units % ranks == 0:
            parts.append(part.unflatten(dim, (ranks, -1)))
        else:
            # Ranks that share a head each get a copy; autograd sums the copies' gradients.
            parts.append(part.unflatten(dim, (block.units, -1)).repeat_interleave(ranks // block.units, dim=dim))
    return torch.cat(parts, dim=dim + 1)


def local_channels(blocks: Blocks, ranks: int) -> int:
    """Return the number of channels per rank, including channels that are not exchanged."""
    # If there are more ranks than units, several ranks share a unit.
    return sum(max(1, block.units // ranks) * block.width for block in blocks)


def layout_of(module: nn.Module) -> MixerLayout | None:
    """Return the layout of a supported recurrent Transformers module, or None for any other module."""
    kind = type(module)
    read = _READERS.get(kind.__name__) if kind.__module__.startswith("transformers.models.") else None
    return None if read is None else read(module)


def _short_convolution(module: Any) -> MixerLayout:
    channels = Block(module.in_proj.out_features // 3)
    return MixerLayout(
        unit="channels of the short convolutions",
        num_units=channels.units,
        projections={"in_proj": (channels,) * 3},
        output="out_proj",
        convolution="conv",
        channels=(channels,),
    )


def _delta_net(module: Any, projections: Mapping[str, Blocks], *, gate_norm: str, output: str) -> MixerLayout:
    """Return the layout of a gated delta net, where each key head serves a group of value heads."""
    keys, values = Block(module.num_k_heads, module.head_k_dim), Block(module.num_v_heads, module.head_v_dim)
    return MixerLayout(
        unit="key heads of the gated delta nets",
        num_units=module.num_k_heads,
        projections=projections,
        output=output,
        convolution="conv1d",
        channels=(keys, keys, values),
        vectors=("A_log", "dt_bias"),
        sizes={
            "num_k_heads": (Block(module.num_k_heads),),
            "num_v_heads": (Block(module.num_v_heads),),
            "key_dim": (keys,),
            "value_dim": (values,),
            "conv_dim": (keys, keys, values),
        },
        norms=(gate_norm,),
        # Per token, the state is read with the key, updated with the difference, and read with the query.
        multiply_adds=3 * module.num_v_heads * module.head_k_dim * module.head_v_dim,
    )


def _qwen3_next(module: Any) -> MixerLayout:
    # Channels are grouped by key head (see fix_query_key_value_ordering in Transformers).
    group = module.num_v_heads // module.num_k_heads
    width = 2 * module.head_k_dim + 2 * group * module.head_v_dim
    projections = {
        "in_proj_qkvz": (Block(module.num_k_heads, width),),
        "in_proj_ba": (Block(module.num_k_heads, 2 * group),),
    }
    return _delta_net(module, projections, gate_norm="norm", output="out_proj")


def _qwen3_5(module: Any) -> MixerLayout:
    keys, values = Block(module.num_k_heads, module.head_k_dim), Block(module.num_v_heads, module.head_v_dim)
    heads = Block(module.num_v_heads)
    projections = {
        "in_proj_qkv": (keys, keys, values),
        "in_proj_z": (values,),
        "in_proj_b": (heads,),
        "in_proj_a": (heads,),
    }
    return _delta_net(module, projections, gate_norm="norm", output="out_proj")


def _olmo_hybrid(module: Any) -> MixerLayout:
    keys, values = Block(module.num_k_heads, module.head_k_dim), Block(module.num_v_heads, module.head_v_dim)
    heads = Block(module.num_v_heads)
    projections = {
        "q_proj": (keys,),
        "k_proj": (keys,),
        "v_proj": (values,),
        "a_proj": (heads,),
        "b_proj": (heads,),
        "g_proj": (values,),
    }
    return _delta_net(module, projections, gate_norm="o_norm", output="o_proj")


def _kimi(module: Any) -> MixerLayout:
    heads, channels = Block(module.num_heads), Block(module.num_heads, module.head_dim)
    # Kimi Linear computes decays and gates with low-rank pairs of projections, Bailing with single projections.
    is_narrow = hasattr(module, "g_a_proj")
    decay, gate = ("forget_gate.f_b_proj", "g_b_proj") if is_narrow else ("forget_gate.f_proj", "g_proj")
    return MixerLayout(
        unit="heads of the Kimi delta attention",
        num_units=module.num_heads,
        projections={
            "q_proj": (channels,),
            "k_proj": (channels,),
            "v_proj": (channels,),
            decay: (channels,),
            "b_proj": (heads,),
            gate: (channels,),
        },
        before={decay: ("forget_gate.f_a_proj",), gate: ("g_a_proj",)} if is_narrow else {},
        output="o_proj",
        convolution="conv1d",
        channels=(channels,) * 3,
        vectors=("forget_gate.A_log", "forget_gate.dt_bias"),
        sizes={
            "num_heads": (heads,),
            "qkv_dim": (channels,),
            "conv_dim": (channels,) * 3,
            "forget_gate.num_heads": (heads,),
        },
        norms=("o_norm",),
        multiply_adds=3 * module.num_heads * module.head_dim**2,
    )


def _lightning(module: Any) -> MixerLayout:
    heads = Block(module.num_attention_heads)
    return MixerLayout(
        unit="heads of the lightning attention",
        num_units=heads.units,
        # Channels are grouped by head: query, key, value of the first head, then of the second, and so on.
        projections={"act_fn": (Block(heads.units, 3 * module.head_dim),)},
        before={"act_fn": ("qkv_proj",)},
        output="out_proj",
        vectors=("slope_rate", "query_decay", "key_decay", "diagonal_decay"),
        sizes={"num_attention_heads": (heads,)},
        row_norm="norm",
        row_gate="output_gate",
        is_attention=True,
        multiply_adds=2 * heads.units * module.head_dim**2,
    )


def _mamba1(module: Any) -> MixerLayout:
    channels = Block(module.intermediate_size)
    return MixerLayout(
        unit="channels of the Mamba layers",
        num_units=channels.units,
        projections={"in_proj": (channels, channels)},
        output="out_proj",
        convolution="conv1d",
        channels=(channels,),
        vectors=("A_log", "D", "dt_proj.weight", "dt_proj.bias"),
        sizes={"intermediate_size": (channels,)},
        norms=("dt_layernorm", "b_layernorm", "c_layernorm"),
        summed="x_proj",
        is_called_without_tables=True,
        multiply_adds=2 * channels.units * module.ssm_state_size,
    )


def _zamba(module: Any) -> MixerLayout:
    # Mamba 1 with heads. A head computes time steps and states from its own channels; channels and gates alternate.
    heads, channels = Block(module.n_mamba_heads), Block(module.n_mamba_heads, module.mamba_head_dim)
    return MixerLayout(
        unit="heads of the Mamba layers",
        num_units=heads.units,
        projections={"in_proj": (Block(heads.units, 2 * channels.width),)},
        output="out_proj",
        convolution="conv1d",
        channels=(channels,),
        vectors=("x_proj_weight", "dt_proj_weight", "dt_proj_bias", "A_log", "D"),
        sizes={"n_mamba_heads": (heads,)},
        multiply_adds=2 * channels.channels * module.ssm_state_size,
    )


def _mamba2(module: Any) -> MixerLayout:
    # Falcon-H1 can be configured without the norm. The gate is then applied per channel, so it is exchanged.
    has_norm = getattr(module, "mamba_rms_norm", True)
    inner, heads = Block(module.num_heads, module.head_dim), Block(module.num_heads)
    state = Block(module.n_groups, module.ssm_state_size)
    channels = (inner, state, state)
    is_scaled = hasattr(module, "mup_vector")
    return MixerLayout(
        unit="heads of the Mamba layers",
        num_units=module.num_heads,
        projections={"in_proj": (Block(inner.units, inner.width, is_exchanged=not has_norm), *channels, heads)},
        output="out_proj",
        convolution="conv1d",
        channels=channels,
        vectors=("A_log", "dt_bias", "D"),
        sizes={
            "num_heads": (heads,),
            "n_groups": (Block(module.n_groups),),
            "intermediate_size": (inner,),
            "conv_dim": channels,
        },
        row_norm="norm" if has_norm else None,
        input_scale="ssm_in_multiplier" if is_scaled else None,
        projection_scale="mup_vector" if is_scaled else None,
        multiply_adds=2 * inner.channels * module.ssm_state_size,
    )


# Keyed by class name, because the order of channels differs between classes.
_READERS: dict[str, Callable[[Any], MixerLayout]] = {
    "Lfm2ShortConv": _short_convolution,
    "Lfm2MoeShortConv": _short_convolution,
    "Lfm3ShortConv": _short_convolution,
    "Qwen3NextGatedDeltaNet": _qwen3_next,
    "Qwen3_5GatedDeltaNet": _qwen3_5,
    "Qwen3_5MoeGatedDeltaNet": _qwen3_5,
    "OlmoHybridGatedDeltaNet": _olmo_hybrid,
    "KimiLinearDeltaAttention": _kimi,
    "BailingHybridDeltaAttention": _kimi,
    "MiniMaxLightningAttention": _lightning,
    "JambaMambaMixer": _mamba1,
    "ZambaMambaMixer": _zamba,
    "BambaMixer": _mamba2,
    "GraniteMoeHybridMambaLayer": _mamba2,
    "NemotronHMamba2Mixer": _mamba2,
    "FalconH1Mixer": _mamba2,
    "Zamba2MambaMixer": _mamba2,
}
