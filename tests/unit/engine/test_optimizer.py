from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ray_ulysses.engine.optimizer import learning_rate, parameter_groups
from tests.breadth import fast_only
from tests.unit.attention.models import ARCHITECTURES, HYBRIDS, plain_config
from tests.unit.attention.multimodal import MULTIMODAL, multimodal_model

NAMES = (*ARCHITECTURES, *HYBRIDS)
OWN: dict[str, dict[str, Any]] = {"cohere": {"use_qk_norm": True}}
# Parameters with several dims and no weight decay; the zoo's other models have none.
SHAPED_EXEMPT = {
    "cohere": {"q_norm.weight", "k_norm.weight"},
    "gpt_oss": {"experts.gate_up_proj_bias", "experts.down_proj_bias"},
    "jamba": {"mamba.A_log"},
    "jamba-mamba_last": {"mamba.A_log"},
    "kimi_linear": {"forget_gate.A_log"},
    "zamba": {"mamba.A_log", "mamba.D", "mamba.dt_proj_bias"},
}
# The same for decoders that are not in the zoo.
OTHER_EXEMPT = {
    "cpmant": {"position_bias.relative_attention_bias"},
    "deepseek_v4": {"compressor.position_bias"},
    "inkling2_text": {"q_l2_clip.scale", "rel_l2_clip.scale"},
    "mamba": {"mixer.A_log"},
    "recurrent_gemma": {"rg_lru.input_gate_bias", "rg_lru.recurrent_gate_bias"},
}
SCHEDULE: dict[str, Any] = {"base_rate": 1.0, "warmup_steps": 4, "horizon_steps": 12, "min_ratio": 0.1}


def decays(groups: list[dict[str, Any]]) -> dict[float, set[int]]:
    return {group["weight_decay"]: {id(parameter) for parameter in group["params"]} for group in groups}


def model_on_meta(name: str) -> Any:
    with torch.device("meta"):
        if name in MULTIMODAL:
            return multimodal_model(name)
        config = {**ARCHITECTURES, **HYBRIDS}[name]() if name in NAMES else plain_config(name, **OWN.get(name, {}))
        return AutoModelForCausalLM.from_config(config)


def shaped_exempt(model: nn.Module) -> set[str]:
    """Return the last name components of the parameters with several dims and no weight decay."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = decays(parameter_groups(model, 0.1))
    assert groups[0.1] | groups[0.0] == set(names)
    assert all(parameter.dim() > 1 for parameter in model.parameters() if id(parameter) in groups[0.1])
    shaped = [one for one in model.parameters() if one.dim() > 1 and id(one) in groups[0.0]]
    return {".".join(names[id(one)].rsplit(".", 2)[-2:]) for one in shaped}


@pytest.mark.parametrize("name", fast_only([*NAMES, *MULTIMODAL, *OWN], "llama", "gpt_oss", "zamba", "cohere"))
def test_all_but_norms_biases_and_state_space_coefficients_decays(name: str) -> None:
    assert shaped_exempt(model_on_meta(name)) == SHAPED_EXEMPT.get(name, set())


@pytest.mark.slow
def test_no_decoder_of_transformers_has_another_parameter_that_does_not_decay() -> None:
    found: dict[str, set[str]] = {}
    for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            found[name] = shaped_exempt(model_on_meta(name))
        except Exception:
            continue
    assert len(found) > 140
    known = set().union(*SHAPED_EXEMPT.values(), *OTHER_EXEMPT.values())
    assert {name: ends for name, ends in found.items() if not ends <= known} == {}


def test_each_trained_parameter_is_in_one_group_once_by_its_full_shape() -> None:
    model: Any = nn.ModuleDict({"embed": nn.Embedding(5, 2), "head": nn.Linear(2, 5), "frozen": nn.Linear(2, 2)})
    model["head"].weight = model["embed"].weight
    model["frozen"].requires_grad_(False)
    for parameter in model.parameters():
        # ZeRO-3 replaces a parameter by an empty tensor and stores its shape.
        parameter.ds_shape = parameter.shape
        parameter.data = torch.empty(0)
    groups = parameter_groups(model, 0.1)
    assert decays(groups) == {0.1: {id(model["embed"].weight)}, 0.0: {id(model["head"].bias)}}
    assert [len(group["params"]) for group in groups] == [1, 1]
    model["head"].bias.requires_grad_(False)
    assert len(parameter_groups(model, 0.1)) == 1


def test_the_rate_warms_up_linearly_and_falls_along_half_a_cosine() -> None:
    rates = [learning_rate(step, **SCHEDULE) for step in range(1, 15)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[7] == pytest.approx(0.55)
    assert rates[5] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4)))
    assert rates[11:] == [pytest.approx(0.1)] * 3
    assert rates[3:12] == sorted(rates[3:12], reverse=True)


def test_the_rate_of_a_step_depends_on_the_horizon_and_not_on_the_last_step() -> None:
    settings = {"base_rate", "warmup_steps", "horizon_steps", "min_ratio", "kind", "decay_steps"}
    assert inspect.signature(learning_rate).parameters.keys() == {"step", *settings}
    near, far = (
        [learning_rate(step, **SCHEDULE | {"horizon_steps": horizon}) for step in (4, 9, 40)] for horizon in (12, 24)
    )
    assert near[0] == far[0] == 1.0 and far[1] > near[1] and near[2] == far[2] == pytest.approx(0.1)
