"""Exports and imports a ZeRO engine's training state at any ZeRO stage, as named flat parts.

Tensors are stored as exact intervals, without padding. A state saved at any stage and world size can therefore be
loaded at any other stage and world size. Only `partition_view` reads DeepSpeed's private attributes.

Keys are ``fp32/<parameter>`` for master weights of trained parameters, ``<moment>/<parameter>`` for their optimizer
moments, which depend on the kind of the parameter's group, ``model/<parameter>`` for trained parameters in the model's
precision if it is not fp32, ``frozen/<parameter>`` and ``buffer/<name>``. A tied parameter is stored once, under its
first name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from ray_ulysses.checkpoint.state import (
    HeldInterval,
    ShardedState,
    StateDescription,
    StateSource,
    TensorPart,
    TensorSpec,
    dtype_name,
)
from ray_ulysses.engine.model_parts import inner_model
from ray_ulysses.engine.optimizer import MOMENTS
from ray_ulysses.engine.partition_view import PartitionView, flat_view, partition_view, shape_of
from ray_ulysses.engine.quantized_base import quantized_modules
from ray_ulysses.errors import UserError


class StateReader:
    """Reads an engine's training state between steps. The set of trained parameters must not change."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._view, self._tensors = engine, partition_view(engine), named_tensors(engine.module)

    def source(self) -> StateSource:
        """Return this rank's part of the state, in memory or on NVMe, without communication.

        The result is a view of the live state: copy or store its contents before the next step.
        """
        view, tensors = self._view, self._tensors
        # The optimizer creates its moments in its first step.
        moments = Moments(view, exist=any(view.inner.state.get(flat) for flat in view.flats))
        description = describe(self._engine, tensors, view, moments)
        resident = (*rounded_parts(tensors, view), *untrained_parts(tensors, view, is_writing=False))
        if len(view.resident_groups) > 1:
            return SwappedState(tensors=tensors, view=view, moments=moments, resident=resident, description=description)
        stepped = stepped_parts(tensors, view, view.resident_groups[0], moments)
        return ShardedState(parts=(*stepped, *resident), description=description)


def state_source(engine: Any) -> StateSource:
    """Return this rank's part of an engine's training state; see `StateReader.source`."""
    return StateReader(engine).source()


def import_state(engine: Any, description: StateDescription, fill: Callable[[Sequence[TensorPart]], object]) -> None:
    """Load a stored state into an engine with the same model, at any stage and world size.

    All ranks must call this function. The optimizer keeps its own parameter groups and hyperparameters, which come from
    the resumed run's settings.

    Args:
        engine: A ``deepspeed.DeepSpeedEngine`` with ZeRO stage 1, 2 or 3, new or already trained.
        description: Description of the stored state, from the manifest.
        fill: A function that fills this rank's parts in place, such as `checkpoint.load_parts`. The function is called
            once or, if the optimizer is on NVMe, once per sub-group, and equally often on every rank.

    Raises:
        UserError: The engine's parameters differ from the stored parameters.
    """
    view, tensors = partition_view(engine), named_tensors(engine.module)
    moments = Moments(view, exist=description.has_moments)
    check_same_model(tensors, description, moments)
    if engine.base_fingerprint != description.base_fingerprint:
        base: Any = inner_model(engine.module)
        raise UserError(
            f"model.path={base.name_or_path!r}: the base model differs from the model with which the checkpoint was "
            "trained (its quantized weights have another fingerprint); restore the original files, or set another "
            "run.name"
        )
    view.begin()
    untrained = tuple(untrained_parts(tensors, view, is_writing=True))
    for group in view.resident_groups:
        with view.swapped_in(group, is_writing=True):
            make_optimizer_state(view, group, moments, description.optimizer_step)
            fill((*stepped_parts(tensors, view, group, moments), *untrained))
        untrained = ()
    for name in _COUNTERS:
        setattr(engine, name, description.counters.get(name, 0))
    # The micro-batch counter depends on the current layout.
    engine.micro_steps = engine.global_steps * engine.gradient_accumulation_steps()
    view.finish()


def make_optimizer_state(view: PartitionView, group: Sequence[int], moments: Moments, step: int) -> None:
    """Allocate zeroed state tensors in the inner optimizer, which has no state before the first step."""
    is_torch = isinstance(view.inner, torch.optim.Adam)
    for number in group:
        flat, group_number = view.flats[number], view.group_of_flat(number)
        if not moments.exist:
            view.inner.state.pop(flat, None)
            continue
        state: dict[str, Any] = {
            name: torch.zeros_like(flat.data, dtype=dtype) for name, dtype in moments.of_group(group_number).items()
        }
        # torch's Adam counts steps in a tensor, which is on the device if the update is fused; DeepSpeed's in an int.
        is_fused = is_torch and view.inner.param_groups[group_number]["fused"]
        device = flat.device if is_fused else "cpu"
        state["step"] = torch.tensor(float(step), dtype=torch.float32, device=device) if is_torch else step
        view.inner.state[flat] = state


