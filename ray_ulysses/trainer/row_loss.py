"""Computes the loss of a row slice, of tokens or by an objective of documents: losses of pairs, and classes."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from ray_ulysses.attention.batch import ShardedBatch
from ray_ulysses.config import Config
from ray_ulysses.data.plan.corpus_set import CorpusSet
from ray_ulysses.data.plan.rows import Piece
from ray_ulysses.data.read.reader import RowReader, RowSlice
from ray_ulysses.engine.heads import (
    Pooling,
    classification_loss,
    contrastive_loss,
    contrastive_objective,
    document_vectors,
)
from ray_ulysses.engine.loss import training_loss
from ray_ulysses.engine.preferences import Preference, preference_loss, preference_of
from ray_ulysses.engine.tiled_loss import TokenLoss
from ray_ulysses.parallel.layout import TileSetting

NUM_SUMS = 6
"""Number of sums of an objective beside its loss."""
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


class ObjectiveLoss(NamedTuple):
    """Loss of a slice's documents. One rank of ``sp`` counts them."""

    objective_sum: torch.Tensor
    """fp32 scalar to differentiate once."""
    loss_sum: torch.Tensor
    """fp64 scalar, detached."""
    sums: torch.Tensor
    """fp64 [6]: counted documents or pairs, right ones, and four sums of the objective's own."""
    losses_P: torch.Tensor
    """Loss of each piece of the row: of a document, or of a pair; equal on all ranks of ``sp``."""


class RowObjective(Protocol):
    """An objective whose loss is a mean over documents, or over pairs of documents."""

    def prepared(
        self, engine: Any, slices: Iterable[RowSlice], batch_of: Callable[[RowSlice], ShardedBatch], ends: Sequence[int]
    ) -> Iterable[RowSlice]:
        """Return the slices of a step or an evaluation, after computing what their losses have in common.

        All ranks must call this method before `loss`, with the same number of slices. ``batch_of`` returns a slice as a
        batch, with the random state of its row. ``ends`` contains the row after the last of each set of rows whose
        losses are independent.
        """
        ...

    def loss(self, engine: Any, batch: ShardedBatch, row: RowSlice, tile: TileSetting) -> ObjectiveLoss:
        """Run the forward pass, and return the loss of a slice. All ranks of ``sp`` must call this method."""
        ...

    def metrics(self, sums: Sequence[float]) -> dict[str, float]:
        """Return metrics by field of `StepDone`, from `ObjectiveLoss.sums` added up over a step."""
        ...


class _RowByRow:
    """Base of objectives whose slices need no preparation."""

    __slots__ = ()

    def prepared(self, engine: Any, slices: Iterable[RowSlice], *_: Any) -> Iterable[RowSlice]:
        """See `RowObjective.prepared`."""
        return slices


