"""The loss over tiles of tokens on one process: exact, small in memory, without traces, or refused."""

from __future__ import annotations

import logging
from copy import deepcopy
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ray_ulysses import apply_ulysses, causal_lm_loss, shard_batch
from ray_ulysses.attention.batch import IGNORE_INDEX
from ray_ulysses.engine.loss import score_tokens, training_loss
from ray_ulysses.engine.model_parts import find_parts
from ray_ulysses.engine.tiled_loss import token_losses
from ray_ulysses.errors import UserError
from ray_ulysses.model_shape import ModelShape
from ray_ulysses.parallel.layout import TileSetting
from ray_ulysses.planner.activation_memory import loss_terms
from tests.breadth import fast_only
from tests.unit.attention.meshes import ALONE
from tests.unit.attention.models import ARCHITECTURES, tiny_model, zoo_model
from tests.unit.engine.steps import TILE, gradients_of, make_batch, peak_bytes, step, worst_tensor
from tests.unit.planner.runs import MODEL


@pytest.mark.parametrize("architecture", fast_only(ARCHITECTURES, "granite", "gemma2"))
def test_tiles_change_no_loss_no_gradient_and_no_prediction(architecture: str) -> None:
    model, batch = apply_ulysses(zoo_model(architecture), ALONE), make_batch(weighted=True)
    assert worst_tensor(step(model, batch, TILE), step(model, batch, "off")) <= 1e-5
    tiled, whole = (score_tokens(model, batch, tile=tile) for tile in (TILE, "off"))
    assert torch.equal(tiled.predictions_BL, whole.predictions_BL)
    torch.testing.assert_close(tiled.losses_BL, whole.losses_BL)
    assert not tiled.losses_BL.requires_grad
    loss_sum, _ = causal_lm_loss(model, batch, tile=TILE)
    torch.testing.assert_close(loss_sum.detach(), tiled.losses_BL.sum())


@pytest.mark.parametrize("architecture", fast_only(ARCHITECTURES, "granite", "gemma2"))
@pytest.mark.parametrize("tile", [TILE, "off"], ids=str)
def test_a_z_loss_is_that_of_the_models_own_logits(architecture: str, tile: TileSetting) -> None:
    model, batch = apply_ulysses(zoo_model(architecture), ALONE), make_batch(weighted=True)
    coefficient = 0.05

    def ours() -> dict[str, torch.Tensor]:
        model.zero_grad()
        found = training_loss(model, batch, tile=tile, z_loss=coefficient)
        assert not found.loss_sum.requires_grad and not found.z_loss_sum.requires_grad
        torch.testing.assert_close(found.objective_sum.detach(), found.loss_sum + found.z_loss_sum)
        (found.objective_sum * 0.37).backward()
        return {"loss": found.loss_sum, "z_loss": found.z_loss_sum, **gradients_of(model)}

    def wanted() -> dict[str, torch.Tensor]:
        model.zero_grad()
        logits = model(**batch.model_inputs()).logits.float().flatten(0, 1)
        labels, weights = batch.labels_BL.flatten(), batch.label_weights_BL.flatten()
        is_counted = labels != IGNORE_INDEX
        loss = (nn.functional.cross_entropy(logits, labels, reduction="none") * weights).sum()
        z_loss = (coefficient * logits.logsumexp(-1).square() * weights)[is_counted].sum()
        ((loss + z_loss) * 0.37).backward()
        return {"loss": loss.detach(), "z_loss": z_loss.detach(), **gradients_of(model)}

    assert worst_tensor(ours(), wanted()) <= 1e-5


@pytest.mark.parametrize("z_loss", [0.0, 0.05])
def test_a_label_outside_the_vocabulary_is_refused(z_loss: float) -> None:
    with pytest.raises((IndexError, RuntimeError)):
        token_losses(torch.zeros(2, 5), torch.tensor([1, -1]), z_loss)


