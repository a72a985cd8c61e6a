"""The partition view of ZeRO-1 and ZeRO-2, where each group of parameters is one evenly partitioned flat tensor.

A rank's partition of a group crosses parameter boundaries and ends in padding, so that its part of a parameter is the
intersection of both ranges. The model's weights, trained or frozen, are whole on every rank; each rank stores an even
share of them. DeepSpeed 0.19.8 runs ZeRO-1 with bf16 weights and fp32 gradients in a separate class,
``BF16_Optimizer``, which partitions the same way under other names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupPosition:
    """The position of a parameter in the flat tensor of its whole group."""

    group: int
    offset: int


def intersect(position: GroupPosition, num_elements: int, *, partition_size: int, rank: int) -> Partition:
    """Return the part of a parameter that is in a rank's partition of the group.

    Args:
        position: The parameter's position in the group.
        num_elements: Its exact size.
        partition_size: Elements per partition, including padding.
        rank: The partition's rank.
    """
    group, first = position.group, rank * partition_size
    begin = max(position.offset, first)
    end = min(position.offset + num_elements, first + partition_size)
    if end <= begin:
        return Partition(group=group, flat=group, offset=0, start=0, length=0)
    return Partition(group=group, flat=group, offset=begin - first, start=begin - position.offset, length=end - begin)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupView:
    """The partition view of an optimizer that partitions each group's flat tensor evenly.

    Attributes:
        positions: Every trained parameter's position, by ``id``.
        publish: Rounds each rank's master weights into the model's and gathers them on all ranks; a collective.
        unlink: Drops DeepSpeed's links to the moments that are about to be replaced.
    """

    inner: torch.optim.Optimizer
    flats: Sequence[torch.Tensor]
    positions: Mapping[int, GroupPosition]
    rank: int
    world_size: int
    publish: Callable[[], None]
    unlink: Callable[[], None]

    @property
    def resident_groups(self) -> tuple[tuple[int, ...], ...]:
        """All partitions, which are in memory at the same time."""
        return (tuple(range(len(self.flats))),)

    def partition_of(self, parameter: Any) -> Partition:
        """Return the location of this rank's elements of a trained parameter."""
        position = self.positions[id(parameter)]
        size = self.flats[position.group].numel()
        return intersect(position, parameter.numel(), partition_size=size, rank=self.rank)

    def weights(self, parameter: Any, *, is_writing: bool) -> tuple[int, torch.Tensor]:
        """Return an even share of a parameter to store, or all of it to fill."""
        flat = flat_view(parameter, is_writing=is_writing)
        if is_writing:
            return 0, flat
        start, stop = partition(flat.numel(), self.world_size, self.rank)
        return start, flat.narrow(0, start, stop - start)

    def begin(self) -> None:
        """Drop the links to the old moments."""
        self.unlink()

    @contextmanager
    def swapped_in(self, group: Sequence[int], *, is_writing: bool) -> Iterator[None]:
        """Do nothing: all partitions are in memory, and `finish` rounds what was written."""
        yield

    def finish(self) -> None:
        """Round this rank's master weights into the model's and gather all ranks'; every rank must call."""
        self.publish()


def zero12_view(optimizer: Any) -> GroupView:
    """Return the view of a ``DeepSpeedZeroOptimizer``, with or without offload to the host.

    Raises:
        RunError: The DeepSpeed version is not supported.
    """
    require_attributes(optimizer, ZERO12_ATTRIBUTES)
    positions = {
        id(parameter): GroupPosition(group=number, offset=offset)
        for number, (parameters, offsets) in enumerate(
            zip(optimizer.round_robin_bit16_groups, optimizer.round_robin_bit16_offsets, strict=True)
        )
        for parameter, offset in zip(parameters, offsets, strict=True)
    }
    flats = optimizer.single_partition_of_fp32_groups
    sizes = [int(size) for size in optimizer.partition_size]
    assert sizes == [flat.numel() for flat in flats], "DeepSpeed partitions groups differently"
    assert positions.keys() == {id(parameter) for group in optimizer.bit16_groups for parameter in group}
    return _group_view(optimizer, flats, optimizer.bit16_groups_flat, positions)


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
            positions[id(parameter)] = GroupPosition(group=number, offset=offset)
            offset += parameter.numel()
    return _group_view(optimizer, optimizer.fp32_groups_flat_partition, optimizer.bf16_groups_flat, positions)


def _group_view(
    optimizer: Any,
    flats: Sequence[torch.Tensor],
    wholes: Sequence[torch.Tensor],
    positions: Mapping[int, GroupPosition],
) -> GroupView:
    """Return the view of an optimizer with this rank's fp32 partitions and the model's whole padded weights."""
    group = optimizer.real_dp_process_group[0]
    world_size = dist.get_world_size(group)
    assert all(other is group for other in optimizer.real_dp_process_group)
    assert [flat.numel() * world_size for flat in flats] == [whole.numel() for whole in wholes]

    def unlink() -> None:
        # DeepSpeed links the new moments after the next step.
        optimizer._hp_optimizer_states_linked = False

    return GroupView(
        inner=optimizer.optimizer,
        flats=flats,
        positions=positions,
        rank=dist.get_rank(group),
        world_size=world_size,
        publish=optimizer.update_lp_params,
        unlink=unlink,
    )