class Moments:
    """Names and dtypes of the optimizer's moments, which depend on the parameter group.

    Args:
        view: The partition view of the ZeRO optimizer.
        exist: Whether there are moments; before the first step, there are none.
    """

    def __init__(self, view: PartitionView, *, exist: bool) -> None:
        self._view, self.exist = view, exist

    def of(self, parameter: Any) -> Mapping[str, torch.dtype]:
        """Return the moments of a trained parameter."""
        return self.of_group(self._view.partition_of(parameter).group)

    def of_group(self, group: int) -> Mapping[str, torch.dtype]:
        """Return the moments of the parameters of an optimizer group."""
        return MOMENTS[self._view.inner.param_groups[group]["kind"]] if self.exist else {}


FP32 = "fp32"
MODEL = "model"
FROZEN = "frozen"
BUFFER = "buffer"


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedTensors:
    """A model's tensors by name, collected once because walking over all modules takes milliseconds."""

    trained: tuple[tuple[str, Any], ...]
    """Trained parameters; a tied parameter is listed once, under its first name."""
    frozen: tuple[tuple[str, Any], ...]
    """Frozen parameters; a tied parameter is listed once, under its first name. Empty if the base is quantized."""
    tied: Mapping[str, str]
    """Other names of tied parameters, each mapped to the parameter's first name."""
    buffer_places: tuple[tuple[str, nn.Module], ...]
    """Modules that have buffers, each with its name prefix. Modules rather than buffers are stored, because a module
    may replace a buffer's tensor at any time."""

    @property
    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Current persistent buffers, by name; RoPE tables, for example, are not persistent."""
        seen: set[int] = set()
        for prefix, module in self.buffer_places:
            for name, buffer in module.named_buffers(recurse=False):
                if name not in module._non_persistent_buffers_set and id(buffer) not in seen:
                    seen.add(id(buffer))
                    yield f"{prefix}{name}", buffer


def named_tensors(module: nn.Module) -> NamedTensors:
    """Return a model's tensors by name."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    trained: list[tuple[str, Any]] = []
    frozen: list[tuple[str, Any]] = []
    for name, parameter in module.named_parameters(remove_duplicate=False):
        known = first.setdefault(id(parameter), name)
        if known != name:
            tied[name] = known
        else:
            (trained if parameter.requires_grad else frozen).append((name, parameter))
    if next(quantized_modules(module), None) is not None:
        # The base is loaded and quantized again from `model.path`, and its fingerprint is compared.
        frozen = []
    places = tuple(
        (f"{prefix}." if prefix else "", inner) for prefix, inner in module.named_modules() if inner._buffers
    )
    return NamedTensors(trained=tuple(trained), frozen=tuple(frozen), tied=tied, buffer_places=places)


def stepped_parts(
    tensors: NamedTensors, view: PartitionView, group: Sequence[int], moments: Moments
) -> Iterator[TensorPart]:
    """Yield this rank's master weights and moments that belong to one resident group of flat tensors."""
    for name, parameter in tensors.trained:
        part = view.partition_of(parameter)
        if part.length and part.flat in group:
            flat = view.flats[part.flat]
            for kind in (FP32, *moments.of(parameter)):
                tensor = flat if kind == FP32 else view.inner.state[flat][kind]
                elements = tensor.data.narrow(0, part.offset, part.length)
                yield TensorPart(key=f"{kind}/{name}", start=part.start, tensor=elements)


def stepped_intervals(tensors: NamedTensors, view: PartitionView, moments: Moments) -> Iterator[HeldInterval]:
    """Yield the intervals of this rank's master weights and moments, even if they are not in memory."""
    for name, parameter in tensors.trained:
        part = view.partition_of(parameter)
        if part.length:
            for kind, dtype in {FP32: torch.float32, **moments.of(parameter)}.items():
                yield HeldInterval(key=f"{kind}/{name}", start=part.start, num_elements=part.length, dtype=dtype)


def rounded_parts(tensors: NamedTensors, view: PartitionView) -> Iterator[TensorPart]:
    """Yield this rank's share of the trained weights in the model's precision; nothing if it is fp32."""
    for name, parameter in tensors.trained:
        if parameter.dtype != torch.float32:
            start, tensor = view.weights(parameter, is_writing=False)
            yield from _unless_empty(f"{MODEL}/{name}", start, tensor)


def untrained_parts(tensors: NamedTensors, view: PartitionView, *, is_writing: bool) -> Iterator[TensorPart]:
    """Yield frozen parameters and buffers. Only rank 0 stores buffers, but all ranks load them."""
    for name, parameter in tensors.frozen:
        start, tensor = view.weights(parameter, is_writing=is_writing)
        yield from _unless_empty(f"{FROZEN}/{name}", start, tensor)
    if is_writing or dist.get_rank() == 0:
        for name, buffer in tensors.buffers:
            yield from _unless_empty(f"{BUFFER}/{name}", 0, flat_view(buffer, is_writing=is_writing))


def _unless_empty(key: str, start: int, tensor: torch.Tensor) -> Iterator[TensorPart]:
    if tensor.numel():
        yield TensorPart(key=key, start=start, tensor=tensor)