class Largest(TorchDispatchMode):
    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [one.numel() for one in tree_leaves(result) if isinstance(one, torch.Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return result


@pytest.mark.parametrize("tile", ["off", "auto"])
def test_no_tensor_of_a_step_is_a_quarter_of_the_logits(tile: TileSetting) -> None:
    tokens, vocab = 1024, 6144
    changes = {"vocab_size": vocab, "num_hidden_layers": 1, "max_position_embeddings": tokens}
    model: Any = apply_ulysses(tiny_model(**changes), ALONE)
    batch = shard_batch(torch.arange(tokens) % vocab, None, [16] * (tokens // 16), ALONE)
    with Largest() as largest:
        causal_lm_loss(model, batch, tile=tile)[0].backward()
        score_tokens(model, batch, tile=tile)
    assert (largest.elements < tokens * vocab / 4) == (tile == "auto"), largest.elements


def test_the_gradient_of_a_bf16_head_is_as_exact_as_without_tiles_and_the_loss_is_fp32() -> None:
    tokens, vocab = 1024, 256
    torch.manual_seed(0)
    model: Any = apply_ulysses(tiny_model(vocab_size=vocab, max_position_embeddings=tokens), ALONE).bfloat16()
    batch = shard_batch(torch.randint(0, vocab, (tokens,)), None, [128] * 8, ALONE)
    seen: dict[str, torch.Tensor] = {}

    def watch(head: nn.Module, args: tuple[torch.Tensor]) -> None:
        seen["hidden"] = args[0].detach()
        args[0].register_hook(lambda gradient: seen.update(gradient=gradient.clone()))

    model.lm_head.register_forward_pre_hook(watch)

    def errors(tile: TileSetting) -> tuple[float, float]:
        model.zero_grad()
        loss_sum, num_tokens = causal_lm_loss(model, batch, tile=tile)
        assert loss_sum.dtype == torch.float32
        (loss_sum / num_tokens).backward()
        weight, hidden = (one.detach().double().requires_grad_() for one in (model.lm_head.weight, seen["hidden"]))
        torch.nn.functional.cross_entropy(
            (hidden @ weight.T)[0], batch.labels_BL[0], ignore_index=IGNORE_INDEX
        ).backward()
        pairs = ((model.lm_head.weight.grad, weight.grad), (seen["gradient"], hidden.grad))
        of_weight, of_hidden = (float((ours.double() - truth).norm() / truth.norm()) for ours, truth in pairs)
        return of_weight, of_hidden

    untiled = errors("off")
    for num_tiles in (1, 8, 64):
        tiled = errors(tokens // num_tiles)
        assert tiled[0] <= 1.1 * untiled[0], num_tiles
        # The gradient of hidden states is rounded before it is multiplied by the gradient of the loss.
        assert tiled[1] <= 1.1 * untiled[1], num_tiles


@pytest.mark.slow
def test_compiled_models_are_exact_and_their_decoder_is_compiled_once() -> None:
    model, batch = apply_ulysses(zoo_model("gemma2"), ALONE), make_batch()
    wanted = step(model, batch, "off")
    torch._dynamo.reset()
    graphs: list[int] = []

    def count(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(len(graph.graph.nodes))
        return graph.forward

    compiled = torch.compile(model, backend=count)
    for _ in range(2):
        assert worst_tensor(step(model, batch, TILE, compiled), wanted) <= 1e-5
    assert len(graphs) == 1 and graphs[0] > 50
    torch._dynamo.reset()


def test_a_model_is_as_before_after_a_loss_and_after_an_error() -> None:
    model, batch = apply_ulysses(zoo_model("gemma2"), ALONE), make_batch()
    wanted = model(**batch.model_inputs()).logits
    step(model, batch, TILE)
    assert torch.equal(deepcopy(model)(**batch.model_inputs()).logits, wanted)

    def fail(*args: Any) -> None:
        raise RuntimeError("in the head")

    handle = model.lm_head.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="in the head"):
        causal_lm_loss(model, batch, tile=TILE)
    handle.remove()
    assert torch.equal(model(**batch.model_inputs()).logits, wanted)


def test_a_second_backward_pass_is_refused() -> None:
    loss_sum, _ = causal_lm_loss(apply_ulysses(zoo_model("llama"), ALONE), make_batch(), tile=TILE)
    loss_sum.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"retain_graph=True.*memory\.loss_tile: off"):
        loss_sum.backward()


def test_a_loss_that_a_wrapper_rounds_is_refused() -> None:
    model, batch = apply_ulysses(zoo_model("llama"), ALONE), make_batch()
    # FSDP2 rounds in a forward hook with MixedPrecisionPolicy(output_dtype=torch.bfloat16).
    hook = model.register_forward_hook(lambda *args: args[2].bfloat16() if torch.is_tensor(args[2]) else args[2])
    with pytest.raises(UserError, match=r"casts the loss to torch\.bfloat16, .*; remove output_dtype"):
        causal_lm_loss(model, batch)
    causal_lm_loss(model, batch, tile="off")
    scores = score_tokens(model, batch)
    hook.remove()
    assert torch.equal(scores.losses_BL, score_tokens(model, batch).losses_BL)


def test_a_frozen_head_and_a_frozen_decoder_get_no_gradient() -> None:
    batch = make_batch()
    for frozen in ("lm_head", "model"):
        model: Any = apply_ulysses(zoo_model("llama"), ALONE)
        getattr(model, frozen).requires_grad_(False)
        assert worst_tensor(step(model, batch, TILE), step(model, batch, "off")) <= 1e-5


def test_a_kernel_that_replaced_the_forward_excludes_tiles(caplog: pytest.LogCaptureFixture) -> None:
    model, batch = apply_ulysses(zoo_model("llama"), ALONE), make_batch()
    wanted = step(model, batch, "off")
    model.forward = MethodType(lambda self, **inputs: type(self).forward(self, **inputs), model)
    with pytest.raises(UserError, match=r"replaced by tests\.unit\.engine\.test_tiled_loss.*memory\.loss_tile: off"):
        causal_lm_loss(model, batch, tile=TILE)
    with caplog.at_level(logging.WARNING):
        assert worst_tensor(step(model, batch, "auto"), wanted) == 0
        assert worst_tensor(step(model, batch, "auto"), wanted) == 0
    assert caplog.text.count("the logits of LlamaForCausalLM are computed for all tokens at once") == 1


def test_a_model_with_more_than_a_decoder_and_a_head_is_refused() -> None:
    model = apply_ulysses(zoo_model("llama"), ALONE)
    model.extra = nn.Parameter(torch.ones(2))
    with pytest.raises(UserError, match=r"model, lm_head.*memory\.loss_tile: off"):
        causal_lm_loss(model, make_batch(), tile=TILE)
    del model.extra
    assert list(find_parts(model).heads) == ["lm_head"]


def test_a_sharded_weight_inside_the_head_is_refused_before_ranks_wait_for_one_another() -> None:
    model: Any = apply_ulysses(zoo_model("llama"), ALONE)
    model.lm_head.weight.ds_status = type("Status", (), {"name": "NOT_AVAILABLE"})
    with pytest.raises(UserError, match=r"not gathered the output head's weight.*set_z3_leaf_module\(model\."):
        causal_lm_loss(model, make_batch(), tile=TILE)


def test_label_weights_of_another_shape_are_refused() -> None:
    with pytest.raises(UserError, match=r"label_weights have shape \(1, 3\) but input_ids have shape \(1, 4\)"):
        shard_batch(torch.zeros(4).long(), None, None, ALONE, label_weights=torch.ones(3))


@pytest.mark.parametrize("z_loss", [0.0, 1e-4])
def test_the_planner_counts_the_memory_of_untiled_losses(z_loss: float) -> None:
    shape, tokens = ModelShape.from_config_dict(MODEL | {"vocab_size": 4096}), 512
    terms = {one.name: one.bytes for one in loss_terms(shape, tokens, 4, "off", tokens, z_loss=z_loss > 0)}
    hidden, head = (torch.randn(size, 8, requires_grad=True) for size in (tokens, shape.vocab_size))
    hidden.grad, head.grad = torch.zeros_like(hidden), torch.zeros_like(head)

    def run() -> None:
        losses, z_losses = token_losses(hidden @ head.t(), torch.randint(0, shape.vocab_size, (tokens,)), z_loss)
        total = losses.sum() if z_losses is None else losses.sum() + z_losses.sum()
        del losses, z_losses
        total.backward()

    assert terms["logits"] == pytest.approx(peak_bytes(run), rel=0.01)
