"""Adapters of PEFT around a decoder under Ulysses have the gradients of the eager model, or are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftConfig, PeftType, XLoraConfig, get_peft_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.tuners.lora.config import BdLoraConfig, KasaConfig, MontecloraConfig, VeloraConfig

from ray_ulysses import apply_ulysses, causal_lm_loss, shard_batch
from ray_ulysses.errors import UserError
from tests.breadth import fast_only
from tests.distributed.seam_case import gradient_error
from tests.unit.attention.meshes import ALONE
from tests.unit.attention.models import VOCAB, zoo_model

LENGTHS = (9, 1, 14)
TARGETS = ["q_proj", "v_proj", "down_proj"]
# The tokens that activate an Activated LoRA; two documents hold them.
ACTIVATES = [7, 9]
_ON_TARGETS: dict[str, Any] = {"target_modules": TARGETS, "task_type": "CAUSAL_LM"}
_PROMPT: dict[str, Any] = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 4}


def lora(**options: Any) -> LoraConfig:
    return LoraConfig(**{"r": 4, **_ON_TARGETS, **options})


def of_type(name: str) -> PeftConfig:
    """Return a small configuration of a method of PEFT."""
    own: dict[str, dict[str, Any]] = {
        "ADALORA": {"total_step": 100},
        "ADAMSS": {"r": 8},
        "ADAPTION_PROMPT": {"task_type": "CAUSAL_LM", "adapter_len": 4, "adapter_layers": 1},
        "BOFT": {"boft_block_size": 4},
        "C3A": {"block_size": 8},
        "CARTRIDGE": _PROMPT,
        "CPT": {
            "task_type": "CAUSAL_LM",
            "cpt_token_ids": [1, 2, 3, 4],
            "cpt_mask": [1, 1, 1, 1],
            "cpt_tokens_type_mask": [1, 2, 3, 4],
        },
        "FOURIERFT": {"n_frequency": 20},
        "GRALORA": {"r": 4, "gralora_k": 2},
        "IA3": {"feedforward_modules": ["down_proj"]},
        "LN_TUNING": {"task_type": "CAUSAL_LM"},
        "MISS": {"r": 4},
        "MULTITASK_PROMPT_TUNING": {**_PROMPT, "num_tasks": 2},
        "OFT": {"oft_block_size": 4},
        "PREFIX_TUNING": _PROMPT,
        "PROMPT_TUNING": _PROMPT,
        "PSOFT": {"r": 4},
        "P_TUNING": _PROMPT,
        "RANDLORA": {"r": 4, "randlora_alpha": 8},
        "ROAD": {"group_size": 4},
        "SHADOW": {"task_type": "CAUSAL_LM", "r": 4, "shadow_dropout": 0.0},
        "SHIRA": {"r": 1},
        "TRAINABLE_TOKENS": {"token_indices": [3, 4, 7], "task_type": "CAUSAL_LM"},
        "VBLORA": {"vector_length": 4, "num_vectors": 16, "r": 2},
        "WAVEFT": {"n_frequency": 20},
    }
    # Where a method is not about linear layers, its options are whole.
    options = own.get(name, {})
    return PEFT_TYPE_TO_CONFIG_MAPPING[name](**({} if "task_type" in options else _ON_TARGETS), **options)


METHODS: dict[str, Callable[[], PeftConfig]] = {
    "lora": lora,
    "lora-bias": lambda: lora(lora_bias=True),
    "lora-dora": lambda: lora(use_dora=True),
    "lora-rslora": lambda: lora(use_rslora=True),
    "lora-qalora": lambda: lora(use_qalora=True, qalora_group_size=4),
    "lora-pissa": lambda: lora(init_lora_weights="pissa"),
    "lora-kasa": lambda: lora(kasa_config=KasaConfig()),
    "lora-velora": lambda: lora(velora_config=VeloraConfig()),
    "lora-bdlora": lambda: lora(
        use_bdlora=BdLoraConfig(target_modules_bd_a=TARGETS[:2], target_modules_bd_b=TARGETS[2:], nblocks=2)
    ),
    "lora-embedding": lambda: lora(target_modules=["embed_tokens", "q_proj"]),
    "lora-head": lambda: lora(target_modules=["lm_head", "q_proj"]),
    "lora-parameters": lambda: lora(target_modules=["v_proj"], target_parameters=["q_proj.weight"]),
    "lora-tokens": lambda: lora(trainable_token_indices=[3, 4]),
    "lora-whole-head": lambda: lora(modules_to_save=["lm_head"]),
    "lora-activated": lambda: lora(alora_invocation_tokens=ACTIVATES),
    "lora-montecarlo": lambda: lora(monteclora_config=MontecloraConfig()),
}
# X-LoRA has a test of its own.
METHODS |= {
    kind.value: (lambda name=kind.value: of_type(name))
    for kind in PEFT_TYPE_TO_CONFIG_MAPPING
    if kind not in (PeftType.LORA, PeftType.XLORA)
}
MIX_TOKENS = {
    # An offset from the row's last invocation tokens on; the mean of a router over all tokens.
    "lora-activated", "LILY",
    # Noise.
    "lora-montecarlo", "PVERA",
    # More tokens than the row has.
    "ADAPTION_PROMPT", "CARTRIDGE", "CPT", "MULTITASK_PROMPT_TUNING", "PREFIX_TUNING", "PROMPT_TUNING", "P_TUNING",
    # A task per row; a second decoder beside the first.
    "POLY", "SHADOW",
}  # fmt: skip
# Exact, but their products with noise in the place of weights are not like a linear layer's.
NOT_PROBED = {"C3A", "FOURIERFT", "VBLORA", "WAVEFT"}


def adapted(model: Any, config: PeftConfig) -> Any:
    """Return the model with adapters, all of whose weights are moved away from zero, so that all get a gradient."""
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


def our_gradients(model: Any, tile: Any = "auto") -> dict[str, torch.Tensor]:
    loss_sum, _ = causal_lm_loss(model, shard_batch(tokens(), None, LENGTHS, ALONE), tile=tile)
    loss_sum.backward()
    return gradients_of(model)


def gradients_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("method", fast_only(METHODS, "lora", "lora-dora", "lora-activated", "PROMPT_TUNING"))
def test_each_method_of_peft_has_the_gradients_of_the_eager_model_or_is_refused(method: str) -> None:
    """The list holds every method of the installed PEFT."""
    if method in MIX_TOKENS | NOT_PROBED:
        with pytest.raises(UserError):
            apply_ulysses(adapted(zoo_model("llama"), METHODS[method]()), ALONE)
        return
    check_gradients(apply_ulysses(adapted(zoo_model("llama"), METHODS[method]()), ALONE), method)


def check_gradients(model: Any, method: str) -> None:
    single = eager_gradients(METHODS[method](), torch.float32)
    # A part of AdaMSS stays in fp32.
    double = (
        {name: one.double() for name, one in single.items()}
        if method == "ADAMSS"
        else eager_gradients(METHODS[method](), torch.float64)
    )
    error, worst = gradient_error(our_gradients(model), single, double)
    assert error <= 1.0, f"the gradient of {worst} is off by {error:.2f} x the bound"


@pytest.mark.parametrize("method", ["lora", "lora-activated", "LILY"])
def test_an_adapter_that_is_added_after_apply_ulysses_is_not_trained_before_it_was_inspected(method: str) -> None:
    decoder = apply_ulysses(zoo_model("llama"), ALONE)
    model = adapted(decoder, METHODS[method]())
    with pytest.raises(UserError, match="has the adapter default"):
        our_gradients(model)
    if method in MIX_TOKENS:
        with pytest.raises(UserError):
            apply_ulysses(model.get_base_model(), ALONE)
        return
    apply_ulysses(model.get_base_model(), ALONE)
    check_gradients(model, method)


def test_an_adapter_that_is_activated_after_apply_ulysses_is_refused() -> None:
    model = adapted(zoo_model("llama"), lora())
    model.add_adapter("second", lora(lora_dropout=0.1))
    with pytest.raises(UserError, match="dropout"):
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


def test_the_dropout_of_an_adapter_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"^llama has a dropout of 0\.1 at .*lora_dropout.*; build it with dropout 0\.0"
    ):
        apply_ulysses(adapted(zoo_model("llama"), lora(lora_dropout=0.1)), ALONE)


@pytest.mark.parametrize("target", ["x_proj", "dt_proj"])
def test_an_adapter_of_a_layer_whose_weight_is_read_would_be_passed_over_and_is_refused(target: str) -> None:
    model = get_peft_model(zoo_model("jamba"), LoraConfig(r=2, target_modules=[target]))
    with pytest.raises(UserError, match=rf"^jamba has a peft\..*\.Linear at .*\.mamba\.{target}: the layer around it"):
        apply_ulysses(model, ALONE)
