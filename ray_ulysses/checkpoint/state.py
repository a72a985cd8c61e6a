"""Training state in the form that checkpoints store: flattened parts of tensors, and a description of the state."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Protocol

from pydantic import Field

from ray_ulysses.checkpoint.intervals import Interval
from ray_ulysses.validation import Whole

if TYPE_CHECKING:
    import torch

# Safetensors name -> torch name and bytes per element. A table, so that reading a manifest does not import torch.
_DTYPES: dict[str, tuple[str, int]] = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}
_NAMES = {f"torch.{torch_name}": name for name, (torch_name, _) in _DTYPES.items()}

WEIGHT_KINDS = frozenset({"fp32", "model", "frozen", "buffer"})
"""Key prefixes of the model's tensors; tensors with other prefixes are optimizer moments."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorPart:
    """A contiguous interval of a flattened tensor, in memory."""

    key: str
    """``fp32/<parameter>``, ``exp_avg/<parameter>``, ``frozen/<parameter>``, ``buffer/<name>`` and so on."""
    start: int
    """Index of the first element in the flattened tensor, without padding."""
    tensor: torch.Tensor
    """1-D tensor of the elements; a view of the live state if an engine created the part."""

    @property
    def interval(self) -> Interval:
        """Position of the part in the tensor, without the elements."""
        return Interval(key=self.key, start=self.start, stop=self.start + self.tensor.numel())


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """Shape and dtype of a complete tensor."""

    shape: Annotated[tuple[Whole, ...], Field(max_length=64)]
    dtype: str
    """Dtype in safetensors notation, such as ``F32``."""

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def item_bytes(self) -> int:
        """Size of an element in bytes."""
        return _known(self.dtype)[1]


@dataclass(frozen=True, kw_only=True, slots=True)
class StateDescription:
    """Description of a training state, identical on every rank and at every world size.

    The checkpoint manifest contains this description.
    """

    tensors: Mapping[str, TensorSpec]
    """Shape and dtype of each stored tensor, by key."""
    tied: Mapping[str, str] = field(default_factory=dict)
    """Name of each tied parameter that is not stored, mapped to the name of its stored counterpart."""
    optimizer_step: int = 0
    """Number of optimizer steps, or 0 if the optimizer has no state yet."""
    groups: tuple[Mapping[str, Any], ...] = ()
    """Hyperparameters of each optimizer group; empty if the engine's own hyperparameters apply."""
    group_of: Mapping[str, int] = field(default_factory=dict)
    """Index in `groups` of each trainable parameter's optimizer group, by parameter name."""
    counters: Mapping[str, int] = field(default_factory=dict)
    """Step counters of the engine, by name."""
    base_fingerprint: str = ""
    """Digest of the frozen weights if they are quantized and therefore not stored; otherwise empty."""

    @property
    def has_moments(self) -> bool:
        """Whether the state contains optimizer moments."""
        return any(_is_moment(key) for key in self.tensors)


def begun_anew(description: StateDescription, *, with_optimizer: bool) -> StateDescription:
    """Return the description for a new run that starts from a stored state, without hyperparameters and counters.

    `with_optimizer` keeps the optimizer's moments and its step count, which bias correction needs.
    """
    tensors = description.tensors
    return StateDescription(
        tensors=tensors if with_optimizer else {key: one for key, one in tensors.items() if not _is_moment(key)},
        tied=description.tied,
        optimizer_step=description.optimizer_step if with_optimizer else 0,
        base_fingerprint=description.base_fingerprint,
    )


def _is_moment(key: str) -> bool:
    return key.split("/", 1)[0] not in WEIGHT_KINDS


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldInterval:
    """An interval of a flattened tensor that a rank owns, without the elements."""

    key: str
    """Key of the tensor; see `TensorPart.key`."""
    start: int
    """Index of the first element in the flattened tensor, without padding."""
    num_elements: int
    dtype: torch.dtype


class StateSource(Protocol):
    """One rank's part of the state, either in memory or swapped out to disk."""

    @property
    def description(self) -> StateDescription:
        """Description of the complete state, identical on every rank."""
        ...

    @property
    def intervals(self) -> tuple[HeldInterval, ...]:
        """Intervals that this rank owns; available without reading elements from disk."""
        ...

    def copy_to(self, destinations: Sequence[torch.Tensor]) -> None:
        """Copy each interval's elements into the 1-D destination of the same size and dtype; not a collective."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardedState:
    """One rank's part of the state, in memory; implements `StateSource`."""

    parts: tuple[TensorPart, ...]
    description: StateDescription

    @property
    def intervals(self) -> tuple[HeldInterval, ...]:
        """Intervals that this rank owns."""
        return tuple(
            HeldInterval(key=part.key, start=part.start, num_elements=part.tensor.numel(), dtype=part.tensor.dtype)
            for part in self.parts
        )

    def copy_to(self, destinations: Sequence[torch.Tensor]) -> None:
        """Copy each part's elements into the 1-D destination of the same size and dtype."""
        for part, destination in zip(self.parts, destinations, strict=True):
            destination.copy_(part.tensor.detach(), non_blocking=True)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the safetensors name of a dtype.

    Raises:
        ValueError: Checkpoints do not support the dtype.
    """
    name = _NAMES.get(str(dtype))
    if name is None:
        raise ValueError(f"tensors of dtype {dtype} can't be stored; supported dtypes are {sorted(_DTYPES)}")
    return name


def dtype_of(name: str) -> torch.dtype:
    """Return the torch dtype for a safetensors name.

    Raises:
        ValueError: The name is unknown.
    """
    import torch

    dtype: torch.dtype = getattr(torch, _known(name)[0])
    return dtype


def _known(name: str) -> tuple[str, int]:
    if name not in _DTYPES:
        raise ValueError(f"dtype {name!r} is unknown; supported dtypes are {sorted(_DTYPES)}")
    return _DTYPES[name]
