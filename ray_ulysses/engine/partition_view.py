"""Locates this rank's elements of each parameter in DeepSpeed's ZeRO partitions, without padding.

Each ZeRO stage packs the trained parameters into flat fp32 tensors. The order and the padding depend on the world size.
A view maps each parameter to the elements that this rank owns, so that all other code uses only parameter names and
exact intervals.

In ZeRO-3, each rank owns ceil(numel / world) elements of every flattened parameter. DeepSpeed 0.19.8 packs them into
sub-groups: ``grad_position`` maps a parameter to (sub-group, offset, length) in ``fp32_partitioned_groups_flat``. With
the optimizer on NVMe, a sub-group and its moments are in memory only during the sub-group's update. Sub-groups below 1
MiB always stay in memory.

In ZeRO-1 and ZeRO-2, each group of parameters is one evenly partitioned flat tensor. A rank's partition may cross
parameter boundaries and may end in padding, so a rank's part of a parameter is the intersection of the parameter and
the partition. Every rank has all model weights, trained and frozen, but saves only an even share of the weights.
DeepSpeed 0.19.8 implements ZeRO-1 with bf16 weights and fp32 gradients in a separate class, ``BF16_Optimizer``, which
partitions in the same way but uses other attribute names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ray_ulysses.checkpoint.intervals import partition


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """The location of this rank's elements of a trained parameter in the optimizer's flat tensors."""

    group: int
    """Index of the parameter's optimizer group, valid even if this rank owns none of the elements."""
    flat: int
    """Index of the flat tensor that contains the elements."""
    offset: int
    """Index of the first element in the flat tensor."""
    start: int
    """Index of the first element in the flattened parameter."""
    length: int
    """Number of elements; 0 if this rank owns none."""


