"""Where a ZeRO engine keeps a rank's part of the training state: one view of every stage's private tables.

A stage packs trained parameters into flat fp32 tensors, the sub-groups, in an order and with a padding that depend on
the world. `StateTables` says, for each parameter, which elements of its exact flat tensor this rank holds and where
they lie, so that everything above it knows names and exact intervals only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ray_ulysses.errors import RunError


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """Where this rank's elements of a trained parameter lie.

    Attributes:
        group: The optimizer's group that the parameter belongs to, whether this rank holds a part of it or not.
        flat: Number of the flat tensor that holds them.
        offset: The first one's place in that flat tensor.
        start: The first one's place in the parameter's exact flat tensor.
        length: How many there are; 0 where this rank holds none.
    """

    group: int
    flat: int
    offset: int
    start: int
    length: int


class StateTables(Protocol):
    """The private tables of one kind of ZeRO optimizer, read the same way for all."""

    @property
    def inner(self) -> torch.optim.Optimizer:
        """The optimizer that steps on the flat tensors."""
        ...

    @property
    def flats(self) -> Sequence[torch.Tensor]:
        """The fp32 master weights that this rank steps on; one that is swapped out has no elements meanwhile."""
        ...

    @property
    def portions(self) -> tuple[tuple[int, ...], ...]:
        """Numbers of the flat tensors that are at hand at the same time; the same on every rank."""
        ...

    def slot(self, parameter: Any) -> Slot:
        """Return where this rank's elements of a trained parameter lie."""
        ...

    def weights(self, parameter: Any, *, is_writing: bool) -> tuple[int, torch.Tensor]:
        """Return this rank's part of a parameter in the model's precision: its first element's place, and a view.

        Args:
            parameter: Trained or frozen.
            is_writing: Whether the view is to be filled: then it is all that this rank has to know of the parameter.
                Otherwise the ranks' parts hold every element once.
        """
        ...

    def begin(self) -> None:
        """Prepare for new state; nothing of the old one may survive."""
        ...

    def at_hand(self, portion: Sequence[int], *, is_writing: bool) -> AbstractContextManager[None]:
        """Keep some flat tensors and their moments in memory; what was written there is kept, and rounds the model."""
        ...

    def finish(self) -> None:
        """Make every rank's model weights follow the new master weights; every rank must call."""
        ...


def require_tables(optimizer: Any, names: Sequence[str]) -> None:
    """Refuse an optimizer of another DeepSpeed than the one whose private tables are known.

    Raises:
        RunError: Names what is missing.
    """
    missing = [name for name in names if not hasattr(optimizer, name)]
    if missing:
        raise RunError(
            f"this DeepSpeed's {type(optimizer).__name__} lacks {', '.join(missing)}; install the version that "
            "ray-ulysses pins (0.19)"
        )


def shape_of(parameter: Any) -> tuple[int, ...]:
    """Return a parameter's exact shape, which ZeRO-3 keeps beside the partition."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def flat_view(tensor: torch.Tensor, *, is_writing: bool) -> torch.Tensor:
    """Return a tensor's elements in order as a 1-D tensor: a view, or a copy of one that is not contiguous.

    Args:
        tensor: A parameter or buffer.
        is_writing: Whether the elements are to be filled: then a tensor that is not contiguous becomes so.
    """
    if is_writing and not tensor.is_contiguous():
        tensor.data = tensor.data.contiguous()
    return tensor.data.reshape(-1)


def numbered(groups: Sequence[Sequence[Any]]) -> Iterator[tuple[int, Any]]:
    """Yield every parameter with the number of its group."""
    for number, group in enumerate(groups):
        for parameter in group:
            yield number, parameter
