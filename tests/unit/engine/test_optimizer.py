from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from torch import nn

from ray_ulysses.engine.optimizer import learning_rate, parameter_groups

SCHEDULE: dict[str, Any] = {"base_rate": 1.0, "warmup_steps": 4, "horizon_steps": 12, "min_ratio": 0.1}


def decays(groups: list[dict[str, Any]]) -> dict[float, set[int]]:
    return {group["weight_decay"]: {id(parameter) for parameter in group["params"]} for group in groups}


def test_matrices_decay_and_norms_and_biases_do_not() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2), nn.Embedding(5, 2))
    groups = decays(parameter_groups(model, 0.1))
    assert groups[0.1] == {id(model[0].weight), id(model[2].weight)}
    assert groups[0.0] == {id(model[0].bias), id(model[1].weight), id(model[1].bias)}


def test_a_partitioned_parameter_is_judged_by_its_whole_shape() -> None:
    """ZeRO-3 leaves an empty flat tensor and keeps the shape in ``ds_shape``."""
    model = nn.Linear(3, 2)
    for parameter in model.parameters():
        parameter.ds_shape = parameter.shape  # type: ignore[attr-defined]
        parameter.data = torch.empty(0)
    groups = decays(parameter_groups(model, 0.1))
    assert groups == {0.1: {id(model.weight)}, 0.0: {id(model.bias)}}


def test_frozen_parameters_are_left_out_and_so_is_an_empty_group() -> None:
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    assert decays(parameter_groups(model, 0.1)) == {0.1: {id(model.weight)}}


def test_a_tied_parameter_is_in_one_group_once() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(5, 2), "head": nn.Linear(2, 5, bias=False)})
    model["head"].weight = model["embed"].weight
    (group,) = parameter_groups(model, 0.1)
    assert len(group["params"]) == 1


def test_the_rate_warms_up_linearly_and_falls_along_half_a_cosine() -> None:
    rates = [learning_rate(step, **SCHEDULE) for step in range(1, 15)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[7] == pytest.approx(0.55)
    assert rates[5] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4)))
    assert rates[11:] == [pytest.approx(0.1)] * 3
    assert rates[3:12] == sorted(rates[3:12], reverse=True)


def test_without_warm_up_the_first_step_is_on_the_cosine() -> None:
    assert learning_rate(1, **SCHEDULE | {"warmup_steps": 0}) == pytest.approx(
        0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 12))
    )


@pytest.mark.parametrize("step", [1, 4, 5, 9, 12, 40])
def test_the_rate_of_a_step_knows_the_horizon_and_not_where_the_run_stops(step: int) -> None:
    """A run that stops at 6 and one that goes on to 12 take the same steps until 6."""
    settings = {"base_rate", "warmup_steps", "horizon_steps", "min_ratio", "kind", "decay_steps"}
    assert inspect.signature(learning_rate).parameters.keys() == {"step", *settings}
    near, far = (learning_rate(step, **SCHEDULE | {"horizon_steps": horizon}) for horizon in (12, 24))
    if step <= 4:
        assert near == far == step / 4
    elif step <= 12:
        assert far > near
    else:
        assert near == far == pytest.approx(0.1)


def test_a_horizon_inside_the_warm_up_ends_at_the_lowest_rate() -> None:
    assert learning_rate(5, **SCHEDULE | {"horizon_steps": 4}) == pytest.approx(0.1)
