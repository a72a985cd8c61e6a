"""PEFT adapters under Ulysses have the eager model's gradients, or are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftConfig, PeftType, get_peft_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.tuners.lora.config import MontecloraConfig, VeloraConfig

from ray_ulysses import apply_ulysses, causal_lm_loss, shard_batch
from ray_ulysses.errors import UserError
from tests.breadth import fast_only
from tests.distributed.seam_case import gradient_error
from tests.unit.attention.meshes import ALONE
from tests.unit.attention.models import VOCAB, zoo_model

LENGTHS = (9, 1, 14)
TARGETS = ["q_proj", "v_proj", "down_proj"]
# Tokens that activate an Activated LoRA; two documents contain them.
ACTIVATES = [7, 9]
_ON_TARGETS: dict[str, Any] = {"target_modules": TARGETS, "task_type": "CAUSAL_LM"}
_PROMPT: dict[str, Any] = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 4}


def lora(**options: Any) -> LoraConfig:
    return LoraConfig(**{"r": 4, **_ON_TARGETS, **options})


def of_type(kind: PeftType, **options: Any) -> Callable[[], PeftConfig]:
    return lambda: PEFT_TYPE_TO_CONFIG_MAPPING[kind](**({} if "task_type" in options else _ON_TARGETS), **options)


METHODS: dict[str, Callable[[], PeftConfig]] = {
    "lora": lora,
    "lora-bias": lambda: lora(lora_bias=True),
    "lora-dora": lambda: lora(use_dora=True),
    "lora-velora": lambda: lora(velora_config=VeloraConfig()),
    "lora-embedding": lambda: lora(target_modules=["embed_tokens", "q_proj"]),
    "lora-head": lambda: lora(target_modules=["lm_head", "q_proj"]),
    "lora-parameters": lambda: lora(target_modules=["v_proj"], target_parameters=["q_proj.weight"]),
    "lora-tokens": lambda: lora(trainable_token_indices=[3, 4]),
    "lora-whole-head": lambda: lora(modules_to_save=["lm_head"]),
    "lora-activated": lambda: lora(alora_invocation_tokens=ACTIVATES),
    "lora-montecarlo": lambda: lora(monteclora_config=MontecloraConfig()),
    "BOFT": of_type(PeftType.BOFT, boft_block_size=4),
    "IA3": of_type(PeftType.IA3, feedforward_modules=["down_proj"]),
    "LN_TUNING": of_type(PeftType.LN_TUNING, task_type="CAUSAL_LM"),
    "VERA": of_type(PeftType.VERA),
    "LILY": of_type(PeftType.LILY),
    "POLY": of_type(PeftType.POLY),
    "PREFIX_TUNING": of_type(PeftType.PREFIX_TUNING, **_PROMPT),
    "PROMPT_TUNING": of_type(PeftType.PROMPT_TUNING, **_PROMPT),
    "FOURIERFT": of_type(PeftType.FOURIERFT, n_frequency=20),
}
REFUSED = {
    # They depend on the row: on its last invocation tokens, on a mean over all tokens, on a task per row.
    "lora-activated", "LILY", "POLY",
    # Noise.
    "lora-montecarlo",
    # They add tokens to the row.
    "PREFIX_TUNING", "PROMPT_TUNING",
    # Exact, but the probe does not recognize its products with noise as those of a linear layer.
    "FOURIERFT",
}  # fmt: skip


def adapted(model: Any, config: PeftConfig) -> Any:
    """Return the model with adapters whose weights are all nonzero, so that all weights have gradients."""
    torch.manual_seed(3)
    model = get_peft_model(model, config).train()
    generator = torch.Generator().manual_seed(13)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def tokens() -> torch.Tensor:
    ids = torch.randint(0, VOCAB, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(5))
    for start in (4, 15):
        ids[0, start : start + 2] = torch.tensor(ACTIVATES)
    return ids


def eager_gradients(config: PeftConfig, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the adapters' gradients of the sum of losses, each document alone."""
    model = adapted(zoo_model("llama"), config).to(dtype)
    for ids in tokens().split(LENGTHS, dim=1):
        logits = model(input_ids=ids, use_cache=False).logits
        torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum").backward()
    return gradients_of(model)


def our_gradients(model: Any) -> dict[str, torch.Tensor]:
    loss_sum, _ = causal_lm_loss(model, shard_batch(tokens(), None, LENGTHS, ALONE))
    loss_sum.backward()
    return gradients_of(model)


def gradients_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("method", fast_only(METHODS, "lora", "lora-dora", "PROMPT_TUNING"))
def test_each_method_of_peft_has_the_gradients_of_the_eager_model_or_is_refused(method: str) -> None:
    if method in REFUSED:
        with pytest.raises(UserError):
            apply_ulysses(adapted(zoo_model("llama"), METHODS[method]()), ALONE)
        return
    check_gradients(apply_ulysses(adapted(zoo_model("llama"), METHODS[method]()), ALONE), method)


def check_gradients(model: Any, method: str) -> None:
    single = eager_gradients(METHODS[method](), torch.float32)
    double = eager_gradients(METHODS[method](), torch.float64)
    error, worst = gradient_error(our_gradients(model), single, double)
    assert error <= 1.0, f"the gradient of {worst} is off by {error:.2f} x the bound"


@pytest.mark.parametrize("method", ["lora", "lora-activated", "LILY"])
def test_an_adapter_that_is_added_after_apply_ulysses_is_not_trained_before_it_was_inspected(method: str) -> None:
    decoder = apply_ulysses(zoo_model("llama"), ALONE)
    model = adapted(decoder, METHODS[method]())
    with pytest.raises(UserError, match="has the adapter default"):
        our_gradients(model)
    if method in REFUSED:
        with pytest.raises(UserError):
            apply_ulysses(model.get_base_model(), ALONE)
        return
    apply_ulysses(model.get_base_model(), ALONE)
    check_gradients(model, method)


def test_an_adapter_that_is_activated_after_apply_ulysses_is_refused() -> None:
    model = adapted(zoo_model("llama"), lora())
    model.add_adapter("second", lora(lora_dropout=0.1))
    with pytest.raises(UserError, match=r"^llama has dropout 0\.1 at .*lora_dropout"):
        apply_ulysses(model, ALONE)
    model = apply_ulysses(adapted(zoo_model("llama"), lora()), ALONE)
    our_gradients(model)
    model.add_adapter("second", lora(lora_dropout=0.1))
    model.set_adapter("second")
    with pytest.raises(UserError, match="has the adapter second"):
        our_gradients(model)


def test_adapters_that_were_each_inspected_may_be_switched_between() -> None:
    model = adapted(zoo_model("llama"), lora())
    model.add_adapter("second", lora())
    for name in ("default", "second"):
        model.set_adapter(name)
        apply_ulysses(model, ALONE)
    for name in ("default", "second"):
        model.set_adapter(name)
        assert all(f".{name}." in weight for weight in our_gradients(model))
        model.zero_grad()


@pytest.mark.parametrize("target", ["x_proj", "dt_proj"])
def test_an_adapter_of_a_layer_whose_weight_is_read_would_be_passed_over_and_is_refused(target: str) -> None:
    model = get_peft_model(zoo_model("jamba"), LoraConfig(r=2, target_modules=[target]))
    with pytest.raises(UserError, match=rf"^jamba has a peft\..*\.Linear at .*\.mamba\.{target}: the enclosing layer"):
        apply_ulysses(model, ALONE)
