"""A model for a stored state equals the model with initial weights, except for the weights' values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.initialization import TORCH_INIT_FUNCTIONS

from ray_ulysses.checkpoint.state import StateDescription
from ray_ulysses.config.loading import parse_config
from ray_ulysses.engine.model import allocate_weights, build_model, without_weights
from tests.breadth import fast_only
from tests.unit.attention.models import ARCHITECTURES, zoo_model
from tests.unit.attention.multimodal import MULTIMODAL, multimodal_model
from tests.unit.config.trees import small_tree


@pytest.fixture
def nothing_drawn_or_read(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function after which no weights may be initialized or read."""

    def forbid() -> None:
        def drawn(tensor: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
            assert tensor.is_meta, "a weight was initialized"
            return tensor

        def read(*_: object, **__: object) -> None:
            raise AssertionError("weights were read")

        for name in ("normal_", "uniform_", "trunc_normal_", "kaiming_uniform_", "xavier_uniform_"):
            monkeypatch.setattr(torch.nn.init, name, drawn)
            monkeypatch.setitem(TORCH_INIT_FUNCTIONS, name, drawn)
        monkeypatch.setattr("ray_ulysses.engine.stored_weights.safe_open", read)

    return forbid


def names_shapes_and_types(model: nn.Module) -> list[tuple[Any, ...]]:
    """Return everything of the parameters but their values; tied names point at the first."""
    first: dict[nn.Parameter, str] = {}
    return [
        (name, first.setdefault(parameter, name), tuple(parameter.shape), parameter.dtype, parameter.requires_grad)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    ]


def tied_names(model: nn.Module) -> dict[str, str]:
    return {name: first for name, first, *_ in names_shapes_and_types(model) if name != first}


def check_equal_but_for_weights(empty: PreTrainedModel, wanted: PreTrainedModel) -> None:
    assert names_shapes_and_types(empty) == names_shapes_and_types(wanted)
    assert empty.config.to_dict() == wanted.config.to_dict()
    stored = set(wanted.state_dict())
    assert set(empty.state_dict()) == stored
    buffers = dict(empty.named_buffers())
    assert buffers.keys() == dict(wanted.named_buffers()).keys()
    for name, buffer in wanted.named_buffers():
        if name not in stored:
            assert buffers[name].dtype == buffer.dtype and torch.equal(buffers[name], buffer), name


@pytest.mark.parametrize("dtype", fast_only(["fp32", "bf16"], "bf16"))
@pytest.mark.parametrize("init", ["random", "pretrained"])
@pytest.mark.parametrize(
    "architecture",
    fast_only([*ARCHITECTURES, *MULTIMODAL], "qwen3", "deepseek_v3", "phi3-longrope", "gemma3_text", "qwen2_5_vl"),
)
def test_only_the_weights_of_an_empty_model_are_missing(
    tmp_path: Path, nothing_drawn_or_read: Callable[[], None], architecture: str, init: str, dtype: str
) -> None:
    is_multimodal = architecture in MULTIMODAL
    (multimodal_model(architecture) if is_multimodal else zoo_model(architecture)).save_pretrained(tmp_path)
    model = {"init": init, "path": str(tmp_path), "dtype": dtype, "part": "text" if is_multimodal else "whole"}
    config = parse_config({**small_tree(), "model": model})
    wanted = build_model(config)
    nothing_drawn_or_read()
    empty = build_model(config, state=StateDescription(tensors={}, tied=tied_names(wanted)))
    check_equal_but_for_weights(empty, wanted)
    with pytest.raises(AssertionError, match=r"weights? (was|were) (initialized|read)"):
        build_model(config)


def test_the_stored_state_decides_if_heads_are_tied(tmp_path: Path, nothing_drawn_or_read: Callable[[], None]) -> None:
    model: Any = build_model(parse_config(small_tree()))
    model.save_pretrained(tmp_path)
    # The configuration ties the head, although the weights have a separate one.
    model.config.tie_word_embeddings = True
    model.config.save_pretrained(tmp_path)
    config = parse_config(small_tree(model__init="pretrained", model__path=str(tmp_path), model__config=None))
    wanted = build_model(config)
    assert tied_names(wanted) == {}
    nothing_drawn_or_read()
    check_equal_but_for_weights(build_model(config, state=StateDescription(tensors={})), wanted)
    tie = {"lm_head.weight": "model.embed_tokens.weight"}
    assert tied_names(build_model(config, state=StateDescription(tensors={}, tied=tie))) == tie


class _Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(3, 3, bias=False) for _ in range(3))
        self.two.weight = self.one.weight
        self.three.weight.requires_grad_(False)
        self.counts = nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.register_parameter("bias", None)


def test_shared_frozen_and_marked_parameters_stay_what_they_are() -> None:
    with without_weights():
        model = _Shared()
    assert all(parameter.is_meta for parameter in model.parameters())
    model.one.weight.mark = "kept"  # type: ignore[attr-defined]
    allocate_weights(model, torch.bfloat16, None)
    assert model.two.weight is model.one.weight and model.one.weight.mark == "kept"
    assert [name for name, one in model.named_parameters() if one.requires_grad] == ["one.weight"]
    assert model.bias is None and torch.equal(model.table, torch.arange(4.0))
    types = {name: one.dtype for name, one in model.named_parameters()}
    assert types == {"counts": torch.int64, "one.weight": torch.bfloat16, "three.weight": torch.bfloat16}
    assert nn.Linear(2, 2).weight.device.type == "cpu", "the context has ended"
