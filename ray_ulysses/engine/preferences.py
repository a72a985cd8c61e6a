"""Losses of answers: DPO, IPO, ORPO, SimPO and KTO, as functions of each answer's summed log-probability.

A row holds whole pairs: each chosen answer is followed by its rejected answer, as two documents that repeat the prompt.
For KTO, a pair is a labeled answer, followed by its prompt with another answer.
Labels cover the answers only. A document may cross slices, ring steps and tiles: its log-probabilities are summed over
all ranks of ``sp`` first, and the gradient of the loss by that sum then weighs the document's tokens.

Legend: R rows, P pairs, D = 2 P documents, N tokens of this rank's slice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch.nn.functional import logsigmoid

from ray_ulysses.engine.loss import document_sums, training_loss
from ray_ulysses.engine.model_parts import inner_model
from ray_ulysses.engine.router_loss import router_loss_of
from ray_ulysses.errors import UserError

if TYPE_CHECKING:
    from ray_ulysses.attention.batch import ShardedBatch
    from ray_ulysses.config import Config
    from ray_ulysses.parallel.layout import TileSetting

PreferenceKind = Literal["dpo", "ipo", "orpo", "simpo", "kto"]
_LEAST_NATS = 1e-7


@dataclass(frozen=True, kw_only=True, slots=True)
class Preference:
    """A loss of pairs.

    ``dpo`` compares the answers' log-probabilities with those of a reference model (https://arxiv.org/abs/2305.18290).
    ``ipo`` regresses the difference to ``1 / (2 beta)`` (https://arxiv.org/abs/2310.12036). ``simpo`` and ``orpo`` need
    no reference (https://arxiv.org/abs/2405.14734, https://arxiv.org/abs/2403.07691). ``kto`` raises or
    lowers a single labeled answer, relative to a reference (https://arxiv.org/abs/2402.01306). All but ``dpo`` and
    ``kto`` divide each log-probability by the answer's number of supervised tokens.
    """

    kind: PreferenceKind = "dpo"
    beta: float = 0.1
    """Scale of the rewards, above 0; for ``orpo``, weight of the odds."""
    label_smoothing: float = 0.0
    """Probability that a pair's answers are exchanged, below 0.5; for ``dpo`` and ``simpo``."""
    sft_weight: float = 0.0
    """Weight of the chosen answer's mean negative log-probability. ``orpo`` always adds it with weight 1."""
    margin: float = 0.0
    """Target difference of a pair's rewards, for ``simpo`` (its gamma)."""
    desirable_weight: float = 1.0
    """For ``kto``, weight of the loss of desirable answers."""
    undesirable_weight: float = 1.0
    """For ``kto``, weight of the loss of undesirable answers."""

    def __post_init__(self) -> None:
        """Raise UserError for a setting that the kind of loss does not have, or an impossible value."""
        kinds = get_args(PreferenceKind)
        if self.kind not in kinds:
            raise UserError(f"kind={self.kind!r} is not a preference loss; use one of {', '.join(kinds)}")
        if not self.beta > 0:
            raise UserError(f"beta={self.beta} must be above 0")
        if not 0 <= self.label_smoothing < 0.5:
            raise UserError(f"label_smoothing={self.label_smoothing} must be at least 0 and below 0.5")
        if self.label_smoothing and self.kind not in ("dpo", "simpo"):
            raise UserError(
                f"label_smoothing={self.label_smoothing} is a setting of dpo and simpo; use 0 for {self.kind}"
            )
        if not self.sft_weight >= 0:
            raise UserError(f"sft_weight={self.sft_weight} must not be negative")
        if self.margin and self.kind != "simpo":
            raise UserError(f"margin={self.margin} is a setting of simpo; use 0 for {self.kind}")
        if self.sft_weight and self.kind == "kto":
            raise UserError(f"sft_weight={self.sft_weight} is not a setting of kto; use 0")
        for name in ("desirable_weight", "undesirable_weight"):
            if not getattr(self, name) > 0 or (getattr(self, name) != 1 and self.kind != "kto"):
                raise UserError(f"{name}={getattr(self, name)} must be above 0 for kto, and 1 for other losses")

    @property
    def needs_reference(self) -> bool:
        """Whether the loss depends on a reference model."""
        return self.kind in ("dpo", "ipo", "kto")

    def losses(
        self, log_probs_D: torch.Tensor, tokens_D: torch.Tensor, reference_D: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each pair's loss and each document's reward. For ``kto``, see `labeled_losses`.

        Args:
            log_probs_D: Summed log-probability of each document's labels, fp64; differentiable.
            tokens_D: Number of each document's labels.
            reference_D: Summed log-probability of the same labels under the reference model, if it is needed.

        Returns:
            Losses, fp64 ``[P]``, and rewards, fp64 ``[D]``, detached.
        """
        means_D = log_probs_D / tokens_D.clamp(min=1)
        used_D = log_probs_D if self.kind == "dpo" else means_D
        if reference_D is not None:
            used_D = used_D - (reference_D if self.kind == "dpo" else reference_D / tokens_D.clamp(min=1))
        rewards_D = self.beta * used_D
        chosen_P, rejected_P = rewards_D.view(-1, 2).unbind(1)
        if self.kind == "ipo":
            losses_P = ((chosen_P - rejected_P) / self.beta - 1 / (2 * self.beta)).square()
        elif self.kind == "orpo":
            # A probability of 1 has infinite odds.
            log_odds_D = means_D - torch.log1p(-means_D.clamp(max=-_LEAST_NATS).exp())
            losses_P = -self.beta * logsigmoid(log_odds_D[::2] - log_odds_D[1::2]) - means_D[::2]
        else:
            gain_P, smoothing = chosen_P - rejected_P - self.margin, self.label_smoothing
            losses_P = -(1 - smoothing) * logsigmoid(gain_P) - smoothing * logsigmoid(-gain_P)
        return losses_P - self.sft_weight * means_D[::2], rewards_D.detach()

    def labeled_losses(
        self, log_probs_D: torch.Tensor, reference_D: torch.Tensor, desirable_P: torch.Tensor, pairs_R: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the losses and rewards of ``kto``, with the formulas of TRL's ``KTOTrainer``.

        The KL divergence is the mean over the second documents of a row, or 0 if the mean is negative. It has no
        gradient. TRL takes the mean over a micro-batch of all devices.

        Args:
            log_probs_D: Summed log-probability of each document's labels, fp64; differentiable.
            reference_D: The same under the reference model.
            desirable_P: Whether the first document of each pair is desirable.
            pairs_R: Number of pairs in each row.

        Returns:
            Losses, fp64 ``[P]``, and rewards, fp64 ``[D]``, detached. The reward of each second document is that of an
            answer whose log-probability has grown by the row's KL divergence.
        """
        gained_P, foreign_P = (log_probs_D - reference_D).view(-1, 2).unbind(1)
        rows = foreign_P.detach().split([*pairs_R])
        kl_P = torch.cat([row.mean().clamp(min=0).expand(len(row)) for row in rows])
        gain_P = self.beta * torch.where(desirable_P, gained_P - kl_P, kl_P - gained_P)
        weight_P = torch.where(desirable_P, self.desirable_weight, self.undesirable_weight).double()
        rewards_D = self.beta * torch.stack([gained_P.detach(), kl_P], dim=1).flatten()
        # 1 - sigmoid(x) without cancellation.
        return weight_P * torch.sigmoid(-gain_P), rewards_D


def preference_of(config: Config) -> Preference | None:
    """Return the run's loss of answers, or None if it has another objective."""
    return Preference(**config.objective.own_settings()) if config.objective.uses_answers else None


@dataclass(frozen=True, kw_only=True, slots=True)
class PreferenceLoss:
    """The loss of a batch's pairs. One rank of ``sp`` counts them, so that sums over all ranks are right."""

    objective_sum: torch.Tensor
    """fp32 scalar to differentiate once. Only its gradient has a meaning; ``loss_sum`` has the value."""
    loss_sum: torch.Tensor
    """fp64 scalar, detached: the sum of the pairs' losses, or 0 if another rank of ``sp`` counts them."""
    losses_P: torch.Tensor
    """Loss of each pair, fp64, detached, equal on all ranks of ``sp``."""
    num_pairs: int
    """Number of pairs, or 0 if another rank of ``sp`` counts them."""
    rewards_D: torch.Tensor
    """Reward of each document, fp64, equal on all ranks of ``sp``. A chosen or desirable answer should have the larger
    one of its pair, and an undesirable answer the smaller one."""
    log_probs_D: torch.Tensor
    """Summed log-probability of each document, fp64, equal on all ranks of ``sp``."""


def preference_loss(
    model: Callable[..., Any],
    batch: ShardedBatch,
    preference: Preference,
    reference_D: torch.Tensor | None = None,
    *,
    desirable_P: torch.Tensor | None = None,
    tile: TileSetting = "auto",
) -> PreferenceLoss:
    """Run the forward pass and return the loss of the batch's pairs. All ranks of ``sp`` must call this function.

    The mean over all pairs has the gradient of ``objective_sum * loss_scale(global_pairs, mesh, ...)``.

    Args:
        model: The model, or the engine that wraps the model.
        batch: This rank's slice of rows that hold whole pairs.
        preference: The loss.
        reference_D: Summed log-probability of each document under the reference model: `document_log_probs` of it.
        desirable_P: For ``kto``, whether the first document of each pair is desirable, bool.
        tile: Number of tokens whose logits exist at a time, as in `causal_lm_loss`.

    Raises:
        UserError: A row holds half a pair, the reference or the labels are missing or superfluous, or see
            `causal_lm_loss`.
    """
    numbers = [len(lengths) for lengths in batch.documents.lengths]
    if any(number % 2 for number in numbers):
        raise UserError(f"the rows have {numbers} documents, but pairs need an even number; keep both answers in a row")
    if preference.needs_reference != (reference_D is not None):
        needs = "needs" if preference.needs_reference else "has no use for"
        raise UserError(f"the preference loss {preference.kind!r} {needs} log-probabilities of a reference model")
    if reference_D is not None and len(reference_D) != sum(numbers):
        raise UserError(f"the batch has {sum(numbers)} documents, but reference_D has {len(reference_D)} values")
    if (preference.kind == "kto") != (desirable_P is not None):
        needs = "needs" if preference.kind == "kto" else "has no use for"
        raise UserError(f"the preference loss {preference.kind!r} {needs} labels of answers (desirable_P)")
    if desirable_P is not None and len(desirable_P) != sum(numbers) // 2:
        raise UserError(f"the batch has {sum(numbers) // 2} labeled answers, but desirable_P has {len(desirable_P)}")
    if router_loss_of(inner_model(model)) is not None:
        raise UserError(
            "the router loss is a mean over tokens, which does not fit a mean over pairs; set "
            "model.config.output_router_logits = False"
        )
    _refuse_weights(batch)
    found: list[torch.Tensor] = []

    def loss_of(log_probs_D: torch.Tensor, tokens_D: torch.Tensor) -> torch.Tensor:
        if desirable_P is not None and reference_D is not None:
            is_good_P = desirable_P.to(log_probs_D.device)
            pairs_R = [number // 2 for number in numbers]
            losses_P, rewards_D = preference.labeled_losses(log_probs_D, reference_D, is_good_P, pairs_R)
        else:
            losses_P, rewards_D = preference.losses(log_probs_D, tokens_D, reference_D)
        found[:] = [losses_P.detach(), rewards_D, log_probs_D.detach()]
        return losses_P.sum()

    objective_sum = training_loss(model, batch, tile=tile, document_loss=loss_of).objective_sum
    losses_P, rewards_D, log_probs_D = found
    counts = batch.mesh.sp_rank == 0
    return PreferenceLoss(
        objective_sum=objective_sum,
        loss_sum=losses_P.sum() * counts,
        losses_P=losses_P,
        num_pairs=sum(numbers) // 2 if counts else 0,
        rewards_D=rewards_D,
        log_probs_D=log_probs_D,
    )


def document_log_probs(model: Callable[..., Any], batch: ShardedBatch, *, tile: TileSetting = "auto") -> torch.Tensor:
    """Return the summed log-probability of each document's labels, fp64 ``[D]``, equal on all ranks of ``sp``.

    Documents are numbered through all rows of the batch. All ranks of ``sp`` must call this function.

    Raises:
        UserError: The batch has label weights, or see `causal_lm_loss`.
    """
    _refuse_weights(batch)
    with torch.no_grad():
        return document_sums(batch, training_loss(model, batch, tile=tile).losses_N)[0]


def _refuse_weights(batch: ShardedBatch) -> None:
    if batch.label_weights_BL is not None:
        raise UserError("label weights do not apply to log-probabilities of documents; shard the batch without them")
