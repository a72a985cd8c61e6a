"""How ranks share the heads, groups and channels of layers that carry state along the sequence; pure arithmetic.

Short convolutions, gated delta nets, Mamba 2 and lightning attention work channel by channel or head by head between
their input projections and their output projection, so ranks can share the heads as they share attention heads. Mamba 1
also projects all channels to time steps and states, which are sums over the ranks' channels. A layout describes how the
channels of a Transformers module's projections and parameters belong to heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive channels of units (heads, groups of heads, or single channels), in the units' order."""

    units: int
    width: int = 1
    """Channels per unit."""
    is_exchanged: bool = True
    """Whether whole rows of the block are needed; otherwise it stays on the slice."""

    @property
    def channels(self) -> int:
        """Number of channels."""
        return self.units * self.width

    def local_units(self, ranks: int) -> int:
        """Return the number of units per rank; with more ranks than units, several ranks have the same unit."""
        return max(1, self.units // ranks)

    def fits(self, ranks: int) -> bool:
        """Return whether all ranks get the same number of units, or all units the same number of ranks."""
        return self.units % ranks == 0 or ranks % self.units == 0


Blocks = tuple[Block, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class MixerLayout:
    """How the channels of a module belong to heads, and the names of its attributes that depend on it."""

    unit: str
    """Display name of the units, used in errors."""
    num_units: int
    """Must be a multiple of the number of ranks."""
    projections: Mapping[str, Blocks]
    """Names of the input projections, and the blocks of their results; a dotted name is in a submodule."""
    output: str
    """Name of the output projection, whose input is in the order of heads."""
    convolution: str | None = None
    """Name of the causal convolution, if there is one."""
    channels: Blocks = ()
    """Blocks of the convolution's channels."""
    before: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Names of the modules that the input passes through before a projection, for projections that need them."""
    vectors: tuple[str, ...] = ()
    """Names of parameters and buffers whose first dim larger than 1 has the same number of entries for each head."""
    sizes: Mapping[str, Blocks] = field(default_factory=dict)
    """Names of attributes that hold a number of channels or heads, and the blocks that they count."""
    norms: tuple[str, ...] = ()
    """Names of the inner norms: over each head before the output projection, or over values that all ranks have."""
    summed: str | None = None
    """Name of the projection of all channels after the convolution, if there is one. It has no bias, so that its result
    is the sum of its results for each rank's channels."""
    row_norm: str | None = None
    """Name of the norm over all heads, which runs on the slice. Its gate is the part of the projection that is not
    exchanged, unless ``row_gate`` is set."""
    row_gate: str | None = None
    """Name of the projection whose sigmoid multiplies the norm's result on the slice, if there is one."""
    input_scale: str | None = None
    """Name of the factor on the input, if there is one."""
    projection_scale: str | None = None
    """Name of the factors on the projections' channels, if there are any."""
    is_attention: bool = False
    """Whether the module is called like attention: it gets rotary embeddings and a mask, which it does not use, and
    returns a pair."""
    is_called_without_tables: bool = False
    """Whether the layer around it does not pass keywords on to it."""
    multiply_adds: int = 0
    """Multiply-adds of the recurrence per token, for all heads: each update and each read of the state takes one per
    value of the state. Chunked kernels compute more in order to be faster."""

    def valid_ranks(self) -> tuple[int, ...]:
        """Return, in ascending order, the numbers of ranks that can share the heads equally."""
        blocks = [block for blocks in (*self.projections.values(), self.channels) for block in blocks]
        counts = (ranks for ranks in range(1, self.num_units + 1) if self.num_units % ranks == 0)
        return tuple(ranks for ranks in counts if all(block.fits(ranks) for block in blocks if block.is_exchanged))


def arranged(tensor: torch.Tensor, blocks: Blocks, ranks: int, dim: int) -> torch.Tensor:
    """Group a tensor's channels by rank; differentiable.

    ``dim`` is the channels' dim, at least 0.

    Returns:
        The tensor with ``dim`` replaced by two: the ranks, and the exchanged channels of each, in the blocks' order.
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
    """Return the number of channels of one rank, including channels that are not exchanged."""
    return sum(block.local_units(ranks) * block.width for block in blocks)


def layout_of(module: nn.Module) -> MixerLayout | None:
    """Return the layout of a Transformers module that carries state and can be trained exactly, or ``None``."""
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
    """Return the layout of a gated delta net, in which a group of value heads shares a key head."""
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
        # The state is read at the key, updated by the difference, and read by the query.
        multiply_adds=3 * module.num_v_heads * module.head_k_dim * module.head_v_dim,
    )


def _qwen3_next(module: Any) -> MixerLayout:
    # Channels are grouped by key head, as fix_query_key_value_ordering reads them.
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
    # Kimi Linear computes decays and gates with two narrow projections each, Bailing with one.
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
        # Each head's query is followed by its key and its value.
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
    # Mamba 1 with heads: each computes time steps and states from its own channels, which alternate with their gates.
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
    # Falcon-H1 may have no norm: each channel is then gated separately, and the gate is exchanged.
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


# By class name, since another class may order its channels differently.
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
