"""Which parameters decay, and the learning rate of a step: pure functions of the model and the step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return AdamW's groups: matrices decay, norms and biases (fewer than two dimensions) do not.

    Shapes are read from ``ds_shape`` where ZeRO-3 has already partitioned a parameter. A group without a parameter is
    left out.
    """
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            shape = getattr(parameter, "ds_shape", parameter.shape)
            (decayed if len(shape) > 1 else plain).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def learning_rate(step: int, *, base_rate: float, warmup_steps: int, horizon_steps: int, min_ratio: float) -> float:
    """Return the learning rate that a step is taken with.

    Linear warm-up to ``base_rate`` over ``warmup_steps``, then half a cosine down to ``min_ratio * base_rate`` at
    ``horizon_steps``, and flat after it. A function of the step alone, so that nothing of it is saved.

    Args:
        step: The step about to be taken, from 1.
        base_rate: Peak rate.
        warmup_steps: Steps of warm-up; 0 for none.
        horizon_steps: Step at which the cosine ends; where a run stops is another setting.
        min_ratio: Final rate over peak rate.
    """
    if step <= warmup_steps:
        return base_rate * step / warmup_steps
    span = max(1, horizon_steps - warmup_steps)
    progress = min(1.0, (step - warmup_steps) / span)
    return base_rate * (min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * progress)))
