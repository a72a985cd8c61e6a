"""Norms in PyTorch's kernel: which ones, exact in fp32, closer to fp64 than Transformers' norms in bf16."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from ray_ulysses import apply_ulysses
from ray_ulysses.config.loading import parse_config
from ray_ulysses.engine.fused_norms import fuse_norms
from ray_ulysses.engine.model import build_model
from ray_ulysses.engine.prepare import prepare_model
from ray_ulysses.engine.tiled_mlp import find_norms, tile_mlps
from tests.breadth import fast_only
from tests.unit.attention.meshes import ALONE
from tests.unit.attention.models import ARCHITECTURES, HYBRIDS, zoo_model
from tests.unit.config.trees import small_tree
from tests.unit.engine.steps import TILE, Values, checkpointed, step, worst_tensor
from tests.unit.engine.test_tiled_mlp import Layer
from tests.unit.planner.runs import make_shape

WIDTH = 16


def trained(architecture: str, *, is_fused: bool, dtype: torch.dtype = torch.float32) -> Values:
    model: Any = checkpointed(apply_ulysses(zoo_model(architecture, dtype), ALONE).train())
    fused = fuse_norms(model) if is_fused else []
    tile_mlps(model, TILE)
    assert not any(hasattr(norm, "_tile_tokens") for norm in fused), "the kernel takes a whole row"
    return step(model)


@pytest.mark.parametrize("architecture", fast_only([*ARCHITECTURES, *HYBRIDS], "qwen3", "gemma4_text", "zamba2"))
def test_fused_norms_change_no_loss_and_no_gradient(architecture: str) -> None:
    truth = trained(architecture, is_fused=True, dtype=torch.float64)
    own = worst_tensor(trained(architecture, is_fused=False), truth)
    assert worst_tensor(trained(architecture, is_fused=True), truth) <= max(1e-5, 2 * own) and own <= 1e-4


@pytest.mark.parametrize(
    ("architecture", "others"),
    [
        ("llama", set()),
        ("qwen3", set()),
        ("gpt_oss", set()),
        # These multiply by 1 + weight, subtract the mean, or have no weight.
        ("gemma2", {"Gemma2RMSNorm"}),
        ("cohere2", {"Cohere2LayerNorm"}),
        ("llama4_text", {"Llama4TextL2Norm"}),
    ],
)
def test_norms_that_compute_something_else_are_left_alone(architecture: str, others: set[str]) -> None:
    model = zoo_model(architecture)
    fused = fuse_norms(model)
    assert {type(norm).__name__ for norm in find_norms(model) if norm not in fused} == others
    assert bool(fused) == (architecture not in ("gemma2", "cohere2"))


def layer_of(dtype: torch.dtype = torch.float32, eps: float = 1e-6) -> Any:
    layer = Layer(32)
    layer.norm = LlamaRMSNorm(WIDTH, eps=eps)
    torch.nn.init.normal_(layer.norm.weight, generator=torch.Generator().manual_seed(1))
    return layer.to(dtype)


def test_a_fused_norm_in_bf16_is_closer_to_fp64_than_transformers() -> None:
    random = torch.Generator().manual_seed(0)
    given, upstream = (torch.randn(512, WIDTH, generator=random).bfloat16() for _ in range(2))
    found = {}
    for name, dtype in (("truth", torch.float64), ("own", torch.bfloat16), ("fused", torch.bfloat16)):
        layer = layer_of(torch.bfloat16).to(dtype)
        if name == "fused":
            assert fuse_norms(layer) == [layer.norm]
        hidden = given.to(dtype, copy=True).requires_grad_()
        call = layer.norm
        if name == "truth":
            call = lambda x, norm=layer.norm: torch.nn.functional.rms_norm(x, (WIDTH,), norm.weight, 1e-6)  # noqa: E731
        result = call(hidden)
        result.backward(upstream.to(dtype))
        found[name] = [one.double() for one in (result.detach(), hidden.grad, layer.norm.weight.grad)]
    for truth, own, fused in zip(found["truth"], found["own"], found["fused"], strict=True):
        assert (fused - truth).norm() <= (own - truth).norm()


@pytest.mark.parametrize("eps", [1e-5, 1e-6, 1e-12])
def test_the_epsilon_is_that_of_the_norm(eps: float) -> None:
    layer, other = layer_of(eps=eps), layer_of(eps=eps)
    hidden = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0)) * eps**0.5
    fuse_norms(layer)
    torch.testing.assert_close(layer.norm(hidden), other.norm(hidden))
    # A module whose attribute is not the epsilon that it uses computes something else.
    other.norm.forward_eps = eps
    other.norm.variance_epsilon, other.norm.__class__ = 10 * eps, type("ScaledNorm", (LlamaRMSNorm,), {"forward": _own})
    assert fuse_norms(other) == []


def _own(self: Any, hidden: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(hidden, (WIDTH,), self.weight, self.forward_eps)


@pytest.mark.parametrize(("device", "fused_norms", "is_fused"), [
    ("cuda", True, True), ("cuda", False, False), ("cpu", True, False),
])  # fmt: skip
def test_norms_are_fused_on_a_gpu_unless_the_configuration_says_otherwise(
    device: str, fused_norms: bool, is_fused: bool
) -> None:
    config = parse_config(small_tree(model__fused_norms=fused_norms))
    model: Any = build_model(config)
    prepare_model(model, config, make_shape(config), ALONE, torch.device(device))
    norm = model.model.layers[0].input_layernorm
    assert hasattr(norm, "_fused_eps") == is_fused != hasattr(norm, "_tile_tokens")


def test_a_norm_whose_weight_is_partitioned_is_recognized_by_its_whole_shape() -> None:
    layer = layer_of()
    layer.norm.weight.ds_shape, layer.norm.weight.data = torch.Size([WIDTH]), torch.empty(0)
    assert fuse_norms(layer) == [layer.norm]


def test_a_norm_of_another_type_than_its_input_runs_as_in_transformers() -> None:
    layer, other = layer_of(), layer_of()
    fuse_norms(layer)
    hidden = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(layer.norm(hidden), other.norm(hidden))
