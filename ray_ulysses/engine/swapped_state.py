"""Training state on NVMe, whose master weights and moments are swapped in by sub-group while it is copied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ray_ulysses.checkpoint.state import HeldInterval, Piece, StateDescription
from ray_ulysses.engine.partition_view import PartitionView
from ray_ulysses.engine.state_parts import stepped_intervals, stepped_parts


@dataclass(frozen=True, kw_only=True, slots=True)
class SwappedState:
    """One rank's part of the state, with only one sub-group in memory at a time; a `StateSource`.

    It is a view of the live state: copy it before the next step.

    Attributes:
        engine: The engine.
        view: Its partition view.
        moments: Names of the optimizer's state tensors.
        resident: The parts that are always in memory: everything but master weights and moments.
        description: The part of the state that is the same on every rank.
    """

    engine: Any
    view: PartitionView
    moments: tuple[str, ...]
    resident: tuple[Piece, ...]
    description: StateDescription

    @property
    def intervals(self) -> tuple[HeldInterval, ...]:
        """The intervals that this rank holds; reading them swaps nothing in."""
        resident = (
            HeldInterval(key=piece.key, start=piece.start, num_elements=piece.tensor.numel(), dtype=piece.tensor.dtype)
            for piece in self.resident
        )
        return (*stepped_intervals(self.engine, self.view, self.moments), *resident)

    def copy_to(self, destinations: Sequence[torch.Tensor]) -> None:
        """Copy every interval's elements; apart from the destinations, one sub-group is in memory at a time.

        Copies from a device into pinned memory may still be in progress, on the current stream, on return.
        """
        wanted = {interval.key: destination for interval, destination in zip(self.intervals, destinations, strict=True)}
        for piece in self.resident:
            wanted.pop(piece.key).copy_(piece.tensor.detach(), non_blocking=True)
        for group in self.view.resident_groups:
            with self.view.swapped_in(group, is_writing=False):
                for piece in stepped_parts(self.engine, self.view, group, self.moments):
                    wanted.pop(piece.key).copy_(piece.tensor)
        assert not wanted, f"never swapped in: {sorted(wanted)}"
