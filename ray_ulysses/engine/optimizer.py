"""AdamW parameter groups and the learning-rate schedule."""

from __future__ import annotations

import math
from typing import Any, Literal

from torch import nn

from ray_ulysses.engine.partition_view import shape_of

# State-space matrix A and skip coefficients D, and the scale of clipping layers that replace norms.
_EXEMPT = frozenset({"A_log", "D", "scale"})


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return AdamW's parameter groups; only weights of projections and embeddings get weight decay.

    Vectors are exempt, as are norms, biases and state-space coefficients of any shape: Cohere, for example, has a norm
    per head, and gpt-oss a bias per expert. The shape of a parameter partitioned by ZeRO-3 is read from ``ds_shape``.
    Empty groups are omitted.
    """
    modules = dict(model.named_modules())
    parameters: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            module, _, own = name.rpartition(".")
            is_exempt = is_norm(modules[module]) or own in _EXEMPT or "bias" in own
            parameters[len(shape_of(parameter)) > 1 and not is_exempt].append(parameter)
    return [
        {"params": group, "weight_decay": weight_decay if decays else 0.0}
        for decays, group in parameters.items()
        if group
    ]


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
