"""Routers are counted in every family of Transformers, over tiles and recomputed layers, and balanced by their bias."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from ray_ulysses import apply_ulysses, causal_lm_loss, shard_batch
from ray_ulysses.config import parse_config
from ray_ulysses.config.rules import broken_rules
from ray_ulysses.engine.model import check_architecture, compile_layers
from ray_ulysses.engine.router_health import RouterWatch, refuse_no_bias
from ray_ulysses.engine.tiled_mlp import tile_mlps
from ray_ulysses.errors import UserError
from ray_ulysses.model_shape import BALANCING_BIASES, UNCOUNTED_ROUTERS, ModelShape
from ray_ulysses.planner.notes import plan_notes
from tests import architectures_page
from tests.breadth import fast_only
from tests.distributed.sweep_case import OWN as SWEPT
from tests.distributed.sweep_case import TINY as SWEEP
from tests.unit.attention.meshes import ALONE
from tests.unit.attention.models import ARCHITECTURES, HYBRIDS, SIZES, VOCAB
from tests.unit.config.trees import small_tree
from tests.unit.engine.steps import checkpointed

DOCUMENTS, ROW = (17, 19), 40
ADDED = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TINY: dict[str, Any] = {
    **SIZES, **ADDED, "head_dim": 8, "num_experts_per_tok": 2, "num_local_experts": 4, "num_experts": 4,
    "n_routed_experts": 4, "moe_intermediate_size": 16, "attention_dropout": 0.0, "first_k_dense_replace": 1,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "head_dim": None, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "kv_lora_rank": 16,
    "q_lora_rank": 16, "n_group": 2, "topk_group": 1, "n_shared_experts": 1, "num_key_value_heads": 4,
}  # fmt: skip
SCORES = {"softmax": torch.softmax, "sigmoid": lambda scores, dim: functional.normalize(scores.sigmoid(), p=1, dim=dim)}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("softmax", {}), "qwen3_moe": ("softmax", {}), "gpt_oss": ("softmax", {"sliding_window": 6}),
    "olmoe": ("softmax", {}), "granitemoe": ("softmax", {}), "deepseek_v2": ("softmax", LATENT),
    "deepseek_v3": ("sigmoid", LATENT), "glm4_moe": ("sigmoid", {"n_group": 1, "topk_group": 1}),
    "minimax_m2": ("sigmoid", {}), "dots1": ("sigmoid", {"n_shared_experts": 1, "n_group": 1, "topk_group": 1}),
}  # fmt: skip


def tiny(family: str, **changes: Any) -> Any:
    fields = {**TINY, **FAMILIES[family][1], **changes}
    config = AutoConfig.for_model(family, **{name: value for name, value in fields.items() if value is not None})
    torch.manual_seed(7)
    model: Any = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager", dtype=torch.float32
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.shape[0] == 4 and parameter.dim() == 2:
                # A router whose scores differ, as those of a trained model.
                parameter.mul_(30.0)
            assert torch.isfinite(parameter).all(), name
    return apply_ulysses(model, ALONE)


def step(model: Any, watch: RouterWatch, tile: Any = "auto") -> torch.Tensor:
    """Take a step on a packed row, with a backward pass, and return the sums of all routers."""
    ids = torch.randint(0, VOCAB, (1, ROW), generator=torch.Generator().manual_seed(5))
    batch = shard_batch(ids, ids, DOCUMENTS, ALONE)
    with watch.counting(batch):
        loss, _ = causal_lm_loss(model, batch, tile=tile)
    loss.backward()
    return torch.cat(watch.take())


def expected(model: Any, family: str) -> torch.Tensor:
    """Return the same sums from each router's own output, by the experts that are called with it."""
    score = SCORES[FAMILIES[family][0]]
    found: list[torch.Tensor] = []
    chosen: list[torch.Tensor] = []
    handles = []
    for module in list(model.modules()):
        if type(module).__name__.endswith("Experts"):
            handles.append(module.register_forward_pre_hook(lambda _, args: chosen.append(args[1])))
        elif type(module).__name__.endswith(("Router", "Gate")):
            handles.append(module.register_forward_hook(lambda _, args, out: found.append(out[0])))
    ids = torch.randint(0, VOCAB, (1, ROW), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        causal_lm_loss(model, shard_batch(ids, ids, DOCUMENTS, ALONE))
    for handle in handles:
        handle.remove()
    sums = []
    for scores, experts in zip(found, chosen, strict=True):
        real = sum(DOCUMENTS)
        p = score(scores[:real].double(), dim=-1)
        sums += [torch.bincount(experts[:real].flatten(), minlength=4).double(), -(p * p.log()).sum()[None]]
    return torch.cat(sums)


@pytest.mark.parametrize("family", fast_only(FAMILIES, "qwen3_moe", "gpt_oss", "deepseek_v3"))
def test_each_router_counts_the_document_tokens_that_its_experts_receive_and_their_entropy(family: str) -> None:
    model = tiny(family)
    watch = RouterWatch(model)
    found, wanted = step(model, watch), expected(model, family)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=0)
    assert torch.equal(found.view(-1, 5)[:, :4], wanted.view(-1, 5)[:, :4])
    layers = watch.summary(found.tolist())
    assert [one.layer for one in layers] == list(range(2 - len(layers), 2))
    for one, sums in zip(layers, wanted.view(-1, 5), strict=True):
        tokens = sums[:4]
        assert one.imbalance == pytest.approx(float(tokens.max() / tokens.mean()))
        assert one.dead == int((tokens == 0).sum())
        assert one.entropy == pytest.approx(float(sums[4]) / sum(DOCUMENTS), rel=1e-5)
    assert any(one.entropy < 1.3 for one in layers), "the scores are uniform, so every function of them is"


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_the_function_of_a_router_that_starts_at_zero_is_chosen_once_its_scores_differ(family: str) -> None:
    model = tiny(family)
    gates = [one.weight for one in model.modules() if type(one).__name__.endswith(("Router", "Gate"))]
    trained = [one.detach().clone() for one in gates]
    watch = RouterWatch(model)
    for factor in (0.0, 1e-5, 1.0):
        with torch.no_grad():
            for weight, one in zip(gates, trained, strict=True):
                weight.copy_(factor * one)
        torch.testing.assert_close(step(model, watch), expected(model, family), rtol=1e-5, atol=0)


