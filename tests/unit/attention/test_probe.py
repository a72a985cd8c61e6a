"""The probe finds operations outside attention that mix tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import LlamaForCausalLM

from ray_ulysses import apply_ulysses
from ray_ulysses.attention.probe import LayerAttention, probe_model
from ray_ulysses.attention.refusals import refuse_inexact
from ray_ulysses.errors import UserError
from tests.unit.attention.meshes import ALONE
from tests.unit.attention.models import ARCHITECTURES, tiny_model


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads slow models of this size down."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _along(tokens_BLH: torch.Tensor, layer: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Apply a layer along the token dim."""
    return layer(tokens_BLH.transpose(1, 2)).transpose(1, 2)


def _neighbour(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(x.shape[1]).sub(1).clamp(min=0)


MIXING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mean": lambda x: x.mean(1, keepdim=True),
    "sum": lambda x: x.sum(dim=-2, keepdim=True) / 9,
    "max": lambda x: x.max(1, keepdim=True).values,
    "var": lambda x: x.var(1, keepdim=True),
    "norm": lambda x: x.norm(dim=1, keepdim=True),
    "quantile": lambda x: x.quantile(0.3, dim=1, keepdim=True),
    "softmax": lambda x: x.softmax(1),
    "cumsum": lambda x: x.cumsum(1) / 9,
    "sort": lambda x: x.sort(1).values,
    "topk": lambda x: x.topk(2, dim=1).values.sum(1, keepdim=True),
    "flip": lambda x: x.flip(1),
    "roll": lambda x: x.roll(1, 1),
    "pad-shift": lambda x: F.pad(x, (0, 0, 1, -1)),
    "cat-shift": lambda x: torch.cat([x[:, :1], x[:, :-1]], dim=1),
    "first-token": lambda x: x[:, :1],
    "narrow": lambda x: x.narrow(1, 0, 1),
    "index": lambda x: x[:, _neighbour(x)],
    "index-select": lambda x: x.index_select(1, _neighbour(x)),
    "scatter-add": lambda x: torch.zeros_like(x).scatter_add(1, _neighbour(x)[None, :, None].expand_as(x), x),
    "index-add": lambda x: torch.zeros_like(x).index_add(1, _neighbour(x), x),
    "product-of-ones": lambda x: torch.ones(x.shape[1], x.shape[1]).tril() @ x / 9,
    "einsum": lambda x: torch.einsum("bld,bmd->blm", x, x).mean(-1, keepdim=True),
    "average-pool": lambda x: _along(x, lambda y: F.avg_pool1d(y, 3, 1, 1)),
    "convolution": lambda x: _along(x, lambda y: F.conv1d(y, torch.ones(y.shape[1], 1, 3), None, 1, 1, 1, y.shape[1])),
    "unfold": lambda x: F.pad(x, (0, 0, 2, 0)).unfold(1, 3, 1).mean(-1),
    "batch-norm": lambda x: _along(x, lambda y: F.batch_norm(y, None, None, training=True)),
    "group-norm": lambda x: _along(x, lambda y: F.group_norm(y, 4)),
    "layer-norm-of-tokens": lambda x: F.layer_norm(x, tuple(x.shape[1:])),
    "batch-mean": lambda x: x.mean(0, keepdim=True).mean(),
    "other-row": lambda x: x.flip(0).mean(1, keepdim=True),
    "interpolate": lambda x: _along(x, lambda y: F.interpolate(y[..., ::2], size=y.shape[-1])),
    "fourier": lambda x: torch.fft.fft(x, dim=1).real / 9,
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "dropout": lambda x: F.dropout(x, 0.1),
    "noise": lambda x: 0.01 * torch.randn_like(x),
    "place-in-the-row": lambda x: torch.arange(x.shape[1]).to(x.dtype)[None, :, None] / 9 + 0 * x,
    "length-of-the-row": lambda x: x * x.shape[1] / 30,
    "number-of-rows": lambda x: x * x.shape[0],
    "item": lambda x: x * float(x.mean().item()),
    "item-branch": lambda x: x if x[0, 0, 0].item() > 1e9 else x.roll(1, 1),
    "nonzero": lambda x: x * len((x[..., 0] > 0).nonzero()) / 9,
    "host": lambda x: torch.from_numpy(x.numpy().mean(axis=1, keepdims=True)),
}


class Mixing(nn.Module):
    """A replacement for an MLP that adds the result of an operation to its input."""

    def __init__(self, operation: str) -> None:
        super().__init__()
        self.operation = operation

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return hidden + MIXING[self.operation](hidden)


