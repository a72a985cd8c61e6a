"""The training state inside a ZeRO-3 engine, as flat pieces by name: taken out, and put back.

DeepSpeed 0.19.8 gives each rank ceil(numel / world) flat elements of every parameter and packs them into
sub-groups that depend on the world. Its private tables say where: ``grad_position`` maps a parameter to
(sub-group, offset, length) in ``fp32_partitioned_groups_flat`` and in the inner optimizer's state of that
flat tensor. Nothing else of DeepSpeed's private state is touched, and `_zero_optimizer` checks that the
tables are there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ray_ulysses.checkpoint.intervals import partition
from ray_ulysses.checkpoint.state import Piece, ShardedState, StateDescription, TensorSpec, dtype_name
from ray_ulysses.errors import RunError, UserError

FP32 = "fp32"
FROZEN = "frozen"
BUFFER = "buffer"

_PRIVATE_TABLES = (
    "grad_position",
    "fp32_partitioned_groups_flat",
    "fp16_partitioned_groups_flat",
    "sub_group_to_group_id",
    "get_param_id",
    "_unflatten_partitioned_parameters",
    "checkpoint_event_prologue",
    "checkpoint_event_epilogue",
)
# How a machine computes the step, not what the step is.
_NOT_HYPERPARAMETERS = {"params", "foreach", "fused", "capturable", "differentiable"}
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")


def export_state(engine: Any) -> ShardedState:
    """Return this rank's part of the state between two optimizer steps; no collective, nothing is copied.

    The pieces are views of the live state: write or copy them before the next step.

    Args:
        engine: A ``deepspeed.DeepSpeedEngine`` with ZeRO stage 3.

    Raises:
        UserError: The engine keeps its state where this version can't reach it (another stage, NVMe).
    """
    optimizer = _zero_optimizer(engine)
    moments = _moment_names(optimizer)
    pieces = tuple(_pieces(engine, optimizer, moments))
    return ShardedState(pieces=pieces, description=_describe(engine, optimizer, moments))


def import_state(engine: Any, description: StateDescription, fill: Callable[[Sequence[Piece]], object]) -> None:
    """Put a stored state into an engine of the same model, at any world size; every rank must call.

    Args:
        engine: A ``deepspeed.DeepSpeedEngine`` with ZeRO stage 3, just built or already trained.
        description: What was stored, from the manifest.
        fill: Fills the pieces that this rank holds, in place; `checkpoint.load_pieces` does.

    Raises:
        UserError: The engine's parameters are not those that were stored.
    """
    optimizer = _zero_optimizer(engine)
    moments = _stored_moments(description)
    _check_same_model(engine, description, moments)
    # Partitions every parameter that is gathered at the moment, so that no stale copy survives.
    optimizer.checkpoint_event_prologue()
    _make_optimizer_state(optimizer, moments, description.optimizer_step)
    fill(tuple(_pieces(engine, optimizer, moments, is_writing=True)))
    for number, fp32_flat in enumerate(optimizer.fp32_partitioned_groups_flat):
        # In fp32 both are the same tensor; in bf16 the model's weights follow the master's.
        optimizer.fp16_partitioned_groups_flat[number].data.copy_(fp32_flat.data)
        optimizer._unflatten_partitioned_parameters(number)
    _restore_groups(engine, optimizer, description)
    for name in _COUNTERS:
        setattr(engine, name, description.counters.get(name, 0))
    engine.micro_steps = engine.global_steps * engine.gradient_accumulation_steps()
    # Gathers the small parameters that ZeRO-3 keeps whole on every rank.
    optimizer.checkpoint_event_epilogue()


def _zero_optimizer(engine: Any) -> Any:
    """Return the engine's ZeRO-3 optimizer after checking that it is one whose state can be reached."""
    stage = engine.zero_optimization_stage()
    if stage != 3:
        raise UserError(f"zero_stage={stage}: checkpoints hold the state of ZeRO stage 3 only; use stage 3")
    optimizer = engine.optimizer
    missing = [name for name in _PRIVATE_TABLES if not hasattr(optimizer, name)]
    if missing:
        raise RunError(
            f"this DeepSpeed's ZeRO-3 optimizer lacks {', '.join(missing)}; install the version that "
            "ray-ulysses pins (0.19)"
        )
    if optimizer.swap_optimizer or any(flat is None for flat in optimizer.fp16_partitioned_groups_flat):
        raise UserError(
            "memory.offload_optimizer: state that was swapped to NVMe can't be checkpointed in this version; "
            "use 'none' or 'cpu'"
        )
    return optimizer