_HOW = ["checkpointed", "tiles", "tiles and checkpointed", "compiled"]


@pytest.mark.parametrize("how", fast_only(_HOW, *_HOW[:3]))
def test_a_token_counts_once_when_layers_are_tiled_recomputed_or_compiled(how: str) -> None:
    wanted = expected(tiny("deepseek_v3"), "deepseek_v3")
    model = tiny("deepseek_v3")
    if "tiles" in how:
        tile_mlps(model, 7)
    if "checkpointed" in how:
        checkpointed(model)
    if how == "compiled":
        compile_layers(model)
    watch = RouterWatch(model)
    for _ in range(2):
        torch.testing.assert_close(step(model, watch), wanted, rtol=1e-5, atol=0)
    # Without `counting`, as in an evaluation, nothing counts.
    ids = torch.zeros(1, ROW, dtype=torch.int64)
    causal_lm_loss(model, shard_batch(ids, ids, DOCUMENTS, ALONE))
    assert not torch.cat(watch.take()).any()


def test_a_dense_model_and_a_family_that_is_not_covered_have_no_routing() -> None:
    llama = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES))
    assert RouterWatch(llama).take() == []
    mixtral = tiny("mixtral")
    for module in mixtral.modules():
        if type(module).__name__ == "MixtralTopKRouter":
            # Stands for a router that returns scores only, as DBRX's does.
            module.register_forward_hook(lambda _, args, out: out)
    watch = RouterWatch(mixtral)
    for router in watch._routers:
        router.output = 2
    ids = torch.zeros(1, ROW, dtype=torch.int64)
    with watch.counting(shard_batch(ids, ids, DOCUMENTS, ALONE)):
        pass
    assert watch.take() == [] and watch.summary([]) == ()


def test_a_bias_grows_for_experts_below_the_mean_and_shrinks_for_those_above() -> None:
    model = tiny("deepseek_v3")
    watch = RouterWatch(model, 0.25)
    sums = step(model, watch)
    bias = model.get_submodule("model.layers.1.mlp.gate").e_score_correction_bias
    watch.balance(torch.tensor([9.0, 8.0, 8.0, 7.0, 123.0]))
    assert bias.tolist() == [-0.25, 0.0, 0.0, 0.25]
    watch.balance(torch.tensor([9.0, 9.0, 9.0, 8.0, 123.0]))
    assert bias.tolist() == [-0.5, -0.25, -0.25, 0.5]
    assert len(sums) == 5


