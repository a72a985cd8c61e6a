"""Losses of pairs on one process: log-probabilities of documents, rewards, gradients by hand, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from ray_ulysses import Preference, apply_ulysses, document_log_probs, preference_loss, shard_batch
from ray_ulysses.attention.batch import IGNORE_INDEX, ShardedBatch
from ray_ulysses.errors import UserError
from ray_ulysses.trainer.step import batch_of
from tests.unit.attention.meshes import ALONE
from tests.unit.attention.models import VOCAB, zoo_model
from tests.unit.trainer.test_step import READER

LENGTHS = ((9, 7, 1, 12), (20, 10))


def make_pairs() -> tuple[torch.Tensor, torch.Tensor, ShardedBatch]:
    ids_BS = torch.randint(0, VOCAB, (2, 32), generator=torch.Generator().manual_seed(1))
    labels_BS = ids_BS.clone()
    labels_BS[:, :4] = IGNORE_INDEX
    return ids_BS, labels_BS, shard_batch(ids_BS, labels_BS, LENGTHS, ALONE)


@pytest.mark.parametrize("tile", [5, "off", "auto"])
def test_a_documents_log_probability_is_the_sum_over_its_labels(tile: int) -> None:
    model = zoo_model("llama")
    ids_BS, labels_BS, batch = make_pairs()
    wanted = []
    for row, lengths in enumerate(LENGTHS):
        start = 0
        for length in lengths:
            part, start = slice(start, start + length), start + length
            logits_NV = model(input_ids=ids_BS[row : row + 1, part]).logits[0, :-1]
            losses = torch.nn.functional.cross_entropy(logits_NV, labels_BS[row, part][1:], reduction="none")
            wanted.append(-losses.double().sum().detach())
    found = document_log_probs(apply_ulysses(model, ALONE), batch, tile=tile)
    assert found.dtype == torch.float64 and not found.requires_grad
    torch.testing.assert_close(found, torch.stack(wanted), rtol=1e-6, atol=0)


def test_rewards_are_scaled_differences_from_the_reference() -> None:
    model = apply_ulysses(zoo_model("llama"), ALONE)
    _, _, batch = make_pairs()
    own = document_log_probs(model, batch)
    reference = own - torch.arange(6)
    found = preference_loss(model, batch, Preference(beta=0.5), reference)
    torch.testing.assert_close(found.log_probs_D, own)
    torch.testing.assert_close(found.rewards_D, 0.5 * torch.arange(6, dtype=torch.float64))
    # Each rejected answer has a reward that is 0.5 higher.
    assert found.num_pairs == 3
    assert float(found.loss_sum) == pytest.approx(3 * float(torch.nn.functional.softplus(torch.tensor(0.5))), rel=1e-6)
    zero = preference_loss(model, batch, Preference(), own)
    assert float(zero.loss_sum) == pytest.approx(3 * 0.6931471805599453)


@pytest.mark.parametrize("shift", [3.0, -9.0])
def test_labeled_answers_are_compared_with_the_divergence_of_their_row(shift: float) -> None:
    """KTO of two rows, against TRL's formulas; with a shift of -9, the KL divergence of the second row is 0."""
    model = apply_ulysses(zoo_model("llama"), ALONE)
    _, _, batch = make_pairs()
    own = document_log_probs(model, batch)
    gained = torch.tensor([0.5, 1.0, -2.0, 2.0, 1.5, shift], dtype=torch.float64)
    preference = Preference(kind="kto", beta=0.3, desirable_weight=1.5, undesirable_weight=0.5)
    is_good = torch.tensor([True, False, False])
    found = preference_loss(model, batch, preference, own - gained, desirable_P=is_good)
    kl = [1.5, 1.5, max(shift, 0.0)]
    sigmoid = lambda value: 1 / (1 + math.exp(-value))  # noqa: E731
    wanted = [
        1.5 * (1 - sigmoid(0.3 * (0.5 - kl[0]))),
        0.5 * (1 - sigmoid(0.3 * (kl[1] + 2.0))),
        0.5 * (1 - sigmoid(0.3 * (kl[2] - 1.5))),
    ]
    assert float(found.loss_sum) == pytest.approx(sum(wanted), rel=1e-6)
    rewards = [0.3 * one for pair in zip((0.5, -2.0, 1.5), kl, strict=True) for one in pair]
    assert found.rewards_D.tolist() == pytest.approx(rewards, rel=1e-5, abs=1e-6)
    log_probs = own.clone().requires_grad_()
    preference.labeled_losses(log_probs, own - gained, is_good, [2, 1])[0].sum().backward()
    assert log_probs.grad is not None and not log_probs.grad[1::2].any(), "the KL divergence has no gradient"
    assert (log_probs.grad[::2] < 0).tolist() == is_good.tolist()