def _trainable(engine: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parameters that are trained, a tied one once, under its first name."""
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            yield name, parameter


def _frozen(engine: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parameters that are not trained."""
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            yield name, parameter


def _buffers(engine: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers that belong to the model's state (a RoPE table does not)."""
    seen: set[int] = set()
    for prefix, module in engine.module.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set and id(buffer) not in seen:
                seen.add(id(buffer))
                yield (f"{prefix}.{name}" if prefix else name), buffer


def _held(parameter: Any) -> tuple[int, int]:
    """Return the interval of a parameter that this rank holds."""
    group = parameter.ds_process_group
    interval = partition(parameter.ds_numel, dist.get_world_size(group), dist.get_rank(group))
    size = -(-parameter.ds_numel // dist.get_world_size(group))
    assert parameter.ds_tensor.ds_numel == size, "DeepSpeed partitions otherwise than it did"
    return interval


def _pieces(engine: Any, optimizer: Any, moments: Sequence[str], *, is_writing: bool = False) -> Iterator[Piece]:
    """Yield views of what this rank holds.

    Args:
        engine: The engine.
        optimizer: Its ZeRO-3 optimizer.
        moments: Names of the optimizer's state tensors.
        is_writing: Whether the pieces are to be filled: then every rank wants the buffers, not rank 0 alone.
    """
    for name, parameter in _trainable(engine):
        start, stop = _held(parameter)
        number, offset, _ = optimizer.grad_position[optimizer.get_param_id(parameter)]
        flat = optimizer.fp32_partitioned_groups_flat[number]
        for kind, tensor in _state_tensors(optimizer, flat, moments):
            yield Piece(key=f"{kind}/{name}", start=start, tensor=tensor.narrow(0, offset, stop - start))
    for name, parameter in _frozen(engine):
        start, stop = _held(parameter)
        tensor = parameter.ds_tensor.data.narrow(0, 0, stop - start)
        yield Piece(key=f"{FROZEN}/{name}", start=start, tensor=tensor)
    if is_writing or dist.get_rank() == 0:
        for name, buffer in _buffers(engine):
            yield Piece(key=f"{BUFFER}/{name}", start=0, tensor=buffer.data.view(-1))


def _state_tensors(optimizer: Any, flat: torch.Tensor, moments: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a sub-group's flat tensors: the fp32 weights and each moment."""
    yield FP32, flat.data
    for moment in moments:
        yield moment, optimizer.optimizer.state[flat][moment].data


def _moment_names(optimizer: Any) -> tuple[str, ...]:
    """Return the names of the optimizer's flat state tensors; empty before the first step."""
    names: set[str] = set()
    for flat in optimizer.fp32_partitioned_groups_flat:
        state = optimizer.optimizer.state.get(flat, {})
        names |= {
            key
            for key, value in state.items()
            if torch.is_tensor(value) and value.dim() == 1 and value.numel() == flat.numel()
        }
    return tuple(sorted(names))


def _stored_moments(description: StateDescription) -> tuple[str, ...]:
    """Return the names of the moments that were stored."""
    kinds = {key.split("/", 1)[0] for key in description.tensors}
    return tuple(sorted(kinds - {FP32, FROZEN, BUFFER}))


def _describe(engine: Any, optimizer: Any, moments: Sequence[str]) -> StateDescription:
    """Return what every rank knows about the state."""
    groups = tuple(_hyperparameters(group) for group in optimizer.optimizer.param_groups)
    return StateDescription(
        tensors=_tensor_specs(engine, moments),
        tied=_tied_names(engine.module),
        optimizer_step=_optimizer_step(optimizer) if moments else 0,
        groups=groups,
        group_of={name: _group_number(optimizer, parameter) for name, parameter in _trainable(engine)},
        counters={name: int(getattr(engine, name)) for name in _COUNTERS},
    )


def _tensor_specs(engine: Any, moments: Sequence[str]) -> dict[str, TensorSpec]:
    """Return shape and dtype of every tensor of the state."""
    specs = {}
    for name, parameter in _trainable(engine):
        shape = tuple(parameter.ds_shape)
        for kind in (FP32, *moments):
            specs[f"{kind}/{name}"] = TensorSpec(shape=shape, dtype="F32")
    for name, parameter in _frozen(engine):
        shape = tuple(parameter.ds_shape)
        specs[f"{FROZEN}/{name}"] = TensorSpec(shape=shape, dtype=dtype_name(parameter.dtype))
    for name, buffer in _buffers(engine):
        specs[f"{BUFFER}/{name}"] = TensorSpec(shape=tuple(buffer.shape), dtype=dtype_name(buffer.dtype))
    return specs


def _tied_names(module: nn.Module) -> dict[str, str]:
    """Return the other names of parameters that have several."""
    first = {id(parameter): name for name, parameter in module.named_parameters()}
    names = module.named_parameters(remove_duplicate=False)
    return {name: first[id(parameter)] for name, parameter in names if first[id(parameter)] != name}


def _group_number(optimizer: Any, parameter: nn.Parameter) -> int:
    """Return which of the optimizer's groups a parameter belongs to."""
    number, _, _ = optimizer.grad_position[optimizer.get_param_id(parameter)]
    return int(optimizer.sub_group_to_group_id[number])


def _hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's hyperparameters as JSON values."""
    values = {}
    for key, value in group.items():
        if key not in _NOT_HYPERPARAMETERS:
            value = value.item() if torch.is_tensor(value) else value
            values[key] = list(value) if isinstance(value, tuple) else value
    return values


def _optimizer_step(optimizer: Any) -> int:
    """Return how many steps the optimizer has done; the same for every sub-group, or something is wrong."""
    steps = {int(optimizer.optimizer.state[flat]["step"]) for flat in optimizer.fp32_partitioned_groups_flat}
    assert len(steps) == 1, f"sub-groups have done different numbers of steps: {sorted(steps)}"
    return steps.pop()


def _make_optimizer_state(optimizer: Any, moments: Sequence[str], step: int) -> None:
    """Give the inner optimizer zeroed state tensors to fill; before the first step it has none."""
    is_torch = isinstance(optimizer.optimizer, torch.optim.Adam)
    for flat in optimizer.fp32_partitioned_groups_flat:
        if not moments:
            optimizer.optimizer.state.pop(flat, None)
            continue
        state: dict[str, Any] = {name: torch.zeros_like(flat.data) for name in moments}
        # torch's Adam counts in a tensor on the host, DeepSpeed's own in an int.
        state["step"] = torch.tensor(float(step), dtype=torch.float32) if is_torch else step
        optimizer.optimizer.state[flat] = state


def _restore_groups(engine: Any, optimizer: Any, description: StateDescription) -> None:
    """Give every group the hyperparameters that its parameters were stored with."""
    stored_groups: dict[int, int] = {}
    for name, parameter in _trainable(engine):
        number = _group_number(optimizer, parameter)
        stored = description.group_of[name]
        if stored_groups.setdefault(number, stored) != stored:
            raise UserError(
                f"optimizer: parameter {name} was stored in group {stored}, but its group now holds "
                f"parameters of group {stored_groups[number]}; resume with the parameter groups that the "
                f"run started with"
            )
    for number, stored in stored_groups.items():
        group = optimizer.optimizer.param_groups[number]
        for key, value in description.groups[stored].items():
            group[key] = tuple(value) if isinstance(value, list) else value


def _check_same_model(engine: Any, description: StateDescription, moments: Sequence[str]) -> None:
    """Compare the engine's tensors with the stored ones; name the first few that differ."""
    here = _tensor_specs(engine, moments)
    stored = description.tensors
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
