"""The partition view of ZeRO-1 and ZeRO-2, where each group of parameters is one evenly partitioned flat tensor.

A rank's partition of a group crosses parameter boundaries and ends in padding, so that its part of a parameter is the
intersection of both ranges. The model's weights, trained or frozen, are whole on every rank; each rank stores an even
share of them. DeepSpeed 0.19.8 runs ZeRO-1 with bf16 weights and fp32 gradients in a separate class,
``BF16_Optimizer``, which partitions the same way under other names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ray_ulysses.checkpoint.intervals import partition
from ray_ulysses.engine.partition_view import Partition, flat_view, require_attributes

ZERO12_ATTRIBUTES = (
    "bit16_groups",
    "bit16_groups_flat",
    "round_robin_bit16_groups",
    "round_robin_bit16_offsets",
    "single_partition_of_fp32_groups",
    "partition_size",
    "real_dp_process_group",
    "update_lp_params",
    "_hp_optimizer_states_linked",
)
"""Attributes read from ``DeepSpeedZeroOptimizer`` in runtime/zero/stage_1_and_2.py."""

BF16_ATTRIBUTES = (
    "bf16_groups",
    "bf16_groups_flat",
    "fp32_groups_flat_partition",
    "real_dp_process_group",
    "update_lp_params",
    "_hp_optimizer_states_linked",
)
"""Attributes read from ``BF16_Optimizer`` in runtime/bf16_optimizer.py."""


def intersect(group: int, position: int, num_elements: int, *, partition_size: int, rank: int) -> Partition:
    """Return the part of a parameter that is in a rank's partition of the group.

    Args:
        group: Index of the parameter's group.
        position: Position of the parameter's first element in the flat tensor of the whole group.
        num_elements: Its exact size.
        partition_size: Elements per partition, including padding.
        rank: The partition's rank.
    """
    first = rank * partition_size
    begin = max(position, first)
    end = min(position + num_elements, first + partition_size)
    if end <= begin:
        return Partition(group=group, flat=group, offset=0, start=0, length=0)
    return Partition(group=group, flat=group, offset=begin - first, start=begin - position, length=end - begin)


class GroupView:
    """The partition view of an optimizer that partitions each group's flat tensor evenly.

    Args:
        optimizer: The engine's optimizer.
        flats: This rank's fp32 partition of each group.
        wholes: The model's weights of each group, whole, flat and padded.
        positions: Every trained parameter's group and position, by ``id``.
    """

    def __init__(
        self,
        optimizer: Any,
        flats: Sequence[torch.Tensor],
        wholes: Sequence[torch.Tensor],
        positions: Mapping[int, tuple[int, int]],
    ) -> None:
        group = optimizer.real_dp_process_group[0]
        self._optimizer, self._positions = optimizer, positions
        self._rank, self._world_size = dist.get_rank(group), dist.get_world_size(group)
        assert all(other is group for other in optimizer.real_dp_process_group)
        assert [flat.numel() * self._world_size for flat in flats] == [whole.numel() for whole in wholes]
        self.flats = flats
        self.inner: torch.optim.Optimizer = optimizer.optimizer
        # All partitions are in memory at the same time.
        self.resident_groups = (tuple(range(len(flats))),)

    def partition_of(self, parameter: Any) -> Partition:
        """Return the location of this rank's elements of a trained parameter."""
        group, position = self._positions[id(parameter)]
        size = self.flats[group].numel()
        return intersect(group, position, parameter.numel(), partition_size=size, rank=self._rank)

    def weights(self, parameter: Any, *, is_writing: bool) -> tuple[int, torch.Tensor]:
        """Return a position and a view of the elements from it: an even share to store, or all elements to fill."""
        flat = flat_view(parameter, is_writing=is_writing)
        if is_writing:
            return 0, flat
        start, stop = partition(flat.numel(), self._world_size, self._rank)
        return start, flat.narrow(0, start, stop - start)

    def begin(self) -> None:
        """Drop DeepSpeed's links to the old moments; it links the new ones after the next step."""
        self._optimizer._hp_optimizer_states_linked = False

    @contextmanager
    def swapped_in(self, group: Sequence[int], *, is_writing: bool) -> Iterator[None]:
        """Do nothing: all partitions are in memory, and `finish` rounds what was written."""
        yield

    def finish(self) -> None:
        """Round this rank's master weights into the model's and gather all ranks'; every rank must call."""
        self._optimizer.update_lp_params()


def zero12_view(optimizer: Any) -> GroupView:
    """Return the view of a ``DeepSpeedZeroOptimizer``, with or without offload to the host.

    Raises:
        RunError: The DeepSpeed version is not supported.
    """
    require_attributes(optimizer, ZERO12_ATTRIBUTES)
    positions = {
        id(parameter): (number, offset)
        for number, (parameters, offsets) in enumerate(
            zip(optimizer.round_robin_bit16_groups, optimizer.round_robin_bit16_offsets, strict=True)
        )
        for parameter, offset in zip(parameters, offsets, strict=True)
    }
    flats = optimizer.single_partition_of_fp32_groups
    sizes = [int(size) for size in optimizer.partition_size]
    assert sizes == [flat.numel() for flat in flats], "DeepSpeed partitions groups differently"
    assert positions.keys() == {id(parameter) for group in optimizer.bit16_groups for parameter in group}
    return GroupView(optimizer, flats, optimizer.bit16_groups_flat, positions)


def bf16_view(optimizer: Any) -> GroupView:
    """Return the view of a ``BF16_Optimizer``, whose groups keep the order of their parameters.

    Raises:
        RunError: The DeepSpeed version is not supported.
    """
    require_attributes(optimizer, BF16_ATTRIBUTES)
    positions = {}
    for number, parameters in enumerate(optimizer.bf16_groups):
        offset = 0
        for parameter in parameters:
            positions[id(parameter)] = (number, offset)
            offset += parameter.numel()
    return GroupView(optimizer, optimizer.fp32_groups_flat_partition, optimizer.bf16_groups_flat, positions)
