"""AdamW's parameter groups and the learning-rate schedule."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return AdamW's groups: weight decay on matrices, and none on norms and biases (fewer than two dims).

    If ZeRO-3 has partitioned a parameter, its shape is read from ``ds_shape``. Empty groups are omitted.
    """
    parameters: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameters[len(getattr(parameter, "ds_shape", parameter.shape)) > 1].append(parameter)
    return [
        {"params": group, "weight_decay": weight_decay if decays else 0.0}
        for decays, group in parameters.items()
        if group
    ]


def learning_rate(step: int, *, base_rate: float, warmup_steps: int, horizon_steps: int, min_ratio: float) -> float:
    """Return the learning rate of a step.

    Linear warm-up to ``base_rate`` over ``warmup_steps``, then half a cosine down to ``min_ratio * base_rate`` at
    ``horizon_steps``, constant afterwards. It depends on the step alone, so no state is saved.

    Args:
        step: The step, from 1.
        base_rate: Peak rate.
        warmup_steps: Steps of warm-up; 0 for none.
        horizon_steps: Step at which the cosine ends, which need not be the last one.
        min_ratio: Final rate over peak rate.
    """
    if step <= warmup_steps:
        return base_rate * step / warmup_steps
    span = max(1, horizon_steps - warmup_steps)
    progress = min(1.0, (step - warmup_steps) / span)
    return base_rate * (min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * progress)))
