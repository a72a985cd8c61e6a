"""This rank's parts of the training state's tensors, by name, as views of the live state.

Keys are ``fp32/<parameter>`` for the master weights of a trained parameter, ``<moment>/<parameter>`` for the
optimizer's, ``model/<parameter>`` for a trained parameter in the model's own precision where that is not fp32,
``frozen/<parameter>`` and ``buffer/<name>``. A tied parameter appears once, under its first name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

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


def trainable(engine: Any) -> Iterator[tuple[str, Any]]:
    """Yield the trained parameters; a tied one once, under its first name."""
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            yield name, parameter


def frozen(engine: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parameters that are not trained."""
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            yield name, parameter


def buffers(engine: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers that belong to the model's state (a RoPE table does not)."""
    seen: set[int] = set()
    for prefix, module in engine.module.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set and id(buffer) not in seen:
                seen.add(id(buffer))
                yield (f"{prefix}.{name}" if prefix else name), buffer


def stepped_parts(
    engine: Any, view: PartitionView, group: Sequence[int], moments: Sequence[str]
) -> Iterator[TensorPart]:
    """Yield the master weights and moments that this rank's optimizer updates, of one resident group."""
    for name, parameter in trainable(engine):
        part = view.partition_of(parameter)
        if part.length and part.flat in group:
            flat = view.flats[part.flat]
            for kind in (FP32, *moments):
                tensor = flat if kind == FP32 else view.inner.state[flat][kind]
                elements = tensor.data.narrow(0, part.offset, part.length)
                yield TensorPart(key=f"{kind}/{name}", start=part.start, tensor=elements)


def stepped_intervals(engine: Any, view: PartitionView, moments: Sequence[str]) -> Iterator[HeldInterval]:
    """Yield the intervals of `stepped_parts` for every flat tensor, in memory or not."""
    for name, parameter in trainable(engine):
        part = view.partition_of(parameter)
        if part.length:
            for kind in (FP32, *moments):
                yield HeldInterval(
                    key=f"{kind}/{name}", start=part.start, num_elements=part.length, dtype=torch.float32
                )


def rounded_parts(engine: Any, view: PartitionView) -> Iterator[TensorPart]:
    """Yield this rank's share of the trained weights in the model's precision, where that is not fp32."""
    for name, parameter in trainable(engine):
        if parameter.dtype != torch.float32:
            start, tensor = view.weights(parameter, is_writing=False)
            yield from _unless_empty(f"{MODEL}/{name}", start, tensor)


def untrained_parts(engine: Any, view: PartitionView, *, is_writing: bool) -> Iterator[TensorPart]:
    """Yield frozen parameters and buffers.

    Args:
        engine: The engine.
        view: Its partition view.
        is_writing: Whether the parts will be filled. Every rank then yields the buffers, not rank 0 alone, and all
            elements of the frozen parameters that it has in memory.
    """
    for name, parameter in frozen(engine):
        start, tensor = view.weights(parameter, is_writing=is_writing)
        yield from _unless_empty(f"{FROZEN}/{name}", start, tensor)
    if is_writing or dist.get_rank() == 0:
        for name, buffer in buffers(engine):
            yield from _unless_empty(f"{BUFFER}/{name}", 0, flat_view(buffer, is_writing=is_writing))


def _unless_empty(key: str, start: int, tensor: torch.Tensor) -> Iterator[TensorPart]:
    if tensor.numel():
        yield TensorPart(key=key, start=start, tensor=tensor)


@dataclass(frozen=True, kw_only=True, slots=True)
class SwappedState:
    """One rank's part of the state, with only one sub-group in memory at a time; a `StateSource`.

    It is a view of the live state: copy it before the next step.

    Attributes:
        resident: The parts that are always in memory: everything but master weights and moments.
        description: The part of the state that is the same on every rank.
    """

    engine: Any
    view: PartitionView
    moments: tuple[str, ...]
    resident: tuple[TensorPart, ...]
    description: StateDescription

    @property
    def intervals(self) -> tuple[HeldInterval, ...]:
        """The intervals that this rank holds; reading them swaps nothing in."""
        resident = (
            HeldInterval(key=part.key, start=part.start, num_elements=part.tensor.numel(), dtype=part.tensor.dtype)
            for part in self.resident
        )
        return (*stepped_intervals(self.engine, self.view, self.moments), *resident)

    def copy_to(self, destinations: Sequence[torch.Tensor]) -> None:
        """Copy every interval's elements; apart from the destinations, one sub-group is in memory at a time.

        Copies from a device into pinned memory may still be in progress, on the current stream, on return.
        """
        wanted = {interval.key: destination for interval, destination in zip(self.intervals, destinations, strict=True)}
        for part in self.resident:
            wanted.pop(part.key).copy_(part.tensor.detach(), non_blocking=True)
        for group in self.view.resident_groups:
            with self.view.swapped_in(group, is_writing=False):
                for part in stepped_parts(self.engine, self.view, group, self.moments):
                    wanted.pop(part.key).copy_(part.tensor)
        assert not wanted, f"never swapped in: {sorted(wanted)}"
