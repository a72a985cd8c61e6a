"""Optimizer parameter groups and the learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import nn

from ray_ulysses.attention.mixer_layouts import layout_of
from ray_ulysses.config.optimizer import OptimizerKind, ParameterGroup
from ray_ulysses.engine.parameter_names import first_match, parameter_names
from ray_ulysses.engine.partition_view import shape_of

# State-space matrix A and skip coefficients D, and the scale of clipping layers that replace norms.
_EXEMPT = frozenset({"A_log", "D", "scale"})
_KINDS: tuple[OptimizerKind, ...] = get_args(OptimizerKind)
MOMENTS: Mapping[OptimizerKind, Mapping[str, torch.dtype]] = {
    "adamw": {"exp_avg": torch.float32, "exp_avg_sq": torch.float32},
    "adamw_bf16_moments": {"exp_avg": torch.bfloat16, "exp_avg_sq": torch.bfloat16},
    "muon": {"momentum_buffer": torch.float32},
}
"""Names and dtypes of the moments of each kind of parameter group."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Matrices:
    """The matrices in a parameter, stored one after the other."""

    count: int
    rows: int
    columns: int


def parameter_groups(
    model: nn.Module,
    weight_decay: float,
    *,
    kind: OptimizerKind = "adamw",
    groups: Sequence[ParameterGroup] = (),
) -> list[dict[str, Any]]:
    """Return the optimizer's parameter groups; by default, only projections and embeddings get weight decay.

    Vectors are exempt, as are norms, biases and state-space coefficients of any shape: Cohere, for example, has a norm
    per head, and gpt-oss a bias per expert. The shape of a parameter partitioned by ZeRO-3 is read from ``ds_shape``.
    Empty groups are omitted.

    Args:
        model: The model. Frozen parameters are omitted.
        weight_decay: Default weight decay.
        kind: Optimizer. With ``muon``, AdamW updates all parameters except `muon_matrices`.
        groups: Settings of parameters by name pattern; the first match applies.

    Returns:
        Groups in the form of ``torch.optim``, with ``kind`` and ``lr_scale`` as additional entries.
    """
    modules = dict(model.named_modules())
    matrices = muon_matrices(model) if kind == "muon" else {}
    own: OptimizerKind = "adamw" if kind == "muon" else kind
    found: dict[tuple[int, int, bool], dict[str, Any]] = {}
    names = parameter_names(model)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        module, _, last = name.rpartition(".")
        is_decayed = len(shape_of(parameter)) > 1 and not _is_exempt(modules[module], last)
        used: OptimizerKind = "muon" if id(parameter) in matrices else own
        number = first_match([one.match for one in groups], names[id(parameter)])
        group = None if number is None else groups[number]
        decay = weight_decay if is_decayed else 0.0
        if group is not None and group.weight_decay is not None:
            decay = group.weight_decay
        # Sorted by this key, the groups have the same order for every layout.
        key = (len(groups) if number is None else number, _KINDS.index(used), not is_decayed)
        scale = 1.0 if group is None else group.lr_scale
        values = {"params": [], "weight_decay": decay, "kind": used, "lr_scale": scale}
        found.setdefault(key, values)["params"].append(parameter)
    return [found[key] for key in sorted(found)]


def muon_matrices(model: nn.Module) -> dict[int, Matrices]:
    """Return the matrices that Muon updates, by the ``id`` of their parameter.

    These are the weights of linear layers, and each expert's matrix in a parameter that stacks the experts of a layer.
    Embeddings, the output head, norms, biases, convolutions and the other parameters of recurrent layers are excluded.
    """
    model_of_head: Any = getattr(model, "get_output_embeddings", None)
    head = None if model_of_head is None else model_of_head()
    found = {}
    for module in model.modules():
        # Recurrent layers have coefficients of several dimensions, which are not weights of a linear map.
        is_linear = not isinstance(module, nn.Embedding | nn.modules.conv._ConvNd) and layout_of(module) is None
        if module is head or not is_linear:
            continue
        for last, parameter in module.named_parameters(recurse=False):
            shape = shape_of(parameter)
            if parameter.requires_grad and len(shape) in (2, 3) and min(shape) > 1 and not _is_exempt(module, last):
                # DBRX stacks its experts along the rows of a matrix.
                count = shape[0] if len(shape) == 3 else int(getattr(module, "moe_num_experts", 1))
                rows = math.prod(shape[:-1]) // count
                found[id(parameter)] = Matrices(count=count, rows=rows, columns=shape[-1])
    tied = [] if head is None else [id(parameter) for parameter in head.parameters()]
    return {key: matrices for key, matrices in found.items() if key not in tied}


def _is_exempt(module: nn.Module, last: str) -> bool:
    return is_norm(module) or last in _EXEMPT or "bias" in last


def is_norm(module: nn.Module) -> bool:
    """Return whether a module's class name identifies a norm. Inkling's normed embedding is excluded."""
    return "norm" in type(module).__name__.lower() and not isinstance(module, nn.Embedding)


def learning_rate(
    step: int,
    *,
    base_rate: float,
    warmup_steps: int,
    horizon_steps: int,
    min_ratio: float,
    kind: Literal["cosine", "linear", "constant", "wsd"] = "cosine",
    decay_steps: int | None = None,
) -> float:
    """Return a step's learning rate.

    The rate increases linearly to ``base_rate`` over ``warmup_steps``, decays to ``min_ratio * base_rate`` at
    ``horizon_steps``, and is constant afterwards. The rate depends only on the step, so no scheduler state is saved.

    Args:
        step: Step number, starting at 1.
        base_rate: Peak learning rate.
        warmup_steps: Number of warm-up steps, or 0 for no warm-up.
        horizon_steps: Step at which the decay ends; not necessarily the last step.
        min_ratio: Final rate divided by the peak rate.
        kind: ``cosine`` and ``linear`` decay from the end of the warm-up, ``wsd`` decays linearly over the last
            ``decay_steps`` steps, and ``constant`` does not decay.
        decay_steps: Number of decay steps for ``wsd``, or None for a tenth of the horizon.
    """
    if step <= warmup_steps:
        return base_rate * step / warmup_steps
    if kind == "constant":
        return base_rate
    first = warmup_steps
    if kind == "wsd":
        first = max(first, horizon_steps - (decay_steps or math.ceil(horizon_steps / 10)))
    progress = min(1.0, max(0.0, (step - first) / max(1, horizon_steps - first)))
    left = 0.5 * (1 + math.cos(math.pi * progress)) if kind == "cosine" else 1 - progress
    return base_rate * (min_ratio + (1 - min_ratio) * left)
