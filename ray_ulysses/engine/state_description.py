"""Builds, compares and restores the part of a training state that is the same on every rank, world and stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from ray_ulysses.checkpoint.state import StateDescription, TensorSpec, dtype_name
from ray_ulysses.engine.partition_view import shape_of
from ray_ulysses.engine.state_parts import BUFFER, FP32, FROZEN, MODEL, NamedTensors, PartitionView
from ray_ulysses.errors import UserError

# These select an implementation and do not change the step.
_NOT_HYPERPARAMETERS = {"params", "foreach", "fused", "capturable", "differentiable"}
_Value = TypeVar("_Value")
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")


def describe(engine: Any, tensors: NamedTensors, view: PartitionView, moments: Sequence[str]) -> StateDescription:
    """Return the description of an engine's state, the same on every rank."""
    return StateDescription(
        tensors=_tensor_specs(tensors, moments),
        tied=tensors.tied,
        optimizer_step=_optimizer_step(view) if moments else 0,
        groups=tuple(_hyperparameters(group) for group in view.inner.param_groups),
        group_of={name: view.partition_of(parameter).group for name, parameter in tensors.trained},
        counters={name: int(getattr(engine, name)) for name in _COUNTERS},
    )


def moment_names(view: PartitionView) -> tuple[str, ...]:
    """Return the names of the optimizer's flat state tensors; empty before the first step."""
    names: set[str] = set()
    for flat in view.flats:
        names |= {
            key
            for key, value in view.inner.state.get(flat, {}).items()
            if torch.is_tensor(value) and value.dim() == 1 and value.numel() == flat.numel()
        }
    return tuple(sorted(names))


def stored_moments(description: StateDescription) -> tuple[str, ...]:
    """Return the names of the moments that were stored."""
    kinds = {key.split("/", 1)[0] for key in description.tensors}
    return tuple(sorted(kinds - {FP32, MODEL, FROZEN, BUFFER}))


def restore_counters(engine: Any, description: StateDescription) -> None:
    """Restore the engine's counters; micro-batches are recounted for this layout."""
    for name in _COUNTERS:
        setattr(engine, name, description.counters.get(name, 0))
    engine.micro_steps = engine.global_steps * engine.gradient_accumulation_steps()


def check_same_model(tensors: NamedTensors, description: StateDescription, moments: Sequence[str]) -> None:
    """Compare a model's tensors with the stored ones.

    Trained weights are compared by their fp32 master: the model's own precision may change, and its rounded copy under
    ``model/`` need not exist. Training then continues from the same master weights with the losses of the new
    precision. Frozen parameters and buffers have no master, and must keep their stored dtype.

    Raises:
        UserError: Names, shapes or dtypes differ; names the first few tensors.
    """
    here = _comparable(_tensor_specs(tensors, moments))
    stored = _comparable(description.tensors)
    problems = differing(here, stored, lambda spec: f"{list(spec.shape)} {spec.dtype}")
    if problems:
        more = f", and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise UserError(
            f"model: it is not the one that was checkpointed: {'; '.join(problems[:3])}{more}; resume with "
            f"the model that the run started with, or set another run.name"
        )


def differing(here: Mapping[str, _Value], stored: Mapping[str, _Value], shown: Callable[[_Value], str]) -> list[str]:
    """Return how named tensors differ from stored ones, those that are missing first (pure)."""
    found = [f"{key} is not in the checkpoint" for key in here if key not in stored]
    found += [f"{key} is in the checkpoint only" for key in stored if key not in here]
    found += [
        f"{key} is {shown(value)}, stored {shown(stored[key])}"
        for key, value in here.items()
        if key in stored and stored[key] != value
    ]
    return found


def _comparable(tensors: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    return {key: spec for key, spec in tensors.items() if not key.startswith(f"{MODEL}/")}


def _tensor_specs(tensors: NamedTensors, moments: Sequence[str]) -> dict[str, TensorSpec]:
    specs: dict[str, TensorSpec] = {}
    for name, parameter in tensors.trained:
        spec = TensorSpec(shape=shape_of(parameter), dtype="F32")
        specs.update((f"{kind}/{name}", spec) for kind in (FP32, *moments))
        if parameter.dtype != torch.float32:
            specs[f"{MODEL}/{name}"] = TensorSpec(shape=spec.shape, dtype=dtype_name(parameter.dtype))
    for name, parameter in tensors.frozen:
        specs[f"{FROZEN}/{name}"] = TensorSpec(shape=shape_of(parameter), dtype=dtype_name(parameter.dtype))
    for name, buffer in tensors.buffers:
        specs[f"{BUFFER}/{name}"] = TensorSpec(shape=tuple(buffer.shape), dtype=dtype_name(buffer.dtype))
    return specs


def _hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's hyperparameters as JSON values."""
    values = {}
    for key, value in group.items():
        if key not in _NOT_HYPERPARAMETERS:
            value = value.item() if torch.is_tensor(value) else value
            values[key] = list(value) if isinstance(value, tuple) else value
    return values


def _optimizer_step(view: PartitionView) -> int:
    """Return the number of steps that the optimizer has done."""
    steps = {int(view.inner.state[flat]["step"]) for flat in view.flats}
    assert len(steps) == 1, f"sub-groups have done different numbers of steps: {sorted(steps)}"
    return steps.pop()
