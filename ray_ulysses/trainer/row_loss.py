"""Computes the loss of a row slice, of the next token or of pairs of answers, and means over rows."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ray_ulysses.engine.loss import training_loss
from ray_ulysses.engine.preferences import preference_loss

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ray_ulysses.attention.batch import ShardedBatch
    from ray_ulysses.engine.preferences import Preference
    from ray_ulysses.engine.tiled_loss import TokenLoss
    from ray_ulysses.parallel.layout import TileSetting

NUM_ADDED = 7
"""Number of sums beside the loss."""


class RowLoss(NamedTuple):
    """Loss of a slice, in sums over tokens or pairs."""

    objective_sum: torch.Tensor
    """fp32 scalar to differentiate once."""
    loss_sum: torch.Tensor
    """Scalar, detached: cross-entropy in nats, the token loss, or the loss of pairs."""
    added: torch.Tensor
    """fp64 [7]: z-loss, router loss, pairs, pairs whose chosen answer is preferred, chosen and rejected rewards, and
    log-probabilities minus those of the reference model; the last is NaN without a reference model."""
    losses_N: torch.Tensor | None
    """Loss of each token, or None for a loss of pairs."""


class PairMetrics(NamedTuple):
    """Means over pairs of answers."""

    accuracy: float
    """Fraction of the pairs whose chosen answer has the larger reward."""
    margin: float
    """Reward of the chosen answer minus reward of the rejected one."""
    chosen_reward: float
    kl: float | None = None
    """Mean over answers of the log-probability minus that of the reference model, in nats; None without one."""

    @classmethod
    def of(cls, sums: Sequence[float]) -> PairMetrics | None:
        """Return the means of the last five values of `RowLoss.added`, or None without pairs."""
        num_pairs, num_right, chosen, rejected, gained = sums
        if not num_pairs:
            return None
        kl = None if math.isnan(gained) else gained / (2 * num_pairs)
        return cls(num_right / num_pairs, (chosen - rejected) / num_pairs, chosen / num_pairs, kl)


class SetLoss(NamedTuple):
    """Result of an evaluation on a set of rows."""

    loss: float
    """Mean over supervised tokens, or over pairs."""
    tokens: int
    """Number of supervised tokens."""
    pairs: int = 0
    accuracy: float | None = None
    """Fraction of the pairs whose chosen answer has the larger reward."""


def row_loss(
    engine: Any,
    batch: ShardedBatch,
    reference_D: torch.Tensor | None,
    preference: Preference | None,
    tile: TileSetting,
    z_loss: float = 0.0,
    token_loss: TokenLoss | None = None,
) -> RowLoss:
    """Run the forward pass, and return the loss of a slice. All ranks of ``sp`` must call this function.

    ``reference_D`` has the log-probability of each document under the reference model, fp64, if there is one.
    """
    added = torch.zeros(NUM_ADDED, dtype=torch.float64, device=batch.labels_BL.device)
    if preference is None:
        found = training_loss(engine, batch, tile=tile, z_loss=z_loss, token_loss=token_loss)
        added[:2] = torch.stack([found.z_loss_sum, found.router_loss_sum])
        return RowLoss(found.objective_sum, found.loss_sum, added, found.losses_N)
    pairs = preference_loss(engine, batch, preference, reference_D, tile=tile)
    if batch.mesh.sp_rank == 0:
        chosen_P, rejected_P = pairs.rewards_D.view(-1, 2).unbind(1)
        num_right = (chosen_P > rejected_P).sum()
        added[2] = pairs.num_pairs
        gained = chosen_P.new_tensor(math.nan) if reference_D is None else (pairs.log_probs_D - reference_D).sum()
        added[3:] = torch.stack([num_right.double(), chosen_P.sum(), rejected_P.sum(), gained])
    return RowLoss(pairs.objective_sum, pairs.loss_sum, added, None)


def combined(found: Sequence[SetLoss]) -> SetLoss:
    """Return the result of several sets together."""
    tokens, pairs = sum(one.tokens for one in found), sum(one.pairs for one in found)
    loss = math.fsum(one.loss * (one.pairs or one.tokens) for one in found) / (pairs or tokens)
    accuracy = math.fsum((one.accuracy or 0.0) * one.pairs for one in found) / pairs if pairs else None
    return SetLoss(loss, tokens, pairs, accuracy)
