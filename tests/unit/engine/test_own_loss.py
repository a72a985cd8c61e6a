"""A loss that a model's own forward adds to the cross-entropy is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from ray_ulysses import apply_ulysses, causal_lm_loss, shard_batch
from ray_ulysses.engine.loss import _losses, refuse_own_loss
from ray_ulysses.engine.model import refuse_architecture
from ray_ulysses.errors import UserError
from tests.breadth import fast_only
from tests.unit.attention.meshes import ALONE
from tests.unit.attention.models import ARCHITECTURES, HYBRIDS, plain_config, zoo_model

ZOO = {**ARCHITECTURES, **HYBRIDS}


def meta_model(config: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("coefficient", [0.5, 1e-5])
def test_a_z_loss_of_the_model_is_refused_before_weights_and_in_every_step(coefficient: float) -> None:
    refused = pytest.raises(UserError, match=rf"z_loss_coefficient={coefficient}\).* optimizer\.z_loss$")
    with refused:
        refuse_architecture(HYBRIDS["bamba"](z_loss_coefficient=coefficient))
    model = apply_ulysses(zoo_model("bamba", z_loss_coefficient=coefficient), ALONE)
    for _ in range(2):
        with refused:
            causal_lm_loss(model, shard_batch(torch.zeros(1, 4).long(), None, None, ALONE))


ROUTER_LOSS = {"output_router_logits": True, "router_aux_loss_coef": 0.3}


@pytest.mark.parametrize("architecture", [*fast_only(ZOO, "llama", "gpt_oss", "jamba"), "mixtral with router loss"])
def test_a_model_whose_loss_is_the_cross_entropy_is_not_refused(architecture: str) -> None:
    name, _, has_router_loss = architecture.partition(" with ")
    model = meta_model(ZOO[name](**ROUTER_LOSS if has_router_loss else {}))
    assert _losses(model) is not None, "the model was not checked"
    refuse_own_loss(model)


def test_a_loss_without_a_setting_is_found_in_the_forwards_result() -> None:
    class WithPenalty(LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            if output.loss is not None:
                output.loss = output.loss + 0.01 * output.logits.pow(2).mean()
            return output

    with torch.device("meta"):
        model = WithPenalty(plain_config("llama"))
    with pytest.raises(UserError, match=r"^the forward of WithPenalty adds its own loss .* \(no setting for this loss"):
        refuse_own_loss(model)
