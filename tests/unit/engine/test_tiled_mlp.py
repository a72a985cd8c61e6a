"""MLPs and norms over tiles of tokens on one process: exact, small in memory, recomputed once, or refused."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from types import MethodType
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch._dynamo.backends.debugging import aot_eager
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from ray_ulysses import apply_ulysses, causal_lm_loss, shard_batch
from ray_ulysses.attention.batch import IGNORE_INDEX
from ray_ulysses.engine.tiled_mlp import compiled_tile, tile_mlps
from ray_ulysses.errors import UserError
from ray_ulysses.parallel.layout import TileSetting
from tests.breadth import fast_only
from tests.unit.attention.meshes import ALONE
from tests.unit.attention.models import ARCHITECTURES, HYBRIDS, tiny_model, zoo_model
from tests.unit.engine.steps import TILE, Values, checkpointed, make_batch, peak_bytes, step, worst_tensor


def tiled_step(architecture: str, tile: TileSetting, is_checkpointed: bool, frozen: str = "") -> Values:
    model: Any = apply_ulysses(zoo_model(architecture), ALONE).train()
    if frozen:
        model.get_submodule(frozen).requires_grad_(False)
    if is_checkpointed:
        checkpointed(model)
    tile_mlps(model, tile)
    with torch.no_grad():
        evaluated, _ = causal_lm_loss(deepcopy(model), make_batch())
    found = step(model)
    torch.testing.assert_close(evaluated, found["loss"])
    return found


@pytest.mark.parametrize("architecture", fast_only(ARCHITECTURES, "llama", "gpt_oss"))
@pytest.mark.parametrize("is_checkpointed", [False, True], ids=["kept", "checkpointed"])
def test_tiles_change_no_loss_and_no_gradient(architecture: str, is_checkpointed: bool) -> None:
    # Law 1 compares norms: experts' products over tiles have other shapes, so their sums have another order.
    wanted = tiled_step(architecture, "off", False)
    assert worst_tensor(tiled_step(architecture, TILE, is_checkpointed), wanted) <= 1e-5


def gradient_order(model: Any, lengths: list[int], *, is_masked: bool) -> list[str]:
    ready: list[str] = []
    hooks = [
        one.register_post_accumulate_grad_hook(lambda _, name=name: ready.append(name))
        for name, one in model.named_parameters()
    ]
    ids = torch.randint(1, 50, (1, sum(lengths)), generator=torch.Generator().manual_seed(3))
    labels = torch.full_like(ids, IGNORE_INDEX) if is_masked else ids
    loss_sum, _ = causal_lm_loss(model, shard_batch(ids, labels, lengths, ALONE), tile=5)
    loss_sum.backward()
    for hook in hooks:
        hook.remove()
    model.zero_grad()
    return ready


@pytest.mark.parametrize(
    "architecture", fast_only([*ARCHITECTURES, *HYBRIDS], "llama", "gpt_oss", "llama4_text", "lfm2", "qwen3_next")
)
@pytest.mark.parametrize("is_checkpointed", [False, True], ids=["kept", "checkpointed"])
def test_gradients_are_ready_in_one_order_whatever_a_rank_has(architecture: str, is_checkpointed: bool) -> None:
    """ZeRO-2 requires the same order on all ranks, whatever the lengths, documents and labels of their rows."""
    for tile in ("off", TILE):
        model: Any = apply_ulysses(zoo_model(architecture), ALONE).train()
        if is_checkpointed:
            checkpointed(model)
        tile_mlps(model, tile)
        whole = gradient_order(model, [5 * TILE], is_masked=False)
        assert len(whole) == len(list(model.parameters()))
        assert gradient_order(model, [TILE - 2], is_masked=True) == whole
        assert gradient_order(model, [1, 1, 2, 9, 3, 6], is_masked=False) == whole


def test_mlps_that_take_the_longest_row_at_once_are_left_as_they_are() -> None:
    for most_tokens, is_tiled in ((TILE, False), (TILE + 1, True), (None, True)):
        model: Any = zoo_model("llama")
        tile_mlps(model, TILE, most_tokens)
        assert ("forward" in vars(model.model.layers[0].mlp)) is is_tiled


@pytest.mark.parametrize("frozen", ["model.embed_tokens", "model.layers.0.mlp", "model"])
def test_frozen_parts_get_no_gradient(frozen: str) -> None:
    tiled, whole = (tiled_step("llama", tile, False, frozen) for tile in (TILE, "off"))  # type: ignore[arg-type]
    assert worst_tensor(tiled, whole) <= 1e-5


class Layer(GradientCheckpointingLayer):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = LlamaMLP(LlamaConfig(hidden_size=16, intermediate_size=width, num_attention_heads=1))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = hidden + self.mlp(hidden)
        return result


def layers_of(tile: TileSetting, tokens: int, width: int) -> tuple[nn.Sequential, torch.Tensor]:
    torch.manual_seed(0)
    layers = nn.Sequential(Layer(width), Layer(width))
    tile_mlps(layers, tile)
    return layers, torch.randn(1, tokens, 16, requires_grad=True)


def train(layers: nn.Sequential, hidden: torch.Tensor) -> None:
    for layer in layers:
        hidden = checkpoint(layer.forward, hidden, use_reentrant=False)
    hidden.sum().backward()


def rms_norm(tokens: int, tile: TileSetting, dtype: torch.dtype = torch.bfloat16) -> tuple[LlamaRMSNorm, torch.Tensor]:
    torch.manual_seed(0)
    layer = Layer(32)
    layer.norm = LlamaRMSNorm(16)
    torch.nn.init.normal_(layer.norm.weight)
    tile_mlps(layer.to(dtype), tile)
    return layer.norm, torch.randn(1, tokens, 16).to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_norm_over_tiles_has_the_same_bits_and_sums_its_weight_gradient_in_fp32(dtype: torch.dtype) -> None:
    found = {}
    for tile in ("off", 7):
        norm, hidden = rms_norm(512, tile, dtype)  # type: ignore[arg-type]
        result = norm(hidden)
        result.backward(torch.randn(result.shape, generator=torch.Generator().manual_seed(1)).to(dtype))
        found[tile] = (result.detach(), hidden.grad, norm.weight.grad)
    for whole, tiled in zip(found["off"][:2], found[7][:2], strict=True):
        assert torch.equal(whole, tiled)
    truth_norm, truth_hidden = rms_norm(512, "off", dtype)
    result = truth_norm.double()(truth_hidden.detach().double())
    upstream = torch.randn(result.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    result.backward(upstream.to(result.dtype))
    errors = [worst_tensor({"d": one[2].double()}, {"d": truth_norm.weight.grad.double()}) for one in found.values()]
    assert errors[1] <= 1.1 * errors[0] + 1e-6


@pytest.mark.parametrize("architecture", ["qwen3", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_compiled_tiles_change_no_gradient_and_compile_once_for_rows_of_every_length(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes: list[tuple[int, ...]] = []

    def backend(graph: Any, inputs: list[Any]) -> Any:
        shapes.extend(tuple(one.shape) for one in inputs if isinstance(one, torch.Tensor) and one.dim() == 3)
        return aot_eager(graph, inputs)

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    compiled_tile.cache_clear()
    found = []
    for is_compiled in (False, True):
        model: Any = apply_ulysses(zoo_model(architecture), ALONE).train()
        tile_mlps(checkpointed(model), TILE, compiled=is_compiled)
        found.append([step(model, batch) for batch in (make_batch(), row_of(3 * TILE), row_of(4 * TILE + 2))])
    for wanted, ours in zip(*found, strict=True):
        assert worst_tensor(ours, wanted) <= 1e-5
    assert shapes == [(1, TILE, 32)], "only full tiles are compiled, once for all layers and rows"
    compiled_tile.cache_clear()


NORMS = {"norm", "layers.0.input_layernorm", "layers.0.post_attention_layernorm"}
HEAD_NORMS = {"layers.0.self_attn.q_norm", "layers.0.self_attn.k_norm"}
COHERE: dict[str, Any] = {"use_qk_norm": True, "pad_token_id": 0, "num_key_value_heads": 4}


def row_of(tokens: int) -> Any:
    ids = torch.randint(0, 61, (1, tokens), generator=torch.Generator().manual_seed(tokens))
    return shard_batch(ids, ids, (tokens,), ALONE)


def tiled_norms(model: Any) -> set[str]:
    tile_mlps(model, TILE)
    tiled = {name for name, one in model.named_modules() if hasattr(one, "_tile_tokens")}
    return {name.removeprefix("model.") for name in tiled if "norm" in name.lower() and ".1." not in name}


@pytest.mark.parametrize(
    ("model", "tiled"),
    [
        (partial(zoo_model, "llama"), NORMS),
        (partial(zoo_model, "qwen3"), NORMS | HEAD_NORMS),
        # torch's own norms are fused already, and Cohere's head norms have separate weights for each head.
        (partial(zoo_model, "gpt2"), set()),
        (partial(tiny_model, "cohere", **COHERE), {"norm", "layers.0.input_layernorm"}),
    ],
    ids=["llama", "qwen3", "gpt2", "cohere"],
)
def test_norms_go_over_tiles(model: Callable[[], Any], tiled: set[str]) -> None:
    assert tiled_norms(model()) == tiled


def test_norms_that_an_adapter_trains_whole_go_over_tiles() -> None:
    whole = LoraConfig(target_modules=["q_proj"], modules_to_save=["q_norm", "input_layernorm"])
    names = {name for name in tiled_norms(get_peft_model(zoo_model("qwen3"), whole)) if ".modules_to_save." in name}
    assert {name.split(".")[-3] for name in names} == {"q_norm", "input_layernorm"} and len(names) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)], ids=str)
def test_heads_in_any_memory_order_have_the_same_bits(dtype: torch.dtype, order: tuple[int, ...]) -> None:
    found = {}
    for tile in ("off", 7):
        norm, _ = rms_norm(1, tile, dtype)  # type: ignore[arg-type]
        # [B, tokens, heads, D]; a model may use [B, heads, tokens, D].
        heads = torch.randn(2, 50, 3, 16, generator=torch.Generator().manual_seed(2)).to(dtype).requires_grad_()
        permuted = heads.permute(order)
        result = norm(permuted)
        assert result.shape == permuted.shape
        assert result.stride() == permuted.stride()
        weights = torch.randn(result.shape, generator=torch.Generator().manual_seed(3)).to(dtype)
        result.backward(weights)
        found[tile] = (result.detach(), heads.grad, norm.weight.grad)
    assert torch.equal(found["off"][0], found[7][0])
    assert torch.equal(found["off"][1], found[7][1])
    if dtype == torch.float32:
        torch.testing.assert_close(found["off"][2], found[7][2])


def test_the_peak_of_tiled_layers_is_about_a_third_of_that_without() -> None:
    def peak(tile: TileSetting) -> int:
        layers, hidden = layers_of(tile, 4096, 512)
        return peak_bytes(lambda: train(layers, hidden))

    assert peak(256) <= 0.35 * peak("off")


def test_the_gradients_of_bf16_weights_are_summed_in_fp32() -> None:
    errors, oracle = {}, {}
    dtypes = {"oracle": torch.float64, "off": torch.bfloat16, "64": torch.bfloat16}
    for name, dtype in dtypes.items():
        layers, hidden = layers_of(64 if name == "64" else "off", 4096, 32)
        layers = layers[:1].bfloat16().to(dtype)
        layers(hidden.detach().bfloat16().to(dtype)).pow(2).sum().backward()
        gradient = layers[0].mlp.up_proj.weight.grad.double()
        oracle.setdefault("up", gradient)
        errors[name] = float((gradient - oracle["up"]).norm() / oracle["up"].norm())
    assert errors["64"] <= 1.1 * errors["off"]


def test_a_kernel_that_replaced_an_mlp_excludes_tiles() -> None:
    layers = nn.Sequential(Layer(8))
    layers[0].mlp.forward = MethodType(lambda self, hidden: hidden, layers[0].mlp)
    with pytest.raises(UserError, match=r"replaced by tests\.unit\.engine\.test_tiled_mlp.*memory\.mlp_tile: off"):
        tile_mlps(layers, 4)
    tile_mlps(layers, "auto")
    hidden = torch.ones(1, 3, 16)
    assert torch.equal(layers(hidden), 2 * hidden)


def test_a_model_without_mlps_is_refused() -> None:
    with pytest.raises(UserError, match=r"^memory\.mlp_tile=4: "):
        tile_mlps(nn.Linear(2, 2), 4)
    tile_mlps(nn.Linear(2, 2), "auto")


def test_an_mlp_that_changes_the_shape_is_refused_or_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ray_ulysses.parallel.layout._MOST_VALUES", 32)
    layers, hidden = nn.Sequential(Layer(8)), torch.ones(1, 9, 16)
    layers[0].mlp = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 8))
    tile_mlps(layers, 4)
    with pytest.raises(UserError, match=r"^Sequential can't be tiled"):
        layers(hidden)
    layers[0].mlp = mlp = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 8))
    tile_mlps(layers, "auto")
    for _ in range(2):
        torch.testing.assert_close(mlp(hidden), mlp[1](mlp[0](hidden)))
