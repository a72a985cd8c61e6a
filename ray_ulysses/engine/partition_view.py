"""The part of a parameter that a rank holds under ZeRO, in exact intervals without padding.

Each ZeRO stage packs the trained parameters into flat fp32 tensors, in an order and with padding that depend on the
world size. `zero3_view` and `zero12_view` map each parameter to the elements that this rank holds, so that everything
above them deals in names and exact intervals only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ray_ulysses.errors import RunError


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """The location of this rank's elements of a trained parameter."""

    group: int
    """The optimizer's group of the parameter, even if this rank holds none of it."""
    flat: int
    """Index of the flat tensor that holds the elements."""
    offset: int
    """Position of the first element in that flat tensor."""
    start: int
    """Position of the first element in the parameter's exact flat tensor."""
    length: int
    """Number of elements; 0 if this rank holds none."""


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
