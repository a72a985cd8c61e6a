"""Quantized frozen weights under adapters: their values, where they are, and how long dequantized weights live."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from ray_ulysses.config.loading import parse_config
from ray_ulysses.engine.base_fingerprint import model_fingerprint
from ray_ulysses.engine.model import build_model, find_trained_part
from ray_ulysses.engine.quantized_base import (
    QuantizedLinear,
    dequantize,
    dequantize_layers,
    held_weights,
    quantize,
    quantized_modules,
    torchao,
)
from ray_ulysses.errors import UserError
from tests.unit.attention.models import ARCHITECTURES
from tests.unit.config.trees import small_tree
from tests.unit.export.runs import fields_of

KINDS: tuple[Any, ...] = ("nf4", "int8", "fp8")


def built(architecture: str = "", *, base_dtype: str = "nf4", checkpointed: bool = False, **adapter: Any) -> Any:
    tree = small_tree(model__adapter=adapter, memory__gradient_checkpointing=checkpointed)
    tree["model"]["base_dtype"] = base_dtype
    if architecture:
        tree["model"]["config"] = fields_of(ARCHITECTURES[architecture]())
    return build_model(parse_config(tree))


@pytest.fixture
def weight() -> torch.Tensor:
    return torch.randn(96, 192, generator=torch.Generator().manual_seed(3)) * 0.02


def test_the_values_are_those_of_torchaos_own_tensors(weight: torch.Tensor) -> None:
    ao = torchao()
    packed, _ = quantize(weight, "nf4")
    assert torch.equal(packed.view(torch.uint8), ao.to_nf4(weight, 64, 9).quantized_data)
    for kind, wanted in (
        ("int8", ao.Int8Tensor.from_hp(weight, ao.PerRow())),
        ("fp8", ao.Float8Tensor.from_hp(weight)),
    ):
        assert torch.equal(dequantize(*quantize(weight, kind), (96, 192), kind), wanted.dequantize())


@pytest.mark.parametrize(("kind", "error"), [("nf4", 0.1), ("int8", 0.01), ("fp8", 0.03)])
def test_a_weight_in_bf16_keeps_its_rows_of_zeros_and_most_of_its_bits(
    kind: Any, error: float, weight: torch.Tensor
) -> None:
    weight = weight.bfloat16()
    weight[5] = 0
    packed, scales = quantize(weight, kind)
    assert packed.dtype == scales.dtype == torch.bfloat16
    assert packed.numel() == weight.numel() // (4 if kind == "nf4" else 2)
    found = dequantize(packed, scales, (96, 192), kind)
    assert not found[5].any()
    assert 0 < (found - weight).float().norm() / weight.float().norm() < error


def test_all_linear_layers_but_the_head_and_those_trained_in_full_are_quantized() -> None:
    model = built(modules_to_save=["up_proj"])
    names = [name.split(".")[-2] for name, one in model.named_modules() if isinstance(one, QuantizedLinear)]
    assert sorted(names) == sorted(2 * ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj"])
    frozen = {name.rpartition(".")[2] for name, one in model.named_parameters() if not one.requires_grad}
    assert frozen == {"weight", "weight_packed", "weight_scales"}


@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_stacked_experts_are_quantized_and_routers_are_not(architecture: str) -> None:
    model = built(architecture, targets=["q_proj", "v_proj"])
    large = [
        name for name, one in model.named_parameters()
        if one.dim() > 1 and not one.requires_grad and "embed_tokens" not in name and "lm_head" not in name
    ]  # fmt: skip
    assert all("gate" in name or "router" in name or "bias" in name for name in large) and large
    assert {"gate_up_proj", "down_proj"} <= {name for one in quantized_modules(model) for name in one.quantized}


@pytest.mark.parametrize("architecture", ["", "mixtral"])
def test_logits_and_gradients_are_those_of_the_dequantized_weights_and_none_of_these_is_kept(architecture: str) -> None:
    model = built(architecture, targets=["q_proj", "v_proj"])
    ids = torch.arange(40)[None]
    saved: list[int] = []

    def gradients(of: Any) -> dict[str, torch.Tensor]:
        of.zero_grad()
        of(input_ids=ids).logits.square().sum().backward()
        return {name: one.grad.clone() for name, one in of.named_parameters() if one.grad is not None}

    weights = {one.dequantized(name).shape for one in quantized_modules(model) for name in one.quantized}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.numel())
        assert tensor.requires_grad or not {tensor.shape, tensor.mT.shape if tensor.dim() > 1 else None} & weights
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(input_ids=ids).logits.square().sum()
    assert saved
    del loss
    ours = gradients(model)
    dequantize_layers(model)
    assert not any(True for _ in quantized_modules(model))
    wanted = gradients(model)
    assert ours.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-5, atol=1e-6 * float(gradient.abs().max()))


def test_weights_held_for_several_tiles_are_dequantized_once_and_freed() -> None:
    model = built()
    mlp = model.base_model.model.model.layers[0].mlp
    down = mlp.down_proj.base_layer
    with held_weights(mlp):
        assert down.dequantized("weight") is down.dequantized("weight")
    assert down.held is None and down.dequantized("weight") is not down.dequantized("weight")


def test_the_fingerprint_depends_on_every_frozen_tensor_to_the_last_bit_and_on_no_trained_one() -> None:
    model = built()
    wanted = model_fingerprint(model)
    frozen = {name: one.data.flatten() for name, one in model.named_parameters() if not one.requires_grad}
    assert {name.rpartition("_")[2] for name in frozen} >= {"packed", "scales"}
    found = {wanted}
    for values in frozen.values():
        octets = values.view(torch.uint8)
        for at in (0, -1):
            octets[at] ^= 1
            found.add(model_fingerprint(model))
            octets[at] ^= 1
        values[:2] = values[:2].flip(0)
        found.add(model_fingerprint(model))
        values[:2] = values[:2].flip(0)
    equal = sum(int(torch.equal(values[0], values[1])) for values in frozen.values())
    assert len(found) == 1 + 3 * len(frozen) - equal
    for one in model.parameters():
        if one.requires_grad:
            one.data += 1
    assert model_fingerprint(model) == wanted


def test_experts_with_an_adapter_are_refused_before_a_worker_starts() -> None:
    tree = small_tree(model__adapter={"targets": ["experts.down_proj"]}, model__base_dtype="nf4")
    tree["model"]["config"] = fields_of(ARCHITECTURES["mixtral"]())
    with pytest.raises(UserError, match=r"model\.adapter\.targets=.*experts\.down_proj: .*base_dtype"):
        find_trained_part(parse_config(tree))


def test_a_missing_torchao_is_refused_with_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    torchao.cache_clear()
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(UserError, match=r"pip install 'ray-ulysses\[quantized\]'"):
        built()