def shape_of(parameter: Any) -> tuple[int, ...]:
    """Return a parameter's full shape, which ZeRO-3 stores in ``ds_shape``."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def flat_view(tensor: torch.Tensor, *, is_writing: bool) -> torch.Tensor:
    """Return a tensor's elements as a 1-D tensor, which shares the tensor's memory if ``is_writing`` is set."""
    if is_writing and not tensor.is_contiguous():
        tensor.data = tensor.data.contiguous()
    return tensor.data.reshape(-1)


class Zero3View:
    """The partition view of a ``DeepSpeedZeroOptimizer_Stage3``.

    Each ``resident_groups`` entry, identical on every rank, lists sub-groups that are in memory at the same time.
    ``inner`` is the optimizer that updates ``flats``, the fp32 master weights of each sub-group, which are empty while
    the sub-group is swapped out.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._partitions: dict[int, Partition] = {}
        numbers = range(len(optimizer.fp32_partitioned_groups_flat))
        swapped = [number for number in numbers if optimizer._swappable_optimizer_subgroup(number)]
        resident = tuple(number for number in numbers if number not in swapped)
        self.resident_groups: tuple[tuple[int, ...], ...] = (resident, *((number,) for number in swapped))
        self.process_group: Any = optimizer.dp_process_group
        self.rank, self.world_size = dist.get_rank(self.process_group), dist.get_world_size(self.process_group)
        self.inner: torch.optim.Optimizer = optimizer.optimizer
        self.flats: Sequence[torch.Tensor] = optimizer.fp32_partitioned_groups_flat

    def partition_of(self, parameter: Any) -> Partition:
        """Return the location of this rank's elements of a trained parameter."""
        known = self._partitions.get(id(parameter))
        if known is None:
            start, stop = _held(parameter)
            flat, offset, _ = self._optimizer.grad_position[self._optimizer.get_param_id(parameter)]
            group = self.group_of_flat(flat)
            known = Partition(group=group, flat=flat, offset=offset, start=start, length=stop - start)
            self._partitions[id(parameter)] = known
        return known

    def group_of_flat(self, number: int) -> int:
        """Return the index of a flat tensor's optimizer group."""
        return int(self._optimizer.sub_group_to_group_id[number])

    def bounds(self, parameter: Any) -> tuple[int, ...]:
        """Return the start index of each rank's elements of a trained parameter, and the number of elements."""
        size = -(-parameter.ds_numel // self.world_size)
        return tuple(min(rank * size, parameter.ds_numel) for rank in range(self.world_size + 1))

    def weights(self, parameter: Any, *, is_writing: bool) -> tuple[int, torch.Tensor]:
        """Return the start index and a view of this rank's share of a parameter in the model, without padding."""
        start, stop = _held(parameter)
        if is_writing:
            # DeepSpeed 0.19.8 never invalidates a frozen parameter's secondary shard (hpZ), which gathers prefer.
            parameter.ds_secondary_tensor = None
        return start, parameter.ds_tensor.data.narrow(0, 0, stop - start)

    def begin(self) -> None:
        """Partition all gathered parameters, and discard swapped-out optimizer state."""
        self._optimizer.checkpoint_event_prologue()
        if self._optimizer.swap_optimizer:
            self._optimizer.optimizer_swapper.purge_state()
            for (number,) in self.resident_groups[1:]:
                self.inner.state.pop(self.flats[number], None)

    @contextmanager
    def swapped_in(self, group: Sequence[int], *, is_writing: bool) -> Iterator[None]:
        """Swap in a resident group's sub-groups for the duration of the block; if ``is_writing``, save changes."""
        optimizer = self._optimizer
        swapped = [number for number in group if optimizer._swappable_optimizer_subgroup(number)]
        for number in swapped:
            optimizer._optimizer_states_and_gradient_swap_in(number)
        try:
            yield
        except BaseException:
            for number in swapped:
                optimizer._release_swap_buffers(number)
            raise
        for number in group if is_writing else ():
            # Copy the master weights to the model's weights; in fp32 without offload, both are the same tensor.
            optimizer._reassign_or_swap_out_partitioned_parameters(number)
        for number in swapped:
            if is_writing:
                optimizer._optimizer_states_and_gradient_swap_out(number)
            else:
                optimizer._release_swap_buffers(number)

    def finish(self) -> None:
        """Gather the small parameters that ZeRO-3 keeps unpartitioned. All ranks must call this method."""
        self._optimizer.checkpoint_event_epilogue()


def _held(parameter: Any) -> tuple[int, int]:
    group = parameter.ds_process_group
    interval = partition(parameter.ds_numel, dist.get_world_size(group), dist.get_rank(group))
    size = -(-parameter.ds_numel // dist.get_world_size(group))
    assert parameter.ds_tensor.ds_numel == size, "DeepSpeed partitions parameters differently"
    return interval


def intersect(group: int, position: int, num_elements: int, *, partition_size: int, rank: int) -> Partition:
    """Return the part of a parameter that lies in one rank's partition of a group.

    Args:
        group: Index of the parameter's group.
        position: Index of the parameter's first element in the group's flat tensor.
        num_elements: Number of elements in the parameter.
        partition_size: Number of elements per partition, including padding.
        rank: The partition's rank.
    """
    first = rank * partition_size
    begin = max(position, first)
    end = min(position + num_elements, first + partition_size)
    if end <= begin:
        return Partition(group=group, flat=group, offset=0, start=0, length=0)
    return Partition(group=group, flat=group, offset=begin - first, start=begin - position, length=end - begin)


class GroupView:
    """The partition view of an optimizer that evenly partitions each group's flat tensor.

    ``flats`` contains this rank's fp32 partitions, and ``wholes`` the model's padded flat weights; each has one tensor
    per group. ``positions`` maps every trained parameter's ``id`` to the parameter's group and offset in that group.
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
        self.process_group = group
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        assert all(other is group for other in optimizer.real_dp_process_group)
        # `begin` only assigns this attribute, so without this check a renamed attribute would go unnoticed.
        assert hasattr(optimizer, "_hp_optimizer_states_linked")
        assert [flat.numel() * self.world_size for flat in flats] == [whole.numel() for whole in wholes]
        self.flats = flats
        self.inner: torch.optim.Optimizer = optimizer.optimizer
        self.resident_groups = (tuple(range(len(flats))),)

    def partition_of(self, parameter: Any) -> Partition:
        """Return the location of this rank's elements of a trained parameter."""
        group, position = self._positions[id(parameter)]
        size = self.flats[group].numel()
        return intersect(group, position, parameter.numel(), partition_size=size, rank=self.rank)

    def group_of_flat(self, number: int) -> int:
        """Return the index of a flat tensor's optimizer group."""
        return number

    def bounds(self, parameter: Any) -> tuple[int, ...]:
        """Return the start index of each rank's elements of a trained parameter, and the number of elements."""
        group, position = self._positions[id(parameter)]
        size, count = self.flats[group].numel(), parameter.numel()
        return tuple(min(max(rank * size - position, 0), count) for rank in range(self.world_size + 1))

    def weights(self, parameter: Any, *, is_writing: bool) -> tuple[int, torch.Tensor]:
        """Return a start index and view of a model parameter: all of it if ``is_writing``, else an even share."""
        flat = flat_view(parameter, is_writing=is_writing)
        if is_writing:
            return 0, flat
        start, stop = partition(flat.numel(), self.world_size, self.rank)
        return start, flat.narrow(0, start, stop - start)

    def begin(self) -> None:
        """Remove DeepSpeed's links to the old moments. DeepSpeed links the new moments after the next step."""
        self._optimizer._hp_optimizer_states_linked = False

    @contextmanager
    def swapped_in(self, group: Sequence[int], *, is_writing: bool) -> Iterator[None]:
        """Do nothing: all partitions are in memory, and `finish` updates the model's weights."""
        yield

    def finish(self) -> None:
        """Copy the rounded master weights to the model's weights on all ranks. All ranks must call this method."""
        self._optimizer.update_lp_params()


def zero12_view(optimizer: Any) -> GroupView:
    """Return the partition view of a ``DeepSpeedZeroOptimizer``, with or without CPU offload."""
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
    """Return the partition view of a ``BF16_Optimizer``, whose groups preserve the order of their parameters."""
    positions = {}
    for number, parameters in enumerate(optimizer.bf16_groups):
        offset = 0
        for parameter in parameters:
            positions[id(parameter)] = (number, offset)
            offset += parameter.numel()
    return GroupView(optimizer, optimizer.fp32_groups_flat_partition, optimizer.bf16_groups_flat, positions)


PartitionView = Zero3View | GroupView
"""Locates a rank's elements of each parameter in the flat tensors of one kind of ZeRO optimizer."""


def partition_view(engine: Any) -> PartitionView:
    """Return the partition view of an engine's ZeRO optimizer."""
    optimizer = engine.optimizer
    if engine.zero_optimization_stage() == 3:
        return Zero3View(optimizer)
    return bf16_view(optimizer) if hasattr(optimizer, "bf16_groups") else zero12_view(optimizer)
