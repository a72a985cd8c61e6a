"""The tables of ZeRO-1 and ZeRO-2: each group of parameters is one flat tensor, cut evenly over the world.

A rank's partition of a group crosses the borders of parameters and ends in padding, so that what it holds of a
parameter is an intersection. The model's weights, trained or frozen, are whole on every rank; of these each rank
stores an even share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ray_ulysses.checkpoint.intervals import partition
from ray_ulysses.engine.state_tables import Slot, flat_view, numbered, require_tables

ZERO12_TABLES = (
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
"""What is read of ``DeepSpeedZeroOptimizer`` in runtime/zero/stage_1_and_2.py."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupPlace:
    """Where a parameter lies in the whole flat tensor of its group.

    Attributes:
        group: The group's number.
        offset: Its first element's place.
    """

    group: int
    offset: int


def cut(place: GroupPlace, num_elements: int, *, partition_size: int, rank: int) -> Slot:
    """Return what a rank's partition of a group holds of one parameter: the intersection of the two.

    Args:
        place: Where the parameter lies in the group.
        num_elements: Its exact size.
        partition_size: Elements of a partition, padding included.
        rank: Whose partition.
    """
    first = rank * partition_size
    begin = max(place.offset, first)
    end = min(place.offset + num_elements, first + partition_size)
    if end <= begin:
        return Slot(group=place.group, flat=place.group, offset=0, start=0, length=0)
    return Slot(
        group=place.group, flat=place.group, offset=begin - first, start=begin - place.offset, length=end - begin
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupTables:
    """The state of an optimizer that cuts each group's flat tensor evenly over the world.

    Attributes:
        inner: The optimizer that steps on the partitions.
        flats: This rank's fp32 partition of each group.
        places: Every trained parameter's place, by ``id``.
        rank: This rank among those that share a group.
        world_size: How many share a group.
        publish: Rounds the master weights of each rank into the model's and gathers them on all; a collective.
        forget: Called when new state begins.
    """

    inner: torch.optim.Optimizer
    flats: Sequence[torch.Tensor]
    places: Mapping[int, GroupPlace]
    rank: int
    world_size: int
    publish: Callable[[], None]
    forget: Callable[[], None]

    @property
    def portions(self) -> tuple[tuple[int, ...], ...]:
        """All partitions are in memory at once."""
        return (tuple(range(len(self.flats))),)

    def slot(self, parameter: Any) -> Slot:
        """Return where this rank's elements of a trained parameter lie: its partition, cut to the parameter."""
        place = self.places[id(parameter)]
        return cut(place, parameter.numel(), partition_size=self.flats[place.group].numel(), rank=self.rank)

    def weights(self, parameter: Any, *, is_writing: bool) -> tuple[int, torch.Tensor]:
        """Return an even share of a parameter to store, or all of it to fill."""
        flat = flat_view(parameter, is_writing=is_writing)
        if is_writing:
            return 0, flat
        start, stop = partition(flat.numel(), self.world_size, self.rank)
        return start, flat.narrow(0, start, stop - start)

    def begin(self) -> None:
        """Let go of what is linked to the old moments."""
        self.forget()

    @contextmanager
    def at_hand(self, portion: Sequence[int], *, is_writing: bool) -> Iterator[None]:
        """Do nothing: all partitions are in memory, and `finish` rounds what was written."""
        yield

    def finish(self) -> None:
        """Round this rank's master weights into the model's and gather everyone's; every rank must call."""
        self.publish()


def zero12_tables(optimizer: Any) -> GroupTables:
    """Return the tables of a ``DeepSpeedZeroOptimizer``, with or without offload to the host.

    Raises:
        RunError: It is another DeepSpeed's.
    """
    require_tables(optimizer, ZERO12_TABLES)
    places = {
        id(parameter): GroupPlace(group=number, offset=offset)
        for number, (parameters, offsets) in enumerate(
            zip(optimizer.round_robin_bit16_groups, optimizer.round_robin_bit16_offsets, strict=True)
        )
        for parameter, offset in zip(parameters, offsets, strict=True)
    }
    tables = group_tables(
        optimizer, flats=optimizer.single_partition_of_fp32_groups, wholes=optimizer.bit16_groups_flat, places=places
    )
    sizes = [int(size) for size in optimizer.partition_size]
    assert sizes == [flat.numel() for flat in tables.flats], "DeepSpeed partitions otherwise than it did"
    assert places.keys() == {id(parameter) for _, parameter in numbered(optimizer.bit16_groups)}
    return tables


def group_tables(
    optimizer: Any,
    *,
    flats: Sequence[torch.Tensor],
    wholes: Sequence[torch.Tensor],
    places: Mapping[int, GroupPlace],
) -> GroupTables:
    """Return the tables of an optimizer whose groups are cut evenly over one process group.

    Args:
        optimizer: The ZeRO optimizer.
        flats: This rank's fp32 partition of each group.
        wholes: The model's weights of each group, whole, flat and padded.
        places: Every trained parameter's place, by ``id``.
    """
    group = optimizer.real_dp_process_group[0]
    world_size = dist.get_world_size(group)
    assert all(other is group for other in optimizer.real_dp_process_group)
    assert [flat.numel() * world_size for flat in flats] == [whole.numel() for whole in wholes]

    def forget() -> None:
        # Linked again, to the new moments, after the next step.
        optimizer._hp_optimizer_states_linked = False

    return GroupTables(
        inner=optimizer.optimizer,
        flats=flats,
        places=places,
        rank=dist.get_rank(group),
        world_size=world_size,
        publish=optimizer.update_lp_params,
        forget=forget,
    )