@dataclass(frozen=True, kw_only=True, slots=True)
class SwappedState:
    """A `StateSource` for a rank's part of a state on NVMe, with one sub-group in memory at a time.

    The object is a view of the live state: copy its contents before the next step.
    """

    tensors: NamedTensors
    view: PartitionView
    moments: Moments
    resident: tuple[TensorPart, ...]
    """Parts that are always in memory: all except master weights and moments."""
    description: StateDescription
    """Description of the state, identical on every rank."""

    @property
    def intervals(self) -> tuple[HeldInterval, ...]:
        """Intervals that this rank owns. Reading this property does not swap anything in."""
        resident = (
            HeldInterval(key=part.key, start=part.start, num_elements=part.tensor.numel(), dtype=part.tensor.dtype)
            for part in self.resident
        )
        return (*stepped_intervals(self.tensors, self.view, self.moments), *resident)

    def copy_to(self, destinations: Sequence[torch.Tensor]) -> None:
        """Copy each interval's elements to the corresponding destination, swapping in one sub-group at a time.

        When this method returns, copies from a device to pinned memory may still be in progress on the current stream.
        """
        wanted = {interval.key: destination for interval, destination in zip(self.intervals, destinations, strict=True)}
        for part in self.resident:
            wanted.pop(part.key).copy_(part.tensor.detach(), non_blocking=True)
        for group in self.view.resident_groups:
            with self.view.swapped_in(group, is_writing=False):
                for part in stepped_parts(self.tensors, self.view, group, self.moments):
                    wanted.pop(part.key).copy_(part.tensor)
        assert not wanted, f"never swapped in: {sorted(wanted)}"


# These options select an implementation, but do not change the result of a step.
_NOT_HYPERPARAMETERS = {"params", "foreach", "fused", "capturable", "differentiable"}
_Value = TypeVar("_Value")
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")


def describe(engine: Any, tensors: NamedTensors, view: PartitionView, moments: Moments) -> StateDescription:
    """Return the description of an engine's state, identical on every rank."""
    return StateDescription(
        tensors=_tensor_specs(tensors, moments),
        tied=tensors.tied,
        optimizer_step=_optimizer_step(view) if moments.exist else 0,
        groups=tuple(_hyperparameters(group) for group in view.inner.param_groups),
        group_of={name: view.partition_of(parameter).group for name, parameter in tensors.trained},
        counters={name: int(getattr(engine, name)) for name in _COUNTERS},
        base_fingerprint=engine.base_fingerprint,
    )


def check_same_model(tensors: NamedTensors, description: StateDescription, moments: Moments) -> None:
    """Raise an error if a model's tensors differ from the stored tensors.

    For trained parameters, only the fp32 master weights are compared, not the rounded copies under ``model/``. The
    model's precision may change; training then continues from the same master weights in the new precision. Frozen
    parameters and buffers have no master weights, so their dtypes must match.

    Raises:
        UserError: Names, shapes or dtypes differ. The error lists the first few tensors.
    """
    here = _comparable(_tensor_specs(tensors, moments))
    stored = _comparable(description.tensors)
    problems = differing(here, stored, lambda spec: f"{list(spec.shape)} {spec.dtype}")
    if problems:
        more = f", and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise UserError(
            f"the model differs from the checkpoint: {'; '.join(problems[:3])}{more}; resume with the run's original "
            "model, or set another run.name"
        )


def differing(here: Mapping[str, _Value], stored: Mapping[str, _Value], shown: Callable[[_Value], str]) -> list[str]:
    """Describe the differences between a model's tensors and the stored tensors, listing missing tensors first."""
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


def _tensor_specs(tensors: NamedTensors, moments: Moments) -> dict[str, TensorSpec]:
    # The order is that of the parts, so that the manifest describes a rank's parts by a few ranges of tensors.
    specs: dict[str, TensorSpec] = {}
    for name, parameter in tensors.trained:
        shape = shape_of(parameter)
        for kind, dtype in {FP32: torch.float32, **moments.of(parameter)}.items():
            specs[f"{kind}/{name}"] = TensorSpec(shape=shape, dtype=dtype_name(dtype))
    for name, parameter in tensors.trained:
        if parameter.dtype != torch.float32:
            specs[f"{MODEL}/{name}"] = TensorSpec(shape=shape_of(parameter), dtype=dtype_name(parameter.dtype))
    for name, parameter in tensors.frozen:
        specs[f"{FROZEN}/{name}"] = TensorSpec(shape=shape_of(parameter), dtype=dtype_name(parameter.dtype))
    for name, buffer in tensors.buffers:
        specs[f"{BUFFER}/{name}"] = TensorSpec(shape=tuple(buffer.shape), dtype=dtype_name(buffer.dtype))
    return specs


def _hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    values = {}
    for key, value in group.items():
        if key not in _NOT_HYPERPARAMETERS:
            value = value.item() if torch.is_tensor(value) else value
            values[key] = list(value) if isinstance(value, tuple) else value
    return values


def _optimizer_step(view: PartitionView) -> int:
    steps = {int(view.inner.state[flat]["step"]) for flat in view.flats}
    assert len(steps) == 1, f"sub-groups are at different steps: {sorted(steps)}"
    return steps.pop()
