"""The training state inside a ZeRO engine of any stage, as flat pieces by name: taken out, and put back.

What is stored does not depend on the stage or the world: exact intervals of each tensor, without padding. A state of
any stage loads at any other and at any world size. DeepSpeed's private tables are read in `zero3_tables`,
`zero12_tables` and `bf16_tables` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ray_ulysses.checkpoint.state import Piece, ShardedState, StateDescription, StateSource
from ray_ulysses.engine.bf16_tables import bf16_tables
from ray_ulysses.engine.state_description import (
    check_same_model,
    describe,
    moment_names,
    restore_counters,
    restore_groups,
    stored_moments,
)
from ray_ulysses.engine.state_pieces import rounded_pieces, stepped_pieces, untrained_pieces
from ray_ulysses.engine.state_tables import StateTables
from ray_ulysses.engine.swapped_state import SwappedState
from ray_ulysses.engine.zero3_tables import Zero3Tables
from ray_ulysses.engine.zero12_tables import zero12_tables
from ray_ulysses.errors import RunError, UserError


def state_source(engine: Any) -> StateSource:
    """Return this rank's part of the state between two optimizer steps, in memory or not; no collective.

    It is a view of the live state: copy or write it before the next step.

    Args:
        engine: A ``deepspeed.DeepSpeedEngine`` with ZeRO stage 1, 2 or 3.

    Raises:
        UserError: The engine keeps its state where it can't be reached.
        RunError: It is of another DeepSpeed than the one whose private tables are known.
    """
    tables = state_tables(engine)
    moments = moment_names(tables)
    description = describe(engine, tables, moments)
    resident = (*rounded_pieces(engine, tables), *untrained_pieces(engine, tables, is_writing=False))
    if len(tables.portions) > 1:
        return SwappedState(engine=engine, tables=tables, moments=moments, resident=resident, description=description)
    stepped = stepped_pieces(engine, tables, tables.portions[0], moments)
    return ShardedState(pieces=(*stepped, *resident), description=description)


def export_state(engine: Any) -> ShardedState:
    """Return `state_source` of an engine whose state is in memory: views of it, nothing is copied.

    Raises:
        UserError: The engine keeps its state where it can't be reached.
        RunError: Some of it is swapped out to NVMe, or the engine is of another DeepSpeed.
    """
    state = state_source(engine)
    if not isinstance(state, ShardedState):
        raise RunError(
            "memory.offload_optimizer=nvme: the optimizer's state is not in memory; copy it out of state_source"
        )
    return state


def import_state(engine: Any, description: StateDescription, fill: Callable[[Sequence[Piece]], object]) -> None:
    """Put a stored state into an engine of the same model, at any stage and world size; every rank must call.

    Args:
        engine: A ``deepspeed.DeepSpeedEngine`` with ZeRO stage 1, 2 or 3, just built or already trained.
        description: What was stored, from the manifest.
        fill: Fills the pieces that this rank holds, in place; `checkpoint.load_pieces` does. It is called once, or
            with an optimizer on NVMe once for each sub-group, equally often on every rank.

    Raises:
        UserError: The engine's parameters are not those that were stored, or its state can't be reached.
        RunError: It is of another DeepSpeed than the one whose private tables are known.
    """
    tables = state_tables(engine)
    moments = stored_moments(description)
    check_same_model(engine, description, moments)
    tables.begin()
    untrained = tuple(untrained_pieces(engine, tables, is_writing=True))
    for portion in tables.portions:
        with tables.at_hand(portion, is_writing=True):
            _make_optimizer_state(tables, portion, moments, description.optimizer_step)
            fill((*stepped_pieces(engine, tables, portion, moments), *untrained))
        untrained = ()
    restore_groups(engine, tables, description)
    restore_counters(engine, description)
    tables.finish()


def state_tables(engine: Any) -> StateTables:
    """Return the tables of an engine's ZeRO optimizer.

    Raises:
        UserError: The engine's stage is 0, or its state can't be reached.
        RunError: It is of another DeepSpeed than the one whose private tables are known.
    """
    stage = engine.zero_optimization_stage()
    optimizer = engine.optimizer
    if stage == 3:
        return Zero3Tables(optimizer)
    if stage not in (1, 2):
        raise UserError(f"zero_stage={stage}: checkpoints hold the state of ZeRO stages 1, 2 and 3; use one of them")
    if hasattr(optimizer, "bf16_groups"):
        return bf16_tables(optimizer)
    return zero12_tables(optimizer)


def _make_optimizer_state(tables: StateTables, portion: Sequence[int], moments: Sequence[str], step: int) -> None:
    """Give the inner optimizer zeroed state tensors to fill; before the first step it has none."""
    is_torch = isinstance(tables.inner, torch.optim.Adam)
    for number in portion:
        flat = tables.flats[number]
        if not moments:
            tables.inner.state.pop(flat, None)
            continue
        state: dict[str, Any] = {name: torch.zeros_like(flat.data) for name in moments}
        # torch's Adam counts in a tensor on the host, DeepSpeed's own in an int.
        state["step"] = torch.tensor(float(step), dtype=torch.float32) if is_torch else step
        tables.inner.state[flat] = state
