"""A common interface to the private partition tables of DeepSpeed's ZeRO optimizers.

Each ZeRO stage packs the trained parameters into flat fp32 tensors, in an order and with padding that depend on the
world size. A `PartitionView` maps each parameter to the elements of its exact flat tensor that this rank holds, so that
everything above it deals in names and exact intervals only.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ray_ulysses.errors import RunError


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """The location of this rank's elements of a trained parameter.

    Attributes:
        group: The optimizer's group of the parameter, even if this rank holds none of it.
        flat: Index of the flat tensor that holds the elements.
        offset: Position of the first element in that flat tensor.
        start: Position of the first element in the parameter's exact flat tensor.
        length: Number of elements; 0 if this rank holds none.
    """

    group: int
    flat: int
    offset: int
    start: int
    length: int


class PartitionView(Protocol):
    """This rank's partition of the training state, for one kind of ZeRO optimizer."""

    @property
    def inner(self) -> torch.optim.Optimizer:
        """The optimizer that updates the flat tensors."""
        ...

    @property
    def flats(self) -> Sequence[torch.Tensor]:
        """This rank's fp32 master weights; a tensor that is swapped out has no elements in the meantime."""
        ...

    @property
    def resident_groups(self) -> tuple[tuple[int, ...], ...]:
        """Indices of the flat tensors that are in memory at the same time; the same on every rank."""
        ...

    def partition_of(self, parameter: Any) -> Partition:
        """Return the location of this rank's elements of a trained parameter."""
        ...

    def weights(self, parameter: Any, *, is_writing: bool) -> tuple[int, torch.Tensor]:
        """Return this rank's part of a parameter in the model's precision: the first element's position, and a view.

        Args:
            parameter: Trained or frozen.
            is_writing: Whether the view will be filled. It then covers everything that this rank must know of the
                parameter; otherwise the parts of all ranks hold every element once.
        """
        ...

    def begin(self) -> None:
        """Discard the old state before a new one is loaded."""
        ...

    def swapped_in(self, group: Sequence[int], *, is_writing: bool) -> AbstractContextManager[None]:
        """Keep one resident group and its moments in memory; what was written is kept and rounded into the model."""
        ...

    def finish(self) -> None:
        """Update every rank's model weights from the new master weights; every rank must call."""
        ...


def require_attributes(optimizer: Any, names: Sequence[str]) -> None:
    """Raise if an optimizer lacks private attributes that this package reads.

    Raises:
        RunError: Names the missing attributes.
    """
    missing = [name for name in names if not hasattr(optimizer, name)]
    if missing:
        raise RunError(
            f"this DeepSpeed's {type(optimizer).__name__} lacks {', '.join(missing)}; install the version that "
            "ray-ulysses pins (0.19)"
        )


def shape_of(parameter: Any) -> tuple[int, ...]:
    """Return a parameter's exact shape, which ZeRO-3 stores in ``ds_shape``."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def flat_view(tensor: torch.Tensor, *, is_writing: bool) -> torch.Tensor:
    """Return a tensor's elements in order as a 1-D tensor: a view, or a copy if it is not contiguous.

    Args:
        tensor: A parameter or buffer.
        is_writing: Whether the elements will be filled; a tensor that is not contiguous is then made so.
    """
    if is_writing and not tensor.is_contiguous():
        tensor.data = tensor.data.contiguous()
    return tensor.data.reshape(-1)
