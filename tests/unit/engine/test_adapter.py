"""Adapters by configuration: what is trained, from which weights, and what is refused before a worker starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ray_ulysses.checkpoint.state import StateDescription
from ray_ulysses.config.loading import parse_config
from ray_ulysses.config.model import AdapterSection
from ray_ulysses.engine import adapter as adapter_module
from ray_ulysses.engine.adapter import find_adapted
from ray_ulysses.engine.model import build_model
from ray_ulysses.engine.optimizer import parameter_groups
from ray_ulysses.errors import ConfigError, UserError
from ray_ulysses.run.settings import model_shape
from tests.unit.attention.models import zoo_model
from tests.unit.config.trees import small_tree
from tests.unit.engine.test_empty_model import names_shapes_and_types, tied_names

EXTENSION = {"targets": ["q_proj", "v_proj"], "train_embeddings": True, "train_norms": True}


def config_of(adapter: dict[str, Any] | None, *, tied: bool = False, **changes: Any) -> Any:
    tree = small_tree(**changes)
    tree["model"]["config"]["tie_word_embeddings"] = tied
    tree["model"]["adapter"] = adapter
    return parse_config(tree)


def trained_names(model: Any) -> set[str]:
    return {name.removeprefix("base_model.model.") for name, one in model.named_parameters() if one.requires_grad}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    "adapter",
    [
        {},
        EXTENSION,
        {"targets": ["down_proj"], "modules_to_save": ["layers.1.self_attn"]},
        {"modules_to_save": ["mlp"]},
    ],
    ids=["linear", "extension", "one-module", "all-but"],
)
def test_the_plan_counts_trained_parameters(adapter: dict[str, Any], tied: bool) -> None:
    config = config_of(adapter, tied=tied)
    model, shape = build_model(config), model_shape(config)
    assert shape.num_parameters == sum(one.numel() for one in model.parameters())
    assert shape.trained_parameters == sum(one.numel() for one in model.parameters() if one.requires_grad)
    head = model.get_output_embeddings().weight
    assert shape.head_is_trained == head.requires_grad == (tied and "train_embeddings" in adapter)
    stepped = [one for group in parameter_groups(model, 0.1) for one in group["params"]]
    assert sum(one.numel() for one in stepped) == shape.trained_parameters


def test_every_linear_layer_but_the_head_has_an_adapter_that_changes_nothing_yet() -> None:
    adapted, plain = build_model(config_of({"rank": 3})), build_model(config_of(None))
    kinds = {name.split(".lora_")[0].rpartition(".")[2] for name in trained_names(adapted)}
    assert kinds == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    ids = torch.arange(9)[None]
    assert torch.equal(adapted(input_ids=ids).logits, plain(input_ids=ids).logits)


def test_embeddings_and_norms_are_trained_whole_and_no_copy_is_made() -> None:
    config = config_of(EXTENSION, tied=True)
    model = build_model(config)
    whole = {name for name in trained_names(model) if "lora_" not in name}
    norms = {
        f"model.layers.{n}.{which}.weight" for n in (0, 1) for which in ("input_layernorm", "post_attention_layernorm")
    }
    assert whole == norms | {"model.norm.weight", "model.embed_tokens.weight"}
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    empty = build_model(config, state=StateDescription(tensors={}, tied=tied_names(model)))
    assert names_shapes_and_types(empty) == names_shapes_and_types(model)


def test_the_first_weights_depend_on_the_seed_alone(tmp_path: Path) -> None:
    build_model(config_of(None)).save_pretrained(tmp_path)
    pretrained = {"model__init": "pretrained", "model__path": str(tmp_path)}
    torch.manual_seed(99)
    first = dict(build_model(config_of({}, **pretrained)).named_parameters())
    torch.rand(7)
    again = dict(build_model(config_of({}, **pretrained)).named_parameters())
    drawn = dict(build_model(config_of({})).named_parameters())
    other = dict(build_model(config_of({}, run__seed=1, **pretrained)).named_parameters())
    names = [name for name in first if "lora_A" in name]
    assert all(torch.equal(first[name], again[name]) and torch.equal(first[name], drawn[name]) for name in names)
    assert not any(torch.equal(first[name], other[name]) for name in names)
    assert all(not one.any() for name, one in first.items() if "lora_B" in name)


@pytest.mark.parametrize(
    ("adapter", "said"),
    [
        ({"targets": ["query"]}, ".targets: "),
        ({"modules_to_save": ["wte"]}, ".modules_to_save: "),
        ({"targets": ["embed_tokens"]}, ".targets=model.embed_tokens: "),
        ({"targets": ["up_proj"], "modules_to_save": ["mlp"]}, ".targets=model.layers.0.mlp.up_proj"),
        ({"targets": ["lm_head"]}, ".targets=lm_head: "),
    ],
    ids=["target", "module", "embedding", "both", "tied-head"],
)
def test_an_adapter_that_does_not_suit_the_model_is_refused(adapter: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as error:
        model_shape(config_of(adapter, tied=True))
    assert str(error.value).startswith(f"model.adapter{said}")


@pytest.mark.parametrize(
    ("adapter", "path"),
    [
        ({"rank": 0}, ".rank"),
        ({"targets": "q_proj"}, ".targets"),
        ({"targets": []}, ".targets"),
        ({"targets": ["a", "a"]}, ".targets"),
        ({"dropout": 0.1}, ".dropout"),
    ],
    ids=["rank", "pattern", "none", "twice", "dropout"],
)
def test_an_impossible_setting_is_refused(adapter: dict[str, Any], path: str) -> None:
    with pytest.raises(ConfigError) as error:
        config_of(adapter)
    assert "model.adapter" + path in {problem.path for problem in error.value.problems}
    with pytest.raises(ConfigError, match=r"model\.adapter"):
        config_of({}, model__part="text")


def test_a_missing_peft_is_refused_with_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(UserError, match=r"^model.adapter requires PEFT, which can't be imported \(.*\); insta"):
        adapter_module._peft()


def test_layers_whose_weights_are_read_get_no_adapter() -> None:
    targets = find_adapted(zoo_model("jamba"), AdapterSection()).targets
    assert "model.layers.0.mamba.in_proj" in targets and "model.layers.0.mamba.out_proj" in targets
    assert not [name for name in targets if name.endswith(("x_proj", "dt_proj"))]
    with pytest.raises(UserError) as error:
        find_adapted(zoo_model("jamba"), AdapterSection(targets=("x_proj",)))
    assert str(error.value).startswith("model.adapter.targets=model.layers.0.mamba.x_proj: ")
