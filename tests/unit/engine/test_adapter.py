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
from tests.unit.attention.models import ARCHITECTURES, zoo_model
from tests.unit.config.trees import small_tree
from tests.unit.engine.test_empty_model import names_shapes_and_types, tied_names
from tests.unit.export.runs import fields_of

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


EXPERTS = {"rank": 3, "targets": ["q_proj", "experts", "gate"], "ranks": {"down_proj": 5}, "alphas": {"experts": 4}}


def config_of_experts(adapter: dict[str, Any] | None, kind: str = "mixtral", **changes: Any) -> Any:
    tree = small_tree(**changes)
    tree["model"] |= {"config": fields_of(ARCHITECTURES[kind]()), "adapter": adapter}
    return parse_config(tree)


@pytest.mark.parametrize("adapter", [EXPERTS, {}, {"targets": ["gate_up_proj"]}], ids=["all", "none", "one"])
def test_the_plan_counts_adapters_of_experts(adapter: dict[str, Any]) -> None:
    config = config_of_experts(adapter)
    model, shape = build_model(config), model_shape(config)
    assert shape.num_parameters == sum(one.numel() for one in model.parameters())
    assert shape.trained_parameters == sum(one.numel() for one in model.parameters() if one.requires_grad)
    part, layers = shape.part, shape.num_layers
    adapted = [one for name, one in model.named_parameters() if name.endswith(("gate_up_proj", "down_proj"))]
    adapted = adapted if adapter is EXPERTS else adapted[::2] if adapter else []
    gates = layers * 4 * 32 if adapter is EXPERTS else 0
    assert part is not None and part.summed == sum(one.numel() for one in adapted) + gates
    assert part.largest_sum == (part.summed - gates) // layers
    # A token uses two of four experts: their gradient is computed, as is the gradient of their sum.
    frozen = config_of_experts({**adapter, "targets": ["q_proj"], "ranks": {}, "alphas": {}} if adapter else {})
    assert model_shape(frozen).frozen_matrices - shape.frozen_matrices == part.summed // 2


def test_each_expert_has_its_own_adapter() -> None:
    config = config_of_experts({"rank": 2, "alpha": 6, "targets": ["experts"]})
    torch.manual_seed(2)
    ids, model, plain = torch.arange(40)[None], build_model(config), build_model(config_of_experts(None))
    with torch.no_grad():
        for own, base in zip(model.get_base_model().model.layers, plain.model.layers, strict=True):
            outer = own.mlp.experts
            for wrapper, weight in (
                (outer, base.mlp.experts.down_proj),
                (outer.base_layer, base.mlp.experts.gate_up_proj),
            ):
                a, b = wrapper.lora_A.default.weight, wrapper.lora_B.default.weight
                b.normal_()
                for expert in range(4):
                    # PEFT's layout: A has the ranks of one expert after another, B the experts of one rank.
                    weight[expert] += 3 * b[:, expert::4] @ a[2 * expert : 2 * expert + 2]
        wanted = plain(input_ids=ids).logits
        assert (model(input_ids=ids).logits - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def test_dense_layers_with_the_names_of_experts_have_adapters() -> None:
    # PEFT would adapt the experts instead.
    trained = trained_names(build_model(config_of_experts({"targets": ["gate_proj", "up_proj"]}, "deepseek_v3")))
    assert {name.split(".lora_")[0] for name in trained} == {
        f"model.layers.{place}.{name}"
        for place in ("0.mlp", "1.mlp.shared_experts")
        for name in ("gate_proj", "up_proj")
    }


def test_single_targets_have_their_own_rank_and_scale() -> None:
    adapter = {
        "rank": 4,
        "alpha": 8,
        "rslora": True,
        "ranks": {"q_proj": 16},
        "alphas": {"layers.1.self_attn.q_proj": 2},
    }
    layers = build_model(config_of(adapter)).get_base_model().model.layers
    found = {
        (place, name): (layer.r["default"], layer.scaling["default"])
        for place in (0, 1)
        for name, layer in layers[place].self_attn.named_children()
    }
    assert {value for (_, name), value in found.items() if name != "q_proj"} == {(4, 8 / 4**0.5)}
    assert [found[place, "q_proj"] for place in (0, 1)] == [(16, 8 / 4), (16, 2 / 4)]


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
        ({"targets": ["experts"]}, ".targets: the model has no module 'experts'"),
        ({"targets": ["q_proj"], "ranks": {"v_proj": 3}}, ".ranks: 'v_proj' matches none of the targets"),
        ({"alphas": {"experts": 3}}, ".alphas: 'experts' matches none of the targets"),
        ({"ranks": {"q_proj": 3, "self_attn.q_proj": 4}}, ".ranks: two names with different values"),
    ],
    ids=["target", "module", "embedding", "both", "tied-head", "no-experts", "rank", "alpha", "two-ranks"],
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


@pytest.mark.parametrize("name", ["dropout", "lora_dropout"])
def test_dropout_is_refused_with_its_reason(name: str) -> None:
    with pytest.raises(ConfigError, match="its masks would depend on the layout"):
        config_of({name: 0.1})


@pytest.mark.parametrize(
    ("kind", "targets"), [("mixtral", ["q_proj", "experts"]), ("deepseek_v3", "all-linear")], ids=["experts", "dense"]
)
def test_a_dora_is_refused_on_experts_and_on_layers_that_peft_mistakes_for_them(kind: str, targets: Any) -> None:
    with pytest.raises(UserError, match=r"^model\.adapter\.dora=true: .*(experts|gate_proj)"):
        model_shape(config_of_experts({"dora": True, "targets": targets}, kind))
    assert model_shape(config_of_experts({"dora": True, "targets": ["o_proj"]}, kind)).part is not None


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
