"""What `plan` knows of a hybrid: its parameters are those of its modules, and impossible layouts are problems."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ray_ulysses.config import Config
from ray_ulysses.planner.fit import _layouts
from ray_ulysses.planner.flops import step_flops
from ray_ulysses.planner.notes import plan_notes
from ray_ulysses.planner.problems import heads_problems
from ray_ulysses.planner.settings import allowed_sp
from ray_ulysses.run.settings import model_shape
from tests.unit.attention.models import HYBRIDS, zoo_model
from tests.unit.planner.runs import make_config


def hybrid_config(architecture: str, **parallel: Any) -> Config:
    described = HYBRIDS[architecture]().to_diff_dict()
    sizes = {"hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size"}
    described |= {name: getattr(HYBRIDS[architecture](), name) for name in sizes}
    return make_config(described, parallel=parallel)


@pytest.mark.parametrize("architecture", HYBRIDS)
def test_parameters_are_those_of_the_modules(architecture: str) -> None:
    shape, model = model_shape(hybrid_config(architecture)), zoo_model(architecture)
    assert shape.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert shape.is_exact
    assert shape.mixer_layers == (4 if architecture == "zamba2" else 2 if architecture.startswith("falcon") else 1)


def test_only_layers_with_attention_have_its_flops() -> None:
    shape = model_shape(hybrid_config("qwen3_next"))
    # One of two layers, 4 heads of 8.
    assert shape.attention_width == 32
    assert step_flops(shape, tokens=0, sum_squared_lengths=1) == 6 * 32


def test_sizes_that_can_not_share_the_heads_are_problems() -> None:
    config = hybrid_config("qwen3_next", sp_size=3, allowed_sp=[1, 2, 3])
    assert [str(one) for one in heads_problems(config, model_shape(config))] == [
        "parallel.sp_size=3: can't share the heads of the 1 layers that carry state along the sequence equally; "
        "use 1, 2, 4",
        "parallel.allowed_sp=[1, 2, 3]: [3] can't share the heads of the 1 layers that carry state along the sequence "
        "equally; use 1, 2, 4",
    ]
    config = hybrid_config("qwen3_next", sp_size=4, ring_size=2)
    assert [str(one) for one in heads_problems(config, model_shape(config))] == [
        "parallel.ring_size=2: passes keys and values around a ring, and 1 layers of model_type 'qwen3_next' carry "
        "state along the sequence and need whole rows; use 1 or null"
    ]
    assert not list(heads_problems(hybrid_config("qwen3_next", sp_size=4), model_shape(hybrid_config("qwen3_next"))))


def test_rows_are_padded_for_sizes_that_a_hybrid_can_have() -> None:
    config = hybrid_config("bamba", sp_size=2)
    assert allowed_sp(config, model_shape(config)) == (1, 2, 4)


def test_no_ring_is_proposed() -> None:
    # Padded for rings as well, which a size beyond the heads takes elsewhere.
    config = hybrid_config("qwen3_next", sp_size=2, allowed_sp=[2, 4, 8])
    shape = model_shape(config)
    assert any("parallel.ring_size" in one.settings for one in _layouts(config, replace(shape, mixer_layers=0)))
    proposed = [one.settings for one in _layouts(config, shape)]
    assert {"parallel.sp_size": 4} in proposed
    assert all(one.get("parallel.ring_size", 1) == 1 for one in proposed)


def test_the_plan_says_what_is_not_modelled() -> None:
    config = hybrid_config("lfm2")
    assert plan_notes(config, model_shape(config), None)[-1] == (
        "1 of 2 layers carry state along the sequence: their parameters are counted, but their activations are "
        "estimated as those of attention, and their recurrence is not in FLOPs and times; measure the peak of memory "
        "with `ray-ulysses check`"
    )