def test_a_bias_that_was_loaded_in_bf16_is_updated_in_fp32() -> None:
    model = tiny("deepseek_v3").to(torch.bfloat16)
    gate = model.get_submodule("model.layers.1.mlp.gate")
    assert gate.e_score_correction_bias.dtype == torch.bfloat16
    RouterWatch(model, 1e-3)
    assert gate.e_score_correction_bias.dtype == torch.float32


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_rate_for_a_model_without_such_a_bias_is_refused_before_weights(family: str) -> None:
    fields = {"model_type": family, **SIZES}
    config = parse_config(small_tree(model__config=fields, optimizer__router_bias_rate=1e-3))
    with pytest.raises(UserError, match=r"optimizer\.router_bias_rate=0\.001: the routers of .* have no bias"):
        check_architecture(config)


def test_a_rate_with_an_adapter_is_refused() -> None:
    tree = small_tree(model__path="m", model__adapter={"rank": 4}, optimizer__router_bias_rate=1e-3)
    with pytest.raises(UserError, match=r"optimizer\.router_bias_rate.*export of an adapter"):
        parse_config(tree)
    assert broken_rules(parse_config(small_tree(optimizer__router_bias_rate=1e-3))) == ()


def swept(model_type: str) -> Any:
    own: dict[str, Any] = {
        "nemotron_h": {"layer_types": ["moe", "full_attention"]}, "hy_v3": {"first_k_dense_replace": 1},
        "phimoe": {"router_jitter_noise": 0.0},
    }  # fmt: skip
    zoo = {**ARCHITECTURES, **HYBRIDS}
    if model_type in zoo and model_type != "nemotron_h":
        return zoo[model_type]()
    fields = {**SWEEP, **SWEPT.get(model_type, {}), **own.get(model_type, {})}
    return AutoConfig.for_model(model_type, **{key: one for key, one in fields.items() if one is not None})


def on_meta(model_type: str) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(swept(model_type))


def has_bias(model_type: str) -> bool:
    try:
        refuse_no_bias(on_meta(model_type), 1e-3)
    except UserError:
        return False
    return True


def test_the_families_with_a_balancing_bias_are_those_of_transformers() -> None:
    assert {name for name in BALANCING_BIASES if not has_bias(name)} == set()
    # Of those that have a parameter in its place, or none.
    assert not any(map(has_bias, ("mixtral", "qwen3_moe", "gpt_oss", "ernie4_5_moe", "afmoe", "laguna", "deepseek_v2")))


def exact_decoders() -> set[str]:
    """Return the families that can be trained as decoders; no masked language model has routers."""
    stored = architectures_page.load()["outcomes"]
    return {one["model_type"] for one in stored if one["kind"] == "exact" and one["variant"] != "masked"}


@pytest.mark.slow
def test_no_other_family_that_can_be_trained_has_a_balancing_bias() -> None:
    exact = exact_decoders()
    assert {name for name in exact if has_bias(name)} == BALANCING_BIASES & exact


@pytest.mark.slow
def test_the_routers_of_every_family_that_can_be_trained_are_counted_but_for_those_that_the_plan_names() -> None:
    # The attention layer beside this family's experts is not one that is trained.
    exact = sorted(exact_decoders() - {"nemotron_h"})
    uncounted, counted = set(), set()
    for name in exact:
        if not any("expert" in weight or "moe" in weight for weight, _ in on_meta(name).named_parameters()):
            continue
        config = swept(name)
        model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
        watch = RouterWatch(apply_ulysses(model, ALONE))
        ids = torch.zeros(1, ROW, dtype=torch.int64)
        with watch.counting(shard_batch(ids, ids, DOCUMENTS, ALONE)):
            causal_lm_loss(model, shard_batch(ids, ids, DOCUMENTS, ALONE))
        (counted if watch.take() else uncounted).add(name)
    assert uncounted == UNCOUNTED_ROUTERS & set(exact) and len(counted) >= 40


def test_the_plan_names_a_family_whose_routers_are_not_counted() -> None:
    config = parse_config(small_tree())
    shape = ModelShape.from_config_dict(swept("jetmoe").to_dict())
    for one, is_noted in ((shape, True), (replace(shape, model_type="mixtral"), False)):
        assert any("routers of jetmoe" in note for note in plan_notes(config, one, None)) == is_noted