@dataclass(frozen=True, kw_only=True, slots=True)
class PairObjective(_RowByRow):
    """A loss of pairs of answers."""

    preference: Preference
    reference: Callable[[RowSlice], torch.Tensor] | None
    """Returns the log-probability of each answer of a row under the reference model, fp64, if the loss needs it."""

    def loss(self, engine: Any, batch: ShardedBatch, row: RowSlice, tile: TileSetting) -> ObjectiveLoss:
        """See `RowObjective.loss`."""
        reference_D = None if self.reference is None else self.reference(row)
        pairs = preference_loss(engine, batch, self.preference, reference_D, tile=tile)
        sums = torch.zeros(NUM_SUMS, dtype=torch.float64, device=batch.labels_BL.device)
        if batch.mesh.sp_rank == 0:
            chosen_P, rejected_P = pairs.rewards_D.view(-1, 2).unbind(1)
            sums[0] = pairs.num_pairs
            sums[1:4] = torch.stack([(chosen_P > rejected_P).sum().double(), chosen_P.sum(), rejected_P.sum()])
            sums[4] = 0 if reference_D is None else (pairs.log_probs_D - reference_D).sum()
        return ObjectiveLoss(pairs.objective_sum, pairs.loss_sum, sums, pairs.losses_P)

    def metrics(self, sums: Sequence[float]) -> dict[str, float]:
        """See `RowObjective.metrics`."""
        num_pairs, num_right, chosen, rejected, gained, _ = sums
        kl = {} if self.reference is None else {"pair_kl": gained / (2 * num_pairs)}
        return kl | {
            "pair_accuracy": num_right / num_pairs,
            "pair_margin": (chosen - rejected) / num_pairs,
            "chosen_reward": chosen / num_pairs,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class LabeledObjective(_RowByRow):
    """A loss of answers that are labeled as desirable or not (KTO)."""

    preference: Preference
    reference: Callable[[RowSlice], torch.Tensor]
    """See `PairObjective.reference`."""
    classes: Callable[[RowSlice], Sequence[str]]
    """Returns the class of each document of a row, ``true`` if it is desirable."""

    def loss(self, engine: Any, batch: ShardedBatch, row: RowSlice, tile: TileSetting) -> ObjectiveLoss:
        """See `RowObjective.loss`."""
        device = batch.labels_BL.device
        desirable_P = torch.tensor([one == "true" for one in self.classes(row)], dtype=torch.bool, device=device)
        found = preference_loss(engine, batch, self.preference, self.reference(row), desirable_P=desirable_P, tile=tile)
        sums = torch.zeros(NUM_SUMS, dtype=torch.float64, device=device)
        if batch.mesh.sp_rank == 0:
            reward_P, threshold_P = found.rewards_D.view(-1, 2).unbind(1)
            sums[0] = found.num_pairs
            sums[1] = ((reward_P > threshold_P) == desirable_P).sum()
            sums[2:4] = torch.stack([desirable_P.sum().double(), reward_P[desirable_P].sum()])
            sums[4:] = torch.stack([reward_P[~desirable_P].sum(), threshold_P.sum() / self.preference.beta])
        return ObjectiveLoss(found.objective_sum, found.loss_sum, sums, found.losses_P)

    def metrics(self, sums: Sequence[float]) -> dict[str, float]:
        """See `RowObjective.metrics`. A step without desirable or without undesirable answers has no margin."""
        number, num_right, num_desirable, desirable, undesirable, kl = sums
        metrics = {"pair_accuracy": num_right / number, "pair_kl": kl / number}
        if num_desirable:
            metrics["chosen_reward"] = desirable / num_desirable
        if 0 < num_desirable < number:
            metrics["pair_margin"] = desirable / num_desirable - undesirable / (number - num_desirable)
        return metrics


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassObjective(_RowByRow):
    """The cross-entropy of documents' classes."""

    classes: tuple[str, ...]
    """Names of the classes in the order of the model's outputs."""
    classes_of: Callable[[RowSlice], Sequence[str]]
    """Returns the class of each document of a row."""

    def loss(self, engine: Any, batch: ShardedBatch, row: RowSlice, tile: TileSetting) -> ObjectiveLoss:
        """See `RowObjective.loss`."""
        classes_D = torch.tensor([self.classes.index(one) for one in self.classes_of(row)], dtype=torch.int64)
        found = classification_loss(engine, batch, classes_D)
        sums = torch.zeros(NUM_SUMS, dtype=torch.float64, device=batch.labels_BL.device)
        if batch.mesh.sp_rank == 0:
            sums[0] = found.num_documents
            sums[1] = (found.logits_DC.argmax(dim=-1) == classes_D.to(found.logits_DC.device)).sum()
        return ObjectiveLoss(found.objective_sum, found.loss_sum, sums, found.losses_D)

    def metrics(self, sums: Sequence[float]) -> dict[str, float]:
        """See `RowObjective.metrics`."""
        return {"accuracy": sums[1] / sums[0]}


class EmbeddingObjective:
    """InfoNCE of the vectors of pairs of texts, whose negatives are all other positives of a step, in two passes.

    The first pass computes all vectors of the step without gradients, and from them the loss and its gradient by each
    vector. The second pass runs each micro-batch again for the gradient of the weights; see `ray_ulysses.engine.heads`.
    """

    def __init__(self, pooling: Pooling, temperature: float) -> None:
        self._pooling, self._temperature = pooling, temperature
        self._waiting: deque[tuple[torch.Tensor, torch.Tensor]] = deque()

    def prepared(
        self, engine: Any, slices: Iterable[RowSlice], batch_of: Callable[[RowSlice], ShardedBatch], ends: Sequence[int]
    ) -> Iterable[RowSlice]:
        """See `RowObjective.prepared`. All slices are read, and the positives of a set of rows are its negatives."""
        read, vectors = [], []
        # Row by row: reading a row tells the supervisor that this rank is alive.
        for row in slices:
            read.append(row)
            batch = batch_of(row)
            with torch.no_grad():
                vectors.append(document_vectors(engine, batch, self._pooling))
        # A filler's number is below all others, and its set does not matter, because it has no documents.
        sets = [min(bisect_right(ends, row.row), len(ends) - 1) for row in read]
        waiting: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for number in range(len(ends)):
            own = [place for place, of_row in enumerate(sets) if of_row == number]
            # A rank without rows of a set takes part with no vectors.
            found = contrastive_loss(
                [vectors[place] for place in own] or [vectors[0][:0]], batch.mesh, self._temperature
            )
            waiting |= dict(zip(own, zip(found.gradients, found.queries, strict=True), strict=False))
        self._waiting = deque(waiting[place] for place in range(len(read)))
        return read

    def loss(self, engine: Any, batch: ShardedBatch, row: RowSlice, tile: TileSetting) -> ObjectiveLoss:
        """See `RowObjective.loss`. The slices must be in the order of `prepared`."""
        gradient_DH, queries_P2 = self._waiting.popleft()
        sums = torch.zeros(NUM_SUMS, dtype=torch.float64, device=queries_P2.device)
        loss_sum = queries_P2.new_zeros(())
        if batch.mesh.sp_rank == 0:
            loss_sum, sums[1] = queries_P2.sum(0)
            sums[0] = len(queries_P2)
        objective_sum = loss_sum.float()
        if torch.is_grad_enabled():
            objective_sum = contrastive_objective(engine, batch, self._pooling, gradient_DH)
        return ObjectiveLoss(objective_sum, loss_sum, sums, queries_P2[:, 0])

    def metrics(self, sums: Sequence[float]) -> dict[str, float]:
        """See `RowObjective.metrics`."""
        return {"pair_accuracy": sums[1] / sums[0]}


def row_objective(
    config: Config,
    reader: RowReader,
    pieces: Callable[[int], Sequence[Piece]],
    references: Callable[[Sequence[Piece]], torch.Tensor] | None,
) -> RowObjective | None:
    """Return a run's objective of documents, or None if the run's loss is a mean over tokens.

    ``pieces`` returns the documents of a row. ``references`` returns the log-probability of each answer of a row's
    pairs under the reference model, if the loss needs it.
    """
    preference = preference_of(config)
    if config.objective.counts == "tokens":
        return None
    corpora = CorpusSet(reader.sources)

    def pieces_of(row: RowSlice) -> Sequence[Piece]:
        return () if row.is_filler else pieces(row.row)

    def classes_of(row: RowSlice) -> Sequence[str]:
        located = [corpora.locate(piece.document) for piece in pieces_of(row)]
        return [corpus.info.classes[corpus.labels[document]] for corpus, document in located]

    if config.objective.kind == "classification":
        return ClassObjective(classes=config.objective.classes, classes_of=classes_of)
    if config.objective.kind == "embedding":
        return EmbeddingObjective(config.objective.pooling, config.objective.temperature)
    assert preference is not None
    reference = None if references is None else lambda row: references(pieces_of(row))
    if preference.kind == "kto" and reference is not None:
        return LabeledObjective(preference=preference, reference=reference, classes=classes_of)
    return PairObjective(preference=preference, reference=reference)


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
