"""Training state on NVMe, whose master weights and moments are swapped in by sub-group while it is copied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ray_ulysses.checkpoint.state import HeldInterval, StateDescription, TensorPart
from ray_ulysses.engine.partition_view import PartitionView
from ray_ulysses.engine.state_parts import stepped_intervals, stepped_parts


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
