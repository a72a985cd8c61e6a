"""Computes the loss of a row slice, of tokens or of documents, and means over rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ray_ulysses.attention.batch import ShardedBatch
from ray_ulysses.data.read.reader import RowSlice
from ray_ulysses.engine.loss import training_loss
from ray_ulysses.engine.tiled_loss import TokenLoss
from ray_ulysses.parallel.layout import TileSetting
from ray_ulysses.trainer.row_objectives import NUM_SUMS, RowObjective

NUM_ADDED = 2 + NUM_SUMS
"""Number of sums beside the loss."""


class RowLoss(NamedTuple):
    """Loss of a slice, in sums over tokens or documents."""

    objective_sum: torch.Tensor
    """fp32 scalar to differentiate once."""
    loss_sum: torch.Tensor
    """Scalar, detached: cross-entropy in nats, the token loss, or the loss of the objective."""
    added: torch.Tensor
    """fp64 [8]: z-loss, router loss, and `ObjectiveLoss.sums`."""
    losses: torch.Tensor
    """Loss of each token of the slice or, with an objective of documents, of each piece of the row."""


class SetLoss(NamedTuple):
    """Result of an evaluation on a set of rows."""

    loss: float
    """Mean over supervised tokens, documents or pairs."""
    tokens: int
    """Number of supervised tokens."""
    counted: int = 0
    """Number of documents or pairs, with an objective of documents."""
    accuracy: float | None = None
    """Fraction of the documents whose class is predicted, or of the pairs whose chosen answer is preferred; for labeled
    answers, see `StepDone.pair_accuracy`."""


def row_loss(
    engine: Any,
    batch: ShardedBatch,
    row: RowSlice,
    *,
    tile: TileSetting,
    z_loss: float = 0.0,
    token_loss: TokenLoss | None = None,
    objective: RowObjective | None = None,
) -> RowLoss:
    """Run the forward pass, and return the loss of a slice. All ranks of ``sp`` must call this function."""
    added = torch.zeros(NUM_ADDED, dtype=torch.float64, device=batch.labels_BL.device)
    if objective is None:
        found = training_loss(engine, batch, tile=tile, z_loss=z_loss, token_loss=token_loss)
        added[:2] = torch.stack([found.z_loss_sum, found.router_loss_sum])
        return RowLoss(found.objective_sum, found.loss_sum, added, found.losses_N)
    of_documents = objective.loss(engine, batch, row, tile)
    added[2:] = of_documents.sums
    return RowLoss(of_documents.objective_sum, of_documents.loss_sum, added, of_documents.losses_P)


def combined(found: Sequence[SetLoss]) -> SetLoss:
    """Return the result of several sets together."""
    tokens, counted = sum(one.tokens for one in found), sum(one.counted for one in found)
    loss = math.fsum(one.loss * (one.counted or one.tokens) for one in found) / (counted or tokens or 1)
    accuracy = math.fsum((one.accuracy or 0.0) * one.counted for one in found) / counted if counted else None
    return SetLoss(loss, tokens, counted, accuracy)
