"""The load-balancing loss of routers, against Transformers' own on one process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from ray_ulysses import apply_ulysses, shard_batch
from ray_ulysses.attention.batch import IGNORE_INDEX
from ray_ulysses.config import Config, parse_config
from ray_ulysses.engine.loss import score_tokens, training_loss
from ray_ulysses.engine.model import build_model, check_architecture, compile_layers, refuse_architecture
from ray_ulysses.engine.router_loss import RouterLoss, router_loss_of, router_loss_sum
from ray_ulysses.engine.tiled_mlp import tile_mlps
from ray_ulysses.errors import UserError
from ray_ulysses.export.architecture import describe
from ray_ulysses.run.settings import model_shape
from tests.breadth import fast_only
from tests.unit.attention.meshes import ALONE
from tests.unit.attention.models import SIZES, VOCAB, plain_config, zoo_model
from tests.unit.config.trees import small_tree
from tests.unit.engine.steps import checkpointed, gradients_of

ASKED = {"output_router_logits": True}
LENGTHS = (9, 1, 13)
TILE = 5
FAMILIES = [
    "deepseek_v4", "ernie4_5_moe", "flex_olmo", "flint", "gpt_oss", "granitemoe", "granitemoe_swa", "granitemoehybrid",
    "granitemoeshared", "jamba", "jetmoe", "laguna", "mellum", "minimax", "minimax_m2", "minimax_m3_vl_text", "mixtral",
    "olmoe", "phimoe", "qwen2_moe", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next",
]  # fmt: skip


def meta_model(model_type: str, **changes: Any) -> Any:
    config = AutoConfig.for_model(model_type, **changes)
    config.output_router_logits = True
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("model_type", fast_only(FAMILIES, "mixtral", "jamba", "phimoe", "qwen3_next"))
def test_every_family_of_transformers_has_the_same_loss_with_numbers_of_its_own(model_type: str) -> None:
    model = meta_model(model_type)
    found = router_loss_of(model)
    config = model.config
    coefficient = getattr(config, "router_aux_loss_coef", None) or config.aux_loss_coef
    assert found == RouterLoss(num_experts=model.num_experts, top_k=model.num_experts_per_tok, coefficient=coefficient)
    assert router_loss_of(model) is found


@pytest.mark.parametrize("model_type", ["llama", "deepseek_v3", "llama4_text", "afmoe"])
def test_a_model_without_a_router_loss_is_refused(model_type: str) -> None:
    model = meta_model(model_type)
    with pytest.raises(
        UserError, match=rf"{model_type} sets output_router_logits=True, but the forward of .* computes no"
    ):
        router_loss_of(model)
    model.forward = lambda *args, **kwargs: None
    with pytest.raises(UserError, match=rf"{model_type} sets .*, but the router loss requires"):
        router_loss_of(model)
    model.config.output_router_logits = False
    assert router_loss_of(model) is None


@pytest.mark.parametrize("how", ["per layer", "entropy"])
def test_another_formula_is_refused_before_weights(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.mixtral import modeling_mixtral

    def other(scores: Any, num_experts: int, top_k: int, mask: Any) -> torch.Tensor:
        if how == "per layer":
            return torch.stack([load_balancing_loss_func((one,), num_experts, top_k) for one in scores]).mean()
        probabilities = torch.stack(scores).softmax(-1)
        return (probabilities * probabilities.log()).sum(-1).mean()

    monkeypatch.setattr(modeling_mixtral, "load_balancing_loss_func", other)
    with pytest.raises(UserError, match=r"mixtral sets .*optimizer\.router_loss: 0\.0"):
        refuse_architecture(plain_config("mixtral", num_local_experts=4, **ASKED))
    monkeypatch.undo()
    refuse_architecture(plain_config("mixtral", num_local_experts=4, **ASKED))


def make_scores(num_layers: int, num_rows: int, tokens: int, num_experts: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    shape = (num_rows * tokens, num_experts)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(num_layers)]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("top_k", [1, 3])
def test_value_and_gradient_equal_those_of_each_row_alone_without_padding(top_k: int, weighted: bool) -> None:
    lengths, row_tokens, num_experts = ((9, 4), (20,), (1,)), 20, 6
    ids = torch.zeros(3, row_tokens, dtype=torch.int64)
    labels = ids.clone()
    labels[1, :12] = IGNORE_INDEX
    weights = torch.full(ids.shape, 0.25) if weighted else None
    batch = shard_batch(ids, labels, lengths, ALONE, label_weights=weights)
    loss = RouterLoss(num_experts=num_experts, top_k=top_k, coefficient=0.3)

    def values(ours: bool) -> list[torch.Tensor]:
        scores = [one.requires_grad_() for one in make_scores(3, 3, row_tokens, num_experts)]
        if ours:
            total = router_loss_sum(SimpleNamespace(router_logits=scores), loss, batch)
        else:
            total = torch.zeros((), dtype=torch.float64)
            for row, supervised in enumerate((11, 8, 0)):
                part = tuple(one.view(3, row_tokens, num_experts)[row, : sum(lengths[row])] for one in scores)
                supervised *= 0.25 if weighted else 1.0
                total = total + 0.3 * supervised * load_balancing_loss_func(part, num_experts, top_k)
        total.backward()
        return [total.detach(), *(one.grad for one in scores)]

    for found, wanted in zip(values(True), values(False), strict=True):
        torch.testing.assert_close(found, wanted.to(found.dtype), rtol=1e-6, atol=1e-6)


def test_a_router_that_has_not_scored_every_token_is_refused() -> None:
    batch = shard_batch(torch.zeros(1, 8).long(), None, (8,), ALONE)
    loss = RouterLoss(num_experts=4, top_k=2, coefficient=1.0)
    for scores, found in (([torch.zeros(8, 4), torch.zeros(7, 4)], r"\(7, 4\), \(8, 4\)"), ([], "nothing")):
        with pytest.raises(UserError, match=rf"scores of shape {found} instead"):
            router_loss_sum(SimpleNamespace(router_logits=scores), loss, batch)


def whole_row(model_type: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return losses and gradients of Transformers' own forward: one document of one row, with its own labels."""
    model = zoo_model(model_type, **ASKED)
    ids = make_ids()
    out = model(input_ids=ids, labels=ids, use_cache=False)
    out.loss.backward()
    return {"loss": out.loss.detach(), "router": out.aux_loss.detach()}, gradients_of(model)


