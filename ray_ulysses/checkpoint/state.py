"""A model's training state as it is stored: flat parts by name, and what all ranks know about them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from ray_ulysses.checkpoint.intervals import Interval
from ray_ulysses.validation import Whole

if TYPE_CHECKING:
    import torch

# By safetensors' names, so that reading a manifest needs no torch: torch's name, and bytes of an element.
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
"""First parts of the keys of the model's tensors; any other key names an optimizer moment."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorPart:
    """Consecutive elements of one tensor, held in memory."""

    key: str
    """``fp32/<parameter>``, ``exp_avg/<parameter>``, ``frozen/<parameter>``, ``buffer/<name>`` and so on."""
    start: int
    """The first element's place in the exact flat tensor."""
    tensor: torch.Tensor
    """The elements, 1-D; a view of the live state when it comes from an engine."""

    @property
    def interval(self) -> Interval:
        """Return the interval of these elements."""
        return Interval(key=self.key, start=self.start, stop=self.start + self.tensor.numel())


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """Shape and dtype of a whole tensor."""

    shape: tuple[Whole, ...]
    dtype: str
    """Its dtype as safetensors names it, such as ``F32``."""

    @property
    def num_elements(self) -> int:
        """Return how many elements it has."""
        return math.prod(self.shape)

    @property
    def item_bytes(self) -> int:
        """Return the size of one element."""
        return _known(self.dtype)[1]


@dataclass(frozen=True, kw_only=True, slots=True)
class StateDescription:
    """The description of a state that all ranks share, at any world size; it is part of the manifest."""

    tensors: Mapping[str, TensorSpec]
    """Every stored tensor, by key."""
    tied: Mapping[str, str] = field(default_factory=dict)
    """Names that are other names of a stored parameter."""
    optimizer_step: int = 0
    """Steps that the optimizer has done; 0 before its state exists."""
    groups: tuple[Mapping[str, Any], ...] = ()
    """Hyperparameters of each optimizer group; empty where an engine keeps its own."""
    group_of: Mapping[str, int] = field(default_factory=dict)
    """The group of each trainable parameter, by name."""
    counters: Mapping[str, int] = field(default_factory=dict)
    """The engine's own counters."""


def begun_anew(description: StateDescription, *, with_optimizer: bool) -> StateDescription:
    """Return a description from which a new run starts: its own hyperparameters, counters from 0 (pure).

    Args:
        description: What was stored.
        with_optimizer: Whether the optimizer's moments are kept, and its own count of steps, which corrects their bias.
    """
    moments = {key for key in description.tensors if key.split("/", 1)[0] not in WEIGHT_KINDS}
    kept = description.tensors if with_optimizer else {k: v for k, v in description.tensors.items() if k not in moments}
    return StateDescription(
        tensors=kept,
        tied=description.tied,
        optimizer_step=description.optimizer_step if with_optimizer else 0,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldInterval:
    """The interval of one tensor that a rank holds, known without reading its elements."""

    key: str
    """As in `TensorPart`."""
    start: int
    """The first element's place in the exact flat tensor."""
    num_elements: int
    dtype: torch.dtype


class StateSource(Protocol):
    """One rank's part of the state, in memory, or swapped out and fetched part by part."""

    @property
    def description(self) -> StateDescription:
        """The description that all ranks share."""
        ...

    @property
    def intervals(self) -> tuple[HeldInterval, ...]:
        """The intervals that this rank holds; nothing is fetched."""
        ...

    def copy_to(self, destinations: Sequence[torch.Tensor]) -> None:
        """Copy the elements of each of the intervals into a 1-D tensor of its size and dtype; no collective."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardedState:
    """One rank's part of the state, in memory; a `StateSource`."""

    parts: tuple[TensorPart, ...]
    description: StateDescription

    @property
    def intervals(self) -> tuple[HeldInterval, ...]:
        """The intervals that this rank holds."""
        return tuple(
            HeldInterval(key=part.key, start=part.start, num_elements=part.tensor.numel(), dtype=part.tensor.dtype)
            for part in self.parts
        )

    def copy_to(self, destinations: Sequence[torch.Tensor]) -> None:
        """Copy the elements of each part into a 1-D tensor of its size and dtype."""
        for part, destination in zip(self.parts, destinations, strict=True):
            destination.copy_(part.tensor.detach(), non_blocking=True)


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name in safetensors.

    Raises:
        ValueError: Tensors of that dtype can't be stored.
    """
    name = _NAMES.get(str(dtype))
    if name is None:
        raise ValueError(f"tensors of dtype {dtype} can't be stored; stored are {sorted(_DTYPES)}")
    return name


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype that safetensors gives a name.

    Raises:
        ValueError: There is none of that name.
    """
    import torch

    dtype: torch.dtype = getattr(torch, _known(name)[0])
    return dtype


def _known(name: str) -> tuple[str, int]:
    if name not in _DTYPES:
        raise ValueError(f"dtype {name!r} is unknown; known are {sorted(_DTYPES)}")
    return _DTYPES[name]
