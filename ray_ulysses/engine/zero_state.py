"""Exports and imports the training state of a ZeRO engine of any stage, as named flat parts.

Exact intervals of each tensor are stored, without padding, so that a state saved at any stage and world size loads at
any other. Only `partition_view` reads DeepSpeed's private attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ray_ulysses.checkpoint.state import ShardedState, StateDescription, StateSource, TensorPart
from ray_ulysses.engine.partition_view import Zero3View, bf16_view, zero12_view
from ray_ulysses.engine.state_parts import (
    PartitionView,
    SwappedState,
    check_same_model,
    describe,
    moment_names,
    named_tensors,
    restore_counters,
    rounded_parts,
    stepped_parts,
    stored_moments,
    untrained_parts,
)
from ray_ulysses.errors import UserError


class StateReader:
    """Reads an engine's training state between two optimizer steps, again and again.

    Args:
        engine: A ``deepspeed.DeepSpeedEngine`` with ZeRO stage 1, 2 or 3, whose trained parameters stay the same.

    Raises:
        UserError: The engine's stage is 0, or its parameters are on NVMe.
        RunError: The DeepSpeed version is not supported.
    """

    def __init__(self, engine: Any) -> None:
        self._engine, self._view, self._tensors = engine, partition_view(engine), named_tensors(engine.module)

    def source(self) -> StateSource:
        """Return this rank's part of the state, in memory or on NVMe; no collective.

        It is a view of the live state: copy or write it before the next step.
        """
        view, tensors = self._view, self._tensors
        moments = moment_names(view)
        description = describe(self._engine, tensors, view, moments)
        resident = (*rounded_parts(tensors, view), *untrained_parts(tensors, view, is_writing=False))
        if len(view.resident_groups) > 1:
            return SwappedState(tensors=tensors, view=view, moments=moments, resident=resident, description=description)
        stepped = stepped_parts(tensors, view, view.resident_groups[0], moments)
        return ShardedState(parts=(*stepped, *resident), description=description)


def state_source(engine: Any) -> StateSource:
    """Return what a `StateReader` reads, for whoever reads the state once."""
    return StateReader(engine).source()


def import_state(engine: Any, description: StateDescription, fill: Callable[[Sequence[TensorPart]], object]) -> None:
    """Load a stored state into an engine of the same model, at any stage and world size; every rank must call.

    The optimizer keeps its own groups and hyperparameters: they follow from the settings of the run that goes on.

    Args:
        engine: A ``deepspeed.DeepSpeedEngine`` with ZeRO stage 1, 2 or 3, just built or already trained.
        description: The stored state, from the manifest.
        fill: Fills this rank's parts in place, such as `checkpoint.load_parts`. It is called once, or with the
            optimizer on NVMe once per sub-group, equally often on every rank.

    Raises:
        UserError: The engine's parameters are not those that were stored, or as `state_source`.
        RunError: The DeepSpeed version is not supported.
    """
    view, tensors = partition_view(engine), named_tensors(engine.module)
    moments = stored_moments(description)
    check_same_model(tensors, description, moments)
    view.begin()
    untrained = tuple(untrained_parts(tensors, view, is_writing=True))
    for group in view.resident_groups:
        with view.swapped_in(group, is_writing=True):
            _make_optimizer_state(view, group, moments, description.optimizer_step)
            fill((*stepped_parts(tensors, view, group, moments), *untrained))
        untrained = ()
    restore_counters(engine, description)
    view.finish()


def partition_view(engine: Any) -> PartitionView:
    """Return the partition view of an engine's ZeRO optimizer.

    Raises:
        UserError: The engine's stage is 0, or its parameters are on NVMe.
        RunError: The DeepSpeed version is not supported.
    """
    stage = engine.zero_optimization_stage()
    optimizer = engine.optimizer
    if stage == 3:
        return Zero3View(optimizer)
    if stage not in (1, 2):
        raise UserError(f"zero_stage={stage}: checkpoints hold the state of ZeRO stages 1, 2 and 3; use one of them")
    if hasattr(optimizer, "bf16_groups"):
        return bf16_view(optimizer)
    return zero12_view(optimizer)


def _make_optimizer_state(view: PartitionView, group: Sequence[int], moments: Sequence[str], step: int) -> None:
    """Allocate zeroed state tensors in the inner optimizer, which has none before the first step."""
    is_torch = isinstance(view.inner, torch.optim.Adam)
    for number in group:
        flat = view.flats[number]
        if not moments:
            view.inner.state.pop(flat, None)
            continue
        state: dict[str, Any] = {name: torch.zeros_like(flat.data) for name in moments}
        # torch's Adam counts in a tensor on the host, DeepSpeed's own in an int.
        state["step"] = torch.tensor(float(step), dtype=torch.float32) if is_torch else step
        view.inner.state[flat] = state