def make_ids() -> torch.Tensor:
    return torch.randint(0, VOCAB, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(5))


LAYERS = ["plain", "checkpointed", "tiled", "checkpointed-tiled", pytest.param("compiled", marks=pytest.mark.slow)]


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("tile", [TILE, "off"], ids=str)
@pytest.mark.parametrize("model_type", fast_only(["mixtral", "qwen3_moe", "gpt_oss"], "mixtral"))
def test_loss_and_gradients_are_those_of_transformers(model_type: str, tile: Any, layers: str) -> None:
    values, wanted = whole_row(model_type)
    model: Any = apply_ulysses(zoo_model(model_type, **ASKED), ALONE).train()
    if "checkpointed" in layers:
        checkpointed(model)
    if "tiled" in layers:
        tile_mlps(model, 4)
        assert any("forward" in vars(one) and next(one.children(), None) for one in model.modules())
    if layers == "compiled":
        compile_layers(model)
    batch = shard_batch(make_ids(), None, None, ALONE)
    found = training_loss(model, batch, tile=tile)
    (found.objective_sum / found.num_tokens).backward()
    rel = 1e-5 if layers == "compiled" else 1e-6
    assert float(found.objective_sum.detach() / found.num_tokens) == pytest.approx(float(values["loss"]), rel=rel)
    router = float(found.router_loss_sum / found.num_tokens)
    assert router == pytest.approx(model.config.router_aux_loss_coef * float(values["router"]), rel=rel)
    assert router > 0
    gradients = gradients_of(model)
    assert gradients.keys() == wanted.keys()
    for name, one in gradients.items():
        assert float((one - wanted[name]).norm()) <= 1e-5 * float(wanted[name].norm()), name
    assert torch.isfinite(score_tokens(model, batch).losses_BL).all()


def test_a_users_own_forward_and_an_evaluation_have_no_router_loss() -> None:
    model: Any = apply_ulysses(zoo_model("mixtral", **ASKED), ALONE)
    batch = shard_batch(make_ids(), None, LENGTHS, ALONE)
    out = model(**batch.model_inputs())
    assert out.aux_loss is None and out.router_logits is None
    found = training_loss(model, batch, tile="off")
    scored = score_tokens(model, batch)
    torch.testing.assert_close(scored.losses_BL.sum(), found.loss_sum)
    assert float(found.objective_sum.detach()) > float(found.loss_sum)


MIXTRAL = {"model_type": "mixtral", "num_local_experts": 4, **SIZES}


def config_of(router_loss: float | None, **model: Any) -> Config:
    return parse_config(small_tree(model__config=MIXTRAL | model, optimizer__router_loss=router_loss))


@pytest.mark.parametrize(
    ("setting", "asked", "wanted"), [(0.03, False, 0.03), (0.0, True, None), (None, True, 0.001), (None, False, None)]
)
def test_the_setting_replaces_the_models_config(setting: float | None, asked: bool, wanted: float | None) -> None:
    config = config_of(setting, output_router_logits=asked)
    check_architecture(config)
    found = router_loss_of(build_model(config))
    assert (found and found.coefficient) == wanted
    # The exported configuration keeps the original values.
    exported = describe(config, "model").model.config
    assert exported.output_router_logits is asked and exported.router_aux_loss_coef == 0.001
    experts = model_shape(config).experts
    assert experts is not None and experts.has_router_loss == (wanted is not None)


def test_the_setting_is_refused_for_a_model_without_such_a_loss() -> None:
    with pytest.raises(UserError, match=r"optimizer\.router_loss=0\.1: llama has no router loss"):
        check_architecture(parse_config(small_tree(optimizer__router_loss=0.1)))
    # The setting also disables a router loss that the configuration requests but the model lacks.
    fields = {"model_type": "llama", "output_router_logits": True, **SIZES}
    with pytest.raises(UserError, match=r"computes no router loss; set optimizer\.router_loss: 0\.0"):
        check_architecture(parse_config(small_tree(model__config=fields)))
    check_architecture(parse_config(small_tree(model__config=fields, optimizer__router_loss=0.0)))
