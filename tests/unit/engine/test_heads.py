"""Heads on one process: how a head pools, vectors that ignore neighbors, padding, the contrastive loss, refusals."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from ray_ulysses import apply_ulysses, shard_batch
from ray_ulysses.engine.heads import classification_loss, contrastive_loss, document_vectors, pooling_of
from ray_ulysses.errors import UserError
from ray_ulysses.trainer.step import batch_of
from tests.distributed.heads_case import NUM_CLASSES, head_model
from tests.unit.attention.meshes import ALONE
from tests.unit.attention.models import VOCAB, plain_config
from tests.unit.trainer.test_step import READER

LENGTHS = ((9, 7, 1, 12), (20, 10))
IDS_BS = torch.randint(1, VOCAB, (2, 32), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("pooling", ["first", "last", "mean"])
def test_a_documents_vector_does_not_depend_on_its_neighbors(pooling: Any) -> None:
    model = apply_ulysses(head_model("llama", pooling), ALONE)
    other_BS = torch.randint(1, VOCAB, (2, 32), generator=torch.Generator().manual_seed(2))
    other_BS[0, 9:16] = IDS_BS[0, 9:16]
    vectors, others = (
        document_vectors(model, shard_batch(ids, None, LENGTHS, ALONE), pooling) for ids in (IDS_BS, other_BS)
    )
    assert torch.equal(vectors[1], others[1])
    assert not any(torch.equal(vectors[at], others[at]) for at in (0, 2, 3, 4, 5))


def test_a_classifier_gives_the_vectors_of_its_trunk() -> None:
    model = apply_ulysses(head_model("llama", "class"), ALONE)
    batch = shard_batch(IDS_BS, None, LENGTHS, ALONE)
    logits = model.score(document_vectors(model, batch, "last"))
    torch.testing.assert_close(classification_loss(model, batch, [0] * 6).logits_DC, logits, rtol=1e-5, atol=1e-6)
    assert "forward" not in vars(model)


def test_a_row_of_padding_has_no_documents_and_a_gradient_of_zero() -> None:
    model = apply_ulysses(head_model("llama", "class"), ALONE)
    filler = batch_of(READER.filler(0, 1), ALONE, torch.device("cpu"))
    found = classification_loss(model, filler, [])
    found.objective_sum.backward()
    assert (float(found.loss_sum), found.num_documents, found.logits_DC.shape) == (0.0, 0, (0, NUM_CLASSES))
    assert not any(parameter.grad.any() for parameter in model.parameters() if parameter.grad is not None)
    assert document_vectors(model, filler, "mean").shape == (0, 32)


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "gemma2", "mixtral", "gpt2"])
def test_decoders_pool_the_last_token(name: str) -> None:
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(plain_config(name, num_labels=3))
    assert pooling_of(model) == "last"


class _MeanOfLogits(torch.nn.Module):
    """A head that is no function of one vector of a document."""

    def forward(self, hidden_BLH: torch.Tensor) -> torch.Tensor:
        return hidden_BLH.square().mean(1, keepdim=True)[..., :3].expand(-1, hidden_BLH.shape[1], -1)


def test_a_head_that_pools_in_another_way_is_refused() -> None:
    model = head_model("llama", "class")
    model.score = _MeanOfLogits()
    with pytest.raises(UserError, match="neither the first token, nor the last one, nor the mean"):
        pooling_of(model)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_labels": 1}, "num_labels=1"),
        ({"problem_type": "multi_label_classification"}, "problem_type=multi_label_classification"),
    ],
)
def test_other_problems_are_refused(changes: dict[str, Any], reason: str) -> None:
    model = head_model("llama", "class")
    model.config.update(changes)
    with pytest.raises(UserError, match=reason):
        pooling_of(model)


def test_wrong_classes_and_models_are_refused() -> None:
    model = apply_ulysses(head_model("llama", "class"), ALONE)
    batch = shard_batch(IDS_BS, None, LENGTHS, ALONE)
    with pytest.raises(UserError, match=re.escape("the batch has 6 documents")):
        classification_loss(model, batch, [0])
    for wrong in (3, -1):
        with pytest.raises(UserError, match=re.escape(f"contains {wrong}, but the model has the classes 0 to 2")):
            classification_loss(model, batch, [0, 1, wrong, 0, 0, 0])
    with pytest.raises(UserError, match="does not classify documents"):
        pooling_of(head_model("llama", "mean"))
    with pytest.raises(UserError, match="pooling='max'"):
        document_vectors(model, batch, "max")  # type: ignore[arg-type]


def test_the_contrastive_loss_has_all_positives_as_negatives() -> None:
    generator = torch.Generator().manual_seed(3)
    # More queries than are compared at a time.
    vectors = [torch.randn(size, 8, generator=generator, dtype=torch.float64) for size in (1500, 0, 700)]
    found = contrastive_loss([one.float() for one in vectors], ALONE, 0.2)
    whole = torch.cat(vectors).requires_grad_()
    queries, positives = whole[::2], whole[1::2]
    scores = torch.cosine_similarity(queries[:, None], positives[None], dim=-1) / 0.2
    losses = scores.logsumexp(1) - scores.diagonal()
    losses.sum().backward()
    assert found.num_pairs == 1100 and found.num_right == int((scores.argmax(1) == torch.arange(1100)).sum())
    assert found.loss_sum == pytest.approx(float(losses.detach().sum()), rel=1e-5)
    assert [len(one) for one in found.gradients] == [1500, 0, 700] and whole.grad is not None
    torch.testing.assert_close(torch.cat(found.gradients).double(), whole.grad, rtol=1e-4, atol=1e-6)


def test_half_a_pair_and_a_temperature_of_zero_are_refused() -> None:
    with pytest.raises(UserError, match="even number"):
        contrastive_loss([torch.zeros(3, 8)], ALONE)
    with pytest.raises(UserError, match="temperature=0"):
        contrastive_loss([torch.zeros(2, 8)], ALONE, 0)
