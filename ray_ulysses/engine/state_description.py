"""What every rank knows about a training state, whatever the world and the stage: made, compared, put back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ray_ulysses.checkpoint.state import StateDescription, TensorSpec, dtype_name
from ray_ulysses.engine.state_pieces import BUFFER, FP32, FROZEN, MODEL, buffers, frozen, trainable
from ray_ulysses.engine.state_tables import StateTables, shape_of
from ray_ulysses.errors import UserError

# How a machine computes the step, not what the step is.
_NOT_HYPERPARAMETERS = {"params", "foreach", "fused", "capturable", "differentiable"}
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")


def describe(engine: Any, tables: StateTables, moments: Sequence[str]) -> StateDescription:
    """Return what every rank knows about an engine's state."""
    return StateDescription(
        tensors=_tensor_specs(engine, moments),
        tied=_tied_names(engine.module),
        optimizer_step=_optimizer_step(tables) if moments else 0,
        groups=tuple(_hyperparameters(group) for group in tables.inner.param_groups),
        group_of={name: tables.slot(parameter).group for name, parameter in trainable(engine)},
        counters={name: int(getattr(engine, name)) for name in _COUNTERS},
    )


def moment_names(tables: StateTables) -> tuple[str, ...]:
    """Return the names of the optimizer's flat state tensors; empty before the first step."""
    names: set[str] = set()
    for flat in tables.flats:
        names |= {
            key
            for key, value in tables.inner.state.get(flat, {}).items()
            if torch.is_tensor(value) and value.dim() == 1 and value.numel() == flat.numel()
        }
    return tuple(sorted(names))


def stored_moments(description: StateDescription) -> tuple[str, ...]:
    """Return the names of the moments that were stored."""
    kinds = {key.split("/", 1)[0] for key in description.tensors}
    return tuple(sorted(kinds - {FP32, MODEL, FROZEN, BUFFER}))


def restore_groups(engine: Any, tables: StateTables, description: StateDescription) -> None:
    """Give every group the hyperparameters that its parameters were stored with.

    Raises:
        UserError: A group holds parameters that were stored in different ones.
    """
    if not description.groups:
        return
    stored_groups: dict[int, int] = {}
    for name, parameter in trainable(engine):
        number, stored = tables.slot(parameter).group, description.group_of[name]
        if stored_groups.setdefault(number, stored) != stored:
            raise UserError(
                f"optimizer: parameter {name} was stored in group {stored}, but its group now holds "
                f"parameters of group {stored_groups[number]}; resume with the parameter groups that the "
                f"run started with"
            )
    for number, stored in stored_groups.items():
        group = tables.inner.param_groups[number]
        for key, value in description.groups[stored].items():
            group[key] = tuple(value) if isinstance(value, list) else value


def restore_counters(engine: Any, description: StateDescription) -> None:
    """Give the engine its counters back; micro-batches are counted in those of this layout."""
    for name in _COUNTERS:
        setattr(engine, name, description.counters.get(name, 0))
    engine.micro_steps = engine.global_steps * engine.gradient_accumulation_steps()


def check_same_model(engine: Any, description: StateDescription, moments: Sequence[str]) -> None:
    """Compare the engine's tensors with the stored ones; name the first few that differ.

    Trained weights are compared by their fp32 master: the precision that the model computes in may be another, and
    its rounded copy under ``model/`` need not be there. Training goes on from the master weights then, which are the
    same, but its losses are those of the new precision. Frozen parameters and buffers have no master, and their dtype
    must be the stored one.

    Raises:
        UserError: Names of tensors, shapes or dtypes differ.
    """
    here = _comparable(_tensor_specs(engine, moments))
    stored = _comparable(description.tensors)
    problems = [f"{key} is not in the checkpoint" for key in here if key not in stored]
    problems += [f"{key} is in the checkpoint only" for key in stored if key not in here]
    problems += [
        f"{key} is {list(spec.shape)} {spec.dtype}, stored {list(stored[key].shape)} {stored[key].dtype}"
        for key, spec in here.items()
        if key in stored and stored[key] != spec
    ]
    if problems:
        more = f", and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise UserError(
            f"model: it is not the one that was checkpointed: {'; '.join(problems[:3])}{more}; resume with "
            f"the model that the run started with, or set another run.name"
        )


def _comparable(tensors: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    return {key: spec for key, spec in tensors.items() if not key.startswith(f"{MODEL}/")}


def _tensor_specs(engine: Any, moments: Sequence[str]) -> dict[str, TensorSpec]:
    """Return shape and dtype of every tensor of the state."""
    specs = {}
    for name, parameter in trainable(engine):
        for kind in (FP32, *moments):
            specs[f"{kind}/{name}"] = TensorSpec(shape=shape_of(parameter), dtype="F32")
        if parameter.dtype != torch.float32:
            specs[f"{MODEL}/{name}"] = TensorSpec(shape=shape_of(parameter), dtype=dtype_name(parameter.dtype))
    for name, parameter in frozen(engine):
        specs[f"{FROZEN}/{name}"] = TensorSpec(shape=shape_of(parameter), dtype=dtype_name(parameter.dtype))
    for name, buffer in buffers(engine):
        specs[f"{BUFFER}/{name}"] = TensorSpec(shape=tuple(buffer.shape), dtype=dtype_name(buffer.dtype))
    return specs


def _tied_names(module: nn.Module) -> dict[str, str]:
    """Return the other names of parameters that have several."""
    first = {id(parameter): name for name, parameter in module.named_parameters()}
    names = module.named_parameters(remove_duplicate=False)
    return {name: first[id(parameter)] for name, parameter in names if first[id(parameter)] != name}


def _hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's hyperparameters as JSON values."""
    values = {}
    for key, value in group.items():
        if key not in _NOT_HYPERPARAMETERS:
            value = value.item() if torch.is_tensor(value) else value
            values[key] = list(value) if isinstance(value, tuple) else value
    return values


def _optimizer_step(tables: StateTables) -> int:
    """Return how many steps the optimizer has done; the same for every flat tensor, or something is wrong."""
    steps = {int(tables.inner.state[flat]["step"]) for flat in tables.flats}
    assert len(steps) == 1, f"sub-groups have done different numbers of steps: {sorted(steps)}"
    return steps.pop()
