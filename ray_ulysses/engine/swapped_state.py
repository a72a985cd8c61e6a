"""A state whose master weights and moments were swapped out: fetched sub-group by sub-group while it is copied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ray_ulysses.checkpoint.state import HeldInterval, Piece, StateDescription
from ray_ulysses.engine.state_pieces import stepped_intervals, stepped_pieces
from ray_ulysses.engine.state_tables import StateTables


@dataclass(frozen=True, kw_only=True, slots=True)
class SwappedState:
    """One rank's part of the state, of which only a sub-group is in memory at a time; a `StateSource`.

    It is a view of the live state: copy it before the next step.

    Attributes:
        engine: The engine.
        tables: Where its state lies.
        moments: Names of the optimizer's state tensors.
        resident: The pieces that are always in memory, beside what the optimizer steps on.
        description: What all ranks know.
    """

    engine: Any
    tables: StateTables
    moments: tuple[str, ...]
    resident: tuple[Piece, ...]
    description: StateDescription

    @property
    def intervals(self) -> tuple[HeldInterval, ...]:
        """What this rank holds; nothing is fetched to know it."""
        resident = (
            HeldInterval(key=piece.key, start=piece.start, num_elements=piece.tensor.numel(), dtype=piece.tensor.dtype)
            for piece in self.resident
        )
        return (*stepped_intervals(self.engine, self.tables, self.moments), *resident)

    def copy_to(self, destinations: Sequence[torch.Tensor]) -> None:
        """Copy every interval's elements; beside the destinations one sub-group is in memory at a time.

        What is on a device is on its way into pinned memory, on the current stream, when this returns.
        """
        wanted = {interval.key: destination for interval, destination in zip(self.intervals, destinations, strict=True)}
        for piece in self.resident:
            wanted.pop(piece.key).copy_(piece.tensor.detach(), non_blocking=True)
        for portion in self.tables.portions:
            with self.tables.at_hand(portion, is_writing=False):
                for piece in stepped_pieces(self.engine, self.tables, portion, self.moments):
                    wanted.pop(piece.key).copy_(piece.tensor)
        assert not wanted, f"never at hand: {sorted(wanted)}"