@pytest.mark.parametrize("tile", [5, "off"])
def test_a_row_of_padding_has_no_pairs_and_a_gradient_of_zero(tile: int) -> None:
    model = apply_ulysses(zoo_model("llama"), ALONE)
    filler = batch_of(READER.filler(0, 1), ALONE, torch.device("cpu"))
    nothing, no_labels = torch.zeros(0, dtype=torch.float64), torch.zeros(0, dtype=torch.bool)
    for found in (
        preference_loss(model, filler, Preference(kind="simpo"), tile=tile),
        preference_loss(model, filler, Preference(kind="kto"), nothing, desirable_P=no_labels, tile=tile),
    ):
        found.objective_sum.backward()
        assert (float(found.loss_sum), found.num_pairs, len(found.rewards_D)) == (0.0, 0, 0)
        assert not any(parameter.grad.any() for parameter in model.parameters() if parameter.grad is not None)
    assert len(document_log_probs(model, filler)) == 0


def test_an_answer_without_labels_counts_as_certain() -> None:
    _, rewards = Preference(kind="simpo").losses(
        torch.tensor([0.0, -4.0], dtype=torch.float64), torch.tensor([0.0, 2.0], dtype=torch.float64), None
    )
    assert rewards.tolist() == [0.0, pytest.approx(-0.2)]


def test_a_certain_answer_has_finite_odds() -> None:
    log_probs = torch.tensor([0.0, -4.0], dtype=torch.float64, requires_grad=True)
    losses, _ = Preference(kind="orpo").losses(log_probs, torch.tensor([1.0, 2.0], dtype=torch.float64), None)
    losses.sum().backward()
    assert losses.isfinite().all() and log_probs.grad is not None and log_probs.grad.isfinite().all()


@pytest.mark.parametrize(
    "settings",
    [
        {"kind": "rloo"}, {"desirable_weight": 2.0}, {"kind": "kto", "undesirable_weight": 0.0},
        {"kind": "kto", "sft_weight": 0.1}, {"beta": 0.0}, {"beta": math.nan}, {"kind": "ipo", "label_smoothing": 0.1},
        {"label_smoothing": 0.5}, {"sft_weight": -1.0}, {"kind": "dpo", "margin": 0.5},
    ],
)  # fmt: skip
def test_settings_that_the_loss_does_not_have_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=[*settings][-1]):
        Preference(**settings)


def test_a_router_loss_is_refused() -> None:
    model = apply_ulysses(zoo_model("mixtral", output_router_logits=True), ALONE)
    _, _, batch = make_pairs()
    with pytest.raises(UserError, match="output_router_logits"):
        preference_loss(model, batch, Preference(kind="simpo"))


def test_what_is_no_pair_or_lacks_a_reference_is_refused() -> None:
    model = apply_ulysses(zoo_model("llama"), ALONE)
    _, _, batch = make_pairs()
    with pytest.raises(UserError, match="needs log-probabilities of a reference model"):
        preference_loss(model, batch, Preference())
    with pytest.raises(UserError, match="has no use for log-probabilities"):
        preference_loss(model, batch, Preference(kind="orpo"), torch.zeros(6))
    with pytest.raises(UserError, match="6 documents, but reference_D has 2 values"):
        preference_loss(model, batch, Preference(), torch.zeros(2))
    with pytest.raises(UserError, match="needs labels of answers"):
        preference_loss(model, batch, Preference(kind="kto"), torch.zeros(6))
    with pytest.raises(UserError, match="has no use for labels"):
        preference_loss(model, batch, Preference(), torch.zeros(6), desirable_P=torch.ones(3, dtype=torch.bool))
    labels = torch.ones(2, dtype=torch.bool)
    with pytest.raises(UserError, match="3 labeled answers, but desirable_P has 2"):
        preference_loss(model, batch, Preference(kind="kto"), torch.zeros(6), desirable_P=labels)
    ids = torch.zeros(1, 16, dtype=torch.int64)
    with pytest.raises(UserError, match="keep both answers in a row"):
        preference_loss(model, shard_batch(ids, None, ((5, 6, 5),), ALONE), Preference(kind="simpo"))
    weighted = shard_batch(ids, None, ((8, 8),), ALONE, label_weights=torch.ones(1, 16))
    with pytest.raises(UserError, match="label weights"):
        preference_loss(model, weighted, Preference(kind="simpo"))
    with pytest.raises(UserError, match="label weights"):
        document_log_probs(model, weighted)