class MixingLlama(LlamaForCausalLM):
    """A custom model class with an operation in its second layer."""

    operation = ""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.layers[1].mlp = Mixing(self.operation)


def refusal_of(model: Any) -> str:
    with pytest.raises(UserError, match=r"^llama can't be trained exactly on slices of a row: ") as refused:
        refuse_inexact(model, model.config, None)
    return str(refused.value)


NAMES = {"first-token": "(slice)", "convolution": "(convolution)", "index-add": "Mixing at model.layers.1.mlp"}


@pytest.mark.parametrize("operation", MIXING)
def test_an_operation_between_tokens_is_refused_in_a_module_that_is_swapped_in(operation: str) -> None:
    model = tiny_model(meta=True)
    model.model.layers[1].mlp = Mixing(operation)
    assert NAMES.get(operation, "") in refusal_of(model)


@pytest.mark.parametrize(
    ("operation", "way"),
    [
        *(("roll", way) for way in ("class", "forward", "hook", "experts", "query", "rank-of-values")),
        *((operation, "forward") for operation in ("mean", "index", "item", "dropout")),
    ],
)
def test_an_operation_between_tokens_is_refused_however_it_got_into_the_model(operation: str, way: str) -> None:
    mixing, model = Mixing(operation), tiny_model(num_hidden_layers=3)
    layer = model.model.layers[1]
    if way == "class":
        model = type("Named", (MixingLlama,), {"operation": operation})(ARCHITECTURES["llama"]())
    elif way == "forward":
        plain = layer.mlp.forward
        layer.mlp.forward = MethodType(lambda _, hidden: mixing(plain(hidden)), layer.mlp)
    elif way == "hook":
        layer.register_forward_hook(lambda _, __, output: mixing(output))
    elif way == "experts":
        layer.mlp = type("SomeExperts", (Mixing,), {})(operation)
    elif way == "query":
        layer.self_attn.q_proj = nn.Sequential(layer.self_attn.q_proj, mixing)
    else:
        layer.self_attn.v_proj = nn.Sequential(layer.self_attn.v_proj, mixing)
    refusal_of(model)


def test_experts_of_one_kind_are_distinguished_from_others() -> None:
    """Identical experts are run once; experts with a replaced forward are not identical."""
    model = tiny_model("mixtral", num_local_experts=2, num_experts_per_tok=1, num_hidden_layers=3)
    assert probe_model(model).problems == []
    experts = model.model.layers[2].mlp.experts
    plain = experts.forward
    experts.forward = MethodType(lambda _, hidden, *rest: plain(hidden, *rest).roll(1, 0), experts)
    assert probe_model(model).problems


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        (lambda kwargs: kwargs | {"is_causal": False}, "passes is_causal=False to its attention"),
        (lambda kwargs: kwargs | {"bias": torch.zeros(1)}, "passes bias to its attention"),
        (lambda kwargs: kwargs | {"attention_mask": None}, "receives no attention mask from its model"),
        (lambda kwargs: kwargs | {"attention_mask": kwargs["attention_mask"] * 2}, "builds its own attention mask"),
    ],
    ids=["is_causal", "bias", "no-mask", "own-mask"],
)
def test_an_argument_that_changes_attention_is_refused(
    changed: Callable[[dict[str, Any]], dict[str, Any]], text: str
) -> None:
    model = tiny_model()
    attention = model.model.layers[1].self_attn
    plain = attention.forward
    attention.forward = MethodType(lambda _, *args, **kwargs: plain(*args, **changed(kwargs)), attention)
    assert f"LlamaAttention {text}" in refusal_of(model)


def test_the_model_and_the_run_are_left_as_they_are() -> None:
    model: Any = tiny_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def settings() -> tuple[Any, ...]:
        return model.config._attn_implementation, torch.get_default_dtype(), torch.get_num_threads()

    implementation, state = settings(), torch.get_rng_state()
    probe_model(model)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert settings() == implementation and torch.equal(torch.get_rng_state(), state)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_an_applied_model_is_looked_through_again_as_it_was() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    model = tiny_model(rope_parameters=rope)
    first = probe_model(model)
    apply_ulysses(model, ALONE)
    assert probe_model(model) == first
    assert first.layers["model.layers.0.self_attn"] == LayerAttention(
        num_heads=4, num_kv_heads=2, head_size=8, value_size=8, window=None, has_softcap=False
    )
