"""This rank's parts of the training state's tensors, by name, as views of the live state.

Keys are ``fp32/<parameter>`` for the master weights of a trained parameter, ``<moment>/<parameter>`` for the
optimizer's, ``model/<parameter>`` for a trained parameter in the model's own precision where that is not fp32,
``frozen/<parameter>`` and ``buffer/<name>``. A tied parameter appears once, under its first name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ray_ulysses.checkpoint.state import HeldInterval, StateDescription, TensorPart
from ray_ulysses.engine.partition_view import flat_view
from ray_ulysses.engine.zero3_view import Zero3View
from ray_ulysses.engine.zero12_view import GroupView

PartitionView = Zero3View | GroupView
"""This rank's partition of the training state, for one kind of ZeRO optimizer."""

FP32 = "fp32"
MODEL = "model"
FROZEN = "frozen"
BUFFER = "buffer"


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedTensors:
    """A model's tensors by name, found once: a walk over all its modules takes milliseconds."""

    trained: tuple[tuple[str, Any], ...]
    """The trained parameters; a tied one once, under its first name."""
    frozen: tuple[tuple[str, Any], ...]
    """The other parameters, likewise."""
    tied: Mapping[str, str]
    """The first name of each tied parameter by its other names."""
    buffer_places: tuple[tuple[str, nn.Module], ...]
    """The modules that hold buffers of the model's state (a RoPE table is none), with the prefix of their names. A
    module may put another tensor in a buffer's place at any time."""

    @property
    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The buffers that belong to the model's state, as they are now."""
        seen: set[int] = set()
        for prefix, module in self.buffer_places:
            for name, buffer in module.named_buffers(recurse=False):
                if name not in module._non_persistent_buffers_set and id(buffer) not in seen:
                    seen.add(id(buffer))
                    yield f"{prefix}{name}", buffer


def named_tensors(module: nn.Module) -> NamedTensors:
    """Return a model's tensors by name."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    trained: list[tuple[str, Any]] = []
    frozen: list[tuple[str, Any]] = []
    for name, parameter in module.named_parameters(remove_duplicate=False):
        known = first.setdefault(id(parameter), name)
        if known != name:
            tied[name] = known
        else:
            (trained if parameter.requires_grad else frozen).append((name, parameter))
    places = tuple(
        (f"{prefix}." if prefix else "", inner) for prefix, inner in module.named_modules() if inner._buffers
    )
    return NamedTensors(trained=tuple(trained), frozen=tuple(frozen), tied=tied, buffer_places=places)


def stepped_parts(
    tensors: NamedTensors, view: PartitionView, group: Sequence[int], moments: Sequence[str]
) -> Iterator[TensorPart]:
    """Yield the master weights and moments that this rank's optimizer updates, of one resident group."""
    for name, parameter in tensors.trained:
        part = view.partition_of(parameter)
        if part.length and part.flat in group:
            flat = view.flats[part.flat]
            for kind in (FP32, *moments):
                tensor = flat if kind == FP32 else view.inner.state[flat][kind]
                elements = tensor.data.narrow(0, part.offset, part.length)
                yield TensorPart(key=f"{kind}/{name}", start=part.start, tensor=elements)


def stepped_intervals(tensors: NamedTensors, view: PartitionView, moments: Sequence[str]) -> Iterator[HeldInterval]:
    """Yield the intervals of `stepped_parts` for every flat tensor, in memory or not."""
    for name, parameter in tensors.trained:
        part = view.partition_of(parameter)
        if part.length:
            for kind in (FP32, *moments):
                yield HeldInterval(
                    key=f"{kind}/{name}", start=part.start, num_elements=part.length, dtype=torch.float32
                )


def rounded_parts(tensors: NamedTensors, view: PartitionView) -> Iterator[TensorPart]:
    """Yield this rank's share of the trained weights in the model's precision, where that is not fp32."""
    for name, parameter in tensors.trained:
        if parameter.dtype != torch.float32:
            start, tensor = view.weights(parameter, is_writing=False)
            yield from _unless_empty(f"{MODEL}/{name}", start, tensor)


def untrained_parts(tensors: NamedTensors, view: PartitionView, *, is_writing: bool) -> Iterator[TensorPart]:
    """Yield frozen parameters and buffers.

    Args:
        tensors: The model's tensors.
        view: The engine's partition view.
        is_writing: Whether the parts will be filled. Every rank then yields the buffers, not rank 0 alone, and all
            elements of the frozen parameters that it has in memory.
    """
    for name, parameter in tensors.frozen:
        start, tensor = view.weights(parameter, is_writing=is_writing)
        yield from _unless_empty(f"{FROZEN}/{name}", start, tensor)
    if is_writing or dist.get_rank() == 0:
        for name, buffer in tensors.buffers:
            yield from _unless_empty(f"{BUFFER}/{name}", 0, flat_view(buffer, is_writing=is_writing))


def _unless_empty(key: str, start: int, tensor: torch.Tensor) -> Iterator[TensorPart]:
    if tensor.numel():
        yield TensorPart(key=key, start=start, tensor=tensor)


@dataclass(frozen=True, kw_only=True, slots=True)
class SwappedState:
    """One rank's part of the state, with only one sub-group in memory at a time; a `StateSource`.

    It is a view of the live state: copy it before the next step.
    """

    tensors: NamedTensors
    view: PartitionView
    moments: tuple[str, ...]
    resident: tuple[TensorPart, ...]
    """The parts that are always in memory: everything but master weights and moments."""
    description: StateDescription
    """The part of the state that is the same on every rank."""

    @property
    def intervals(self) -> tuple[HeldInterval, ...]:
        """The intervals that this rank holds; reading them swaps nothing in."""
        resident = (
            HeldInterval(key=part.key, start=part.start, num_elements=part.tensor.numel(), dtype=part.tensor.dtype)
            for part in self.resident
        )
        return (*stepped_intervals(self.tensors, self.view, self.moments), *resident)

    def copy_to(self, destinations: Sequence[torch.Tensor]) -> None:
        """Copy every interval's elements; apart from the destinations, one sub-group is in memory at a time.

        Copies from a device into pinned memory may still be in progress, on the current stream, on return.
        """
        wanted = {interval.key: destination for interval, destination in zip(self.intervals, destinations, strict=True)}
        for part in self.resident:
            wanted.pop(part.key).copy_(part.tensor.detach(), non_blocking=True)
        for group in self.view.resident_groups:
            with self.view.swapped_in(group, is_writing=False):
                for part in stepped_parts(self.tensors, self.view, group, self.moments):
                    wanted.pop(part.key).copy_(part.tensor)
        assert not wanted, f"never swapped in: {sorted(wanted)}"
