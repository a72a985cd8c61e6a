"""Ulysses attention inside a decoder, in one process; tests/distributed holds it to law 1 over ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ray_ulysses import apply_ulysses, causal_lm_loss, shard_batch
from ray_ulysses.attention.batch import IGNORE_INDEX
from ray_ulysses.errors import UserError
from tests.breadth import fast_only
from tests.unit.attention.meshes import ALONE
from tests.unit.attention.models import VOCAB, magnified, tiny_model

LENGTHS = (9, 1, 6, 12)
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 16, "tie_word_embeddings": True},
    "mistral": {"sliding_window": 4},
    "gpt2": dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop", "summary_first_dropout"), 0.0)
    | {"bos_token_id": 0, "eos_token_id": 0},
}


def row(seed: int = 0) -> torch.Tensor:
    """Return a row of the documents in LENGTHS and 4 tokens of padding."""
    return torch.randint(0, VOCAB, (1, sum(LENGTHS) + 4), generator=torch.Generator().manual_seed(seed))


def model_of(kind: str) -> Any:
    return magnified(tiny_model(kind, **ARCHITECTURES[kind]))


def loss_and_gradients(model: Any) -> tuple[float, dict[str, torch.Tensor]]:
    loss_sum, num_tokens = causal_lm_loss(model, shard_batch(row(), None, LENGTHS, ALONE))
    assert int(num_tokens) == sum(LENGTHS) - len(LENGTHS)
    loss_sum.backward()
    return float(loss_sum.detach()), {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_no_token_attends_across_documents(kind: str) -> None:
    """Bitwise, also between the rows of a batch."""
    model = apply_ulysses(model_of(kind), ALONE)
    before, changed = row().repeat(2, 1), row().repeat(2, 1)
    changed[0, 10:16] = (changed[0, 10:16] + 1) % VOCAB
    with torch.no_grad():
        ours, theirs = (
            model(**shard_batch(ids, None, [LENGTHS, LENGTHS], ALONE).model_inputs()).logits
            for ids in (before, changed)
        )
    kept = torch.ones(before.shape, dtype=torch.bool)
    kept[0, 10:16] = False
    assert torch.equal(ours[kept], theirs[kept])
    assert not torch.equal(ours[~kept], theirs[~kept])


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_gives_the_same_gradients(reentrant: bool) -> None:
    """Bitwise: the recomputed forward sees the same tables and runs the same operations."""
    loss, gradients = loss_and_gradients(apply_ulysses(model_of("mistral"), ALONE).train())
    model: Any = apply_ulysses(model_of("mistral"), ALONE).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    again, recomputed = loss_and_gradients(model)
    assert again == loss
    for name, gradient in gradients.items():
        assert torch.equal(recomputed[name], gradient), name


def test_a_rank_without_labels_still_takes_part_in_the_backward() -> None:
    model: Any = apply_ulysses(model_of("llama"), ALONE)
    labels = torch.full_like(row(), IGNORE_INDEX)
    loss_sum, num_tokens = causal_lm_loss(model, shard_batch(row(), labels, LENGTHS, ALONE))
    assert (loss_sum.item(), int(num_tokens)) == (0.0, 0)
    loss_sum.backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("kind", fast_only(["llama", "qwen3", "mistral", "gpt2"], "llama"))
def test_under_autocast_gradients_are_as_close_as_those_of_eager_attention(kind: str, compiled: bool) -> None:
    """The usual way to bf16 under DDP: fp32 rotary tables leave queries and keys in fp32 and values in bf16."""
    input_ids, exact = row()[:, : sum(LENGTHS)], model_of(kind).double()
    eager, ours = model_of(kind), apply_ulysses(model_of(kind), ALONE)
    called = torch.compile(ours, backend="aot_eager") if compiled else ours
    plain = {"input_ids": input_ids, "use_cache": False}
    inputs = shard_batch(input_ids, None, None, ALONE).model_inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = [eager(**plain).logits, called(**inputs).logits]
    for each in (*logits, exact(**plain).logits):
        loss = torch.nn.functional.cross_entropy(each[0, :-1].double(), input_ids[0, 1:])
        loss.backward()
    errors = [whole_error(model, exact) for model in (eager, ours)]
    # bf16 against fp64, over all gradients: eager attention rounds its weights too, the fused kernel does not.
    assert errors[1] <= 1.2 * errors[0], f"off by {errors[1]:.1e}, eager attention by {errors[0]:.1e}"


def test_a_gradient_of_a_gradient_is_refused() -> None:
    model: Any = apply_ulysses(model_of("llama"), ALONE)
    logits = model(**shard_batch(row(), None, LENGTHS, ALONE).model_inputs()).logits
    weight = model.model.layers[0].self_attn.v_proj.weight
    (gradient,) = torch.autograd.grad(logits.square().sum(), weight, create_graph=True)
    with pytest.raises(UserError, match=r"second derivatives \(create_graph=True\).* remove_ulysses\(model\)"):
        gradient.sum().backward()


def whole_error(model: Any, exact: Any) -> float:
    """Return the norm of the difference of all gradients over the norm of all exact ones."""
    pairs = [(one.grad.double(), two.grad) for one, two in zip(model.parameters(), exact.parameters(), strict=True)]
    difference = torch.stack([(one - two).norm() for one, two in pairs]).norm()
    return float(difference / torch.stack([two.norm() for _, two in pairs]).norm())
