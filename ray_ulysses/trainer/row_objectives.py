"""Objectives of documents in place of the cross-entropy of tokens: losses of pairs, and classes of documents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from ray_ulysses.data.plan.corpus_set import CorpusSet
from ray_ulysses.engine.heads import classification_loss
from ray_ulysses.engine.preferences import preference_loss, preference_of

if TYPE_CHECKING:
    from ray_ulysses.attention.batch import ShardedBatch
    from ray_ulysses.config import Config
    from ray_ulysses.data.plan.rows import Piece
    from ray_ulysses.data.read.reader import RowReader, RowSlice
    from ray_ulysses.engine.preferences import Preference
    from ray_ulysses.parallel.layout import TileSetting

NUM_SUMS = 5
"""Number of sums of an objective beside its loss."""


class ObjectiveLoss(NamedTuple):
    """Loss of a slice's documents. One rank of ``sp`` counts them."""

    objective_sum: torch.Tensor
    """fp32 scalar to differentiate once."""
    loss_sum: torch.Tensor
    """fp64 scalar, detached."""
    sums: torch.Tensor
    """fp64 [5]: counted documents or pairs, right ones, and three sums of the objective's own."""


class RowObjective(Protocol):
    """An objective whose loss is a mean over documents, or over pairs of documents."""

    def loss(self, engine: Any, batch: ShardedBatch, row: RowSlice, tile: TileSetting) -> ObjectiveLoss:
        """Run the forward pass, and return the loss of a slice. All ranks of ``sp`` must call this method."""
        ...

    def metrics(self, sums: Sequence[float]) -> dict[str, float]:
        """Return metrics by field of `StepDone`, from `ObjectiveLoss.sums` added up over a step."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class PairObjective:
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
        return ObjectiveLoss(pairs.objective_sum, pairs.loss_sum, sums)

    def metrics(self, sums: Sequence[float]) -> dict[str, float]:
        """See `RowObjective.metrics`."""
        num_pairs, num_right, chosen, rejected, gained = sums
        kl = {} if self.reference is None else {"pair_kl": gained / (2 * num_pairs)}
        return kl | {
            "pair_accuracy": num_right / num_pairs,
            "pair_margin": (chosen - rejected) / num_pairs,
            "chosen_reward": chosen / num_pairs,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassObjective:
    """The cross-entropy of documents' classes."""

    corpora: CorpusSet
    classes: tuple[str, ...]
    pieces: Callable[[int], Sequence[Piece]]
    """Returns the documents of a row."""

    def loss(self, engine: Any, batch: ShardedBatch, row: RowSlice, tile: TileSetting) -> ObjectiveLoss:
        """See `RowObjective.loss`."""
        pieces = () if row.is_filler else self.pieces(row.row)
        classes_D = torch.tensor([self._class_of(piece.document) for piece in pieces], dtype=torch.int64)
        found = classification_loss(engine, batch, classes_D)
        sums = torch.zeros(NUM_SUMS, dtype=torch.float64, device=batch.labels_BL.device)
        if batch.mesh.sp_rank == 0:
            sums[0] = found.num_documents
            sums[1] = (found.logits_DC.argmax(dim=-1) == classes_D.to(found.logits_DC.device)).sum()
        return ObjectiveLoss(found.objective_sum, found.loss_sum, sums)

    def _class_of(self, document: int) -> int:
        corpus, local = self.corpora.locate(document)
        return self.classes.index(corpus.info.classes[corpus.labels[local]])

    def metrics(self, sums: Sequence[float]) -> dict[str, float]:
        """See `RowObjective.metrics`."""
        return {"accuracy": sums[1] / sums[0]}


def row_objective(
    config: Config,
    reader: RowReader,
    pieces: Callable[[int], Sequence[Piece]],
    references: Callable[[Sequence[Piece]], torch.Tensor] | None,
) -> RowObjective | None:
    """Return a run's objective of documents, or None if the run's loss is a mean over tokens.

    Args:
        config: The configuration.
        reader: A reader of the rows' corpora.
        pieces: Returns the documents of a row.
        references: Returns the log-probability of each answer of a row's pairs under the reference model, if the loss
            needs it.
    """
    if config.objective.kind == "classification":
        return ClassObjective(corpora=CorpusSet(reader.sources), classes=config.objective.classes, pieces=pieces)
    preference = preference_of(config)
    if preference is None:
        return None
    reference = None if references is None else lambda row: references(() if row.is_filler else pieces(row.row))
    return PairObjective(preference=preference, reference=reference)
