"""Chooses the objective of documents of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ray_ulysses.config import Config
from ray_ulysses.data.plan.corpus_set import CorpusSet
from ray_ulysses.data.plan.rows import Piece
from ray_ulysses.data.read.reader import RowReader, RowSlice
from ray_ulysses.engine.preferences import preference_of
from ray_ulysses.trainer.embedding import EmbeddingObjective
from ray_ulysses.trainer.row_objectives import ClassObjective, LabeledObjective, PairObjective, RowObjective


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
