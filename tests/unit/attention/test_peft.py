"""Adapters of PEFT around a decoder under Ulysses: their gradients are those of the eager model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from ray_ulysses import SequenceMesh, apply_ulysses, causal_lm_loss, shard_batch
from ray_ulysses.errors import UserError
from tests.distributed.seam_case import gradient_error
from tests.unit.attention.meshes import ALONE
from tests.unit.attention.models import VOCAB, zoo_model

LENGTHS = (9, 1, 14)


def with_adapters(model: Any, dropout: float = 0.0) -> Any:
    """Return the model with LoRA in attention and MLP, both of its matrices drawn, so that both get a gradient."""
    torch.manual_seed(3)
    targets = ["q_proj", "v_proj", "down_proj"]
    settings = LoraConfig(
        r=4, lora_dropout=dropout, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM"
    )
    return get_peft_model(model, settings)


def eager_gradients(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the adapters' gradients of the sum of losses, each document alone."""
    model = with_adapters(zoo_model("llama")).to(dtype)
    start = 0
    for length in LENGTHS:
        ids = tokens()[:, start : start + length]
        logits = model(input_ids=ids, use_cache=False).logits
        torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum").backward()
        start += length
    return gradients_of(model)


def tokens() -> torch.Tensor:
    return torch.randint(0, VOCAB, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(5))


def gradients_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("order", ["adapters-first", "ulysses-first"])
def test_the_gradients_of_adapters_are_those_of_the_eager_model(order: str) -> None:
    mesh = SequenceMesh.from_group(None)
    if order == "adapters-first":
        model = apply_ulysses(with_adapters(zoo_model("llama")), mesh)
    else:
        model = with_adapters(apply_ulysses(zoo_model("llama"), mesh))
    loss_sum, _ = causal_lm_loss(model, shard_batch(tokens(), None, LENGTHS, mesh))
    loss_sum.backward()
    gradients = gradients_of(model)
    assert len(gradients) == 2 * 3 * 2
    assert all("lora_" in name for name in gradients)
    error, worst = gradient_error(gradients, eager_gradients(torch.float32), eager_gradients(torch.float64))
    assert error <= 1.0, f"the gradient of {worst} is off by {error:.2f} x the bound"


def test_the_dropout_of_an_adapter_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"^llama has a dropout of 0\.1 at .*lora_dropout.*; build it with dropout 0\.0"
    ):
        apply_ulysses(with_adapters(zoo_model("llama"), dropout=0.1), ALONE)


@pytest.mark.parametrize("target", ["x_proj", "dt_proj"])
def test_an_adapter_of_a_layer_whose_weight_is_read_would_be_passed_over_and_is_refused(target: str) -> None:
    model = get_peft_model(zoo_model("jamba"), LoraConfig(r=2, target_modules=[target]))
    with pytest.raises(UserError, match=rf"^jamba has a peft\..*\.Linear at .*\.mamba\.{target}: the layer around it"):
        apply_ulysses(model, ALONE)
