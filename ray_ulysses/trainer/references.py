"""Reads the log-probabilities of a row's answers under the reference model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from ray_ulysses.attention.documents import on_device
from ray_ulysses.data.corpus.reference import find_reference
from ray_ulysses.data.plan.corpus_set import CorpusSet
from ray_ulysses.engine.model_digest import model_digest
from ray_ulysses.errors import UserError
from ray_ulysses.run.reference import reference_command, reference_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ray_ulysses.checkpoint.messenger import RankMessenger
    from ray_ulysses.config import Config
    from ray_ulysses.data.corpus.corpus import Corpus
    from ray_ulysses.data.corpus.reference import ReferenceValues
    from ray_ulysses.data.plan.corpus_set import PlannedSource
    from ray_ulysses.data.plan.rows import Piece
    from ray_ulysses.trainer.worker import Worker


class PairReferences:
    """Reads the log-probabilities of pairs by document, from the files beside each corpus."""

    def __init__(self, config: Config, sources: Sequence[PlannedSource], digest: str, device: torch.device) -> None:
        """Open the values of each corpus on first use. ``digest`` is the reference model's."""
        self._config, self._digest, self._device = config, digest, device
        self._corpora = CorpusSet(sources)
        self._opened: dict[str, ReferenceValues] = {}

    def of(self, pieces: Sequence[Piece]) -> torch.Tensor:
        """Return the log-probability of each answer of a row's pairs, in order, fp64 ``[2 * pairs]``.

        Raises:
            UserError: The values of a corpus are missing or damaged.
        """
        found = []
        for piece in pieces:
            corpus, document = self._corpora.locate(piece.document)
            found.append(self._values(corpus).read(document))
        return on_device(torch.from_numpy(np.concatenate([np.empty(0), *found])), self._device)

    def _values(self, corpus: Corpus) -> ReferenceValues:
        if corpus.fingerprint not in self._opened:
            wanted = reference_of(self._config, corpus, self._digest)
            values = find_reference(corpus, wanted)
            if values is None:
                command = reference_command(str(corpus.folder), wanted.model, wanted.dtype)
                raise UserError(f"data.path={corpus.folder}: has no log-probabilities of its pairs; run `{command}`")
            self._opened[corpus.fingerprint] = values
        return self._opened[corpus.fingerprint]


def open_references(
    config: Config, worker: Worker, messenger: RankMessenger, sources: Sequence[PlannedSource]
) -> PairReferences | None:
    """Return the reader of a run's reference model, if it has one. All ranks must call this function.

    ``sources`` are the corpora, in the order in which a plan numbers their documents.
    """
    if not config.objective.needs_reference:
        return None
    # One rank identifies the model, because a repository on the hub may change meanwhile.
    digest = messenger.broadcast(model_digest(str(config.model.path)) if worker.rank == 0 else None)
    return PairReferences(config, sources, digest, worker.device)
