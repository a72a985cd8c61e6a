"""AdamW's parameter groups and the learning-rate schedule."""

from __future__ import annotations

import math
from typing import Any, Literal

from torch import nn

from ray_ulysses.engine.partition_view import shape_of

# The matrix and the skip of a state space, and the scale of a clip that replaces a norm.
_EXEMPT = frozenset({"A_log", "D", "scale"})


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return AdamW's groups: weight decay only on the weights of projections and embeddings.

    Vectors are exempt. So are norms, biases and state-space coefficients of any shape: Cohere has a norm per head,
    gpt-oss a bias per expert. If ZeRO-3 has partitioned a parameter, its shape is read from ``ds_shape``. Empty groups
    are omitted.
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
    """Return whether a module is a norm by its class name; Inkling's normed embedding is not."""
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
    """Return the learning rate of a step.

    Linear warm-up to ``base_rate`` over ``warmup_steps``, then a decay to ``min_ratio * base_rate`` at
    ``horizon_steps``, constant afterwards. It depends on the step alone, so no state is saved.

    Args:
        step: The step, from 1.
        base_rate: Peak rate.
        warmup_steps: Steps of warm-up; 0 for none.
        horizon_steps: Step at which the decay ends, which need not be the last one.
        min_ratio: Final rate over peak rate.
        kind: ``cosine`` and ``linear`` decay from the end of the warm-up on, ``wsd`` linearly in the last
            ``decay_steps``, ``constant`` not at all.
        decay_steps: Length of the decay of ``wsd``; ``None`` for a tenth of the horizon.
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
