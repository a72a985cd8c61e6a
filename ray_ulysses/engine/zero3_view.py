"""The partition view of ZeRO-3, where each rank holds ceil(numel / world) flat elements of every parameter.

DeepSpeed 0.19.8 packs them into sub-groups: ``grad_position`` maps a parameter to (sub-group, offset, length) in
``fp32_partitioned_groups_flat``. With the optimizer on NVMe, a sub-group and its moments are in memory only during its
update; a small one (below 1 MiB) always is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ray_ulysses.checkpoint.intervals import partition
from ray_ulysses.engine.partition_view import Partition, require_attributes
from ray_ulysses.errors import UserError

ZERO3_ATTRIBUTES = (
    "grad_position",
    "fp32_partitioned_groups_flat",
    "fp16_partitioned_groups_flat",
    "sub_group_to_group_id",
    "get_param_id",
    "swap_optimizer",
    "optimizer_swapper",
    "checkpoint_event_prologue",
    "checkpoint_event_epilogue",
    "_swappable_optimizer_subgroup",
    "_optimizer_states_and_gradient_swap_in",
    "_optimizer_states_and_gradient_swap_out",
    "_release_swap_buffers",
    "_reassign_or_swap_out_partitioned_parameters",
)
"""Attributes read from ``DeepSpeedZeroOptimizer_Stage3`` in runtime/zero/stage3.py."""


class Zero3View:
    """The partition view of a ``DeepSpeedZeroOptimizer_Stage3``.

    Attributes:
        resident_groups: Indices of the sub-groups that are in memory at the same time; the same on every rank.

    Raises:
        RunError: The DeepSpeed version is not supported.
        UserError: The optimizer keeps parameters on NVMe.
    """

    def __init__(self, optimizer: Any) -> None:
        require_attributes(optimizer, ZERO3_ATTRIBUTES)
        if any(flat is None for flat in optimizer.fp16_partitioned_groups_flat):
            raise UserError(
                "offload_param: weights that were swapped to NVMe can't be checkpointed; offload the optimizer alone "
                "(memory.offload_optimizer=nvme)"
            )
        self._optimizer = optimizer
        self._partitions: dict[int, Partition] = {}
        numbers = range(len(optimizer.fp32_partitioned_groups_flat))
        swapped = [number for number in numbers if optimizer._swappable_optimizer_subgroup(number)]
        resident = tuple(number for number in numbers if number not in swapped)
        self.resident_groups: tuple[tuple[int, ...], ...] = (resident, *((number,) for number in swapped))

    @property
    def inner(self) -> torch.optim.Optimizer:
        """The optimizer that updates the flat tensors."""
        inner: torch.optim.Optimizer = self._optimizer.optimizer
        return inner

    @property
    def flats(self) -> Sequence[torch.Tensor]:
        """The fp32 master weights of each sub-group; one that is swapped out has no elements in the meantime."""
        flats: Sequence[torch.Tensor] = self._optimizer.fp32_partitioned_groups_flat
        return flats

    def partition_of(self, parameter: Any) -> Partition:
        """Return the location of this rank's elements of a trained parameter."""
        known = self._partitions.get(id(parameter))
        return known if known is not None else self._partitions.setdefault(id(parameter), self._locate(parameter))

    def _locate(self, parameter: Any) -> Partition:
        start, stop = _held(parameter)
        number, offset, _ = self._optimizer.grad_position[self._optimizer.get_param_id(parameter)]
        group = int(self._optimizer.sub_group_to_group_id[number])
        return Partition(group=group, flat=number, offset=offset, start=start, length=stop - start)

    def weights(self, parameter: Any, *, is_writing: bool) -> tuple[int, torch.Tensor]:
        """Return a position and a view of the elements from it: this rank's partition, without its padding."""
        start, stop = _held(parameter)
        return start, parameter.ds_tensor.data.narrow(0, 0, stop - start)

    def begin(self) -> None:
        """Partition every gathered parameter, and discard what was swapped out."""
        self._optimizer.checkpoint_event_prologue()
        if self._optimizer.swap_optimizer:
            self._optimizer.optimizer_swapper.purge_state()
            for (number,) in self.resident_groups[1:]:
                self.inner.state.pop(self.flats[number], None)

    @contextmanager
    def swapped_in(self, group: Sequence[int], *, is_writing: bool) -> Iterator[None]:
        """Swap the sub-groups of a resident group in, and swap out again what was written."""
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
            # In fp32 without offload both are the same tensor; otherwise the model's weights follow the master's.
            optimizer._reassign_or_swap_out_partitioned_parameters(number)
        for number in swapped:
            if is_writing:
                optimizer._optimizer_states_and_gradient_swap_out(number)
            else:
                optimizer._release_swap_buffers(number)

    def finish(self) -> None:
        """Gather the small parameters that ZeRO-3 keeps whole on every rank; every rank must call."""
        self._optimizer.checkpoint_event_epilogue()


def _held(parameter: Any) -> tuple[int, int]:
    """Return the interval of a parameter that this rank holds."""
    group = parameter.ds_process_group
    interval = partition(parameter.ds_numel, dist.get_world_size(group), dist.get_rank(group))
    size = -(-parameter.ds_numel // dist.get_world_size(group))
    assert parameter.ds_tensor.ds_numel == size, "DeepSpeed partitions parameters differently"
    return interval
