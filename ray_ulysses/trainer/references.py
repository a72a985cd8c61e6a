"""Reads the log-probabilities of a row's answers under the reference model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ray_ulysses.attention.documents import on_device
from ray_ulysses.config import Config
from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.corpus.reference import read_reference
from ray_ulysses.data.plan.corpus_set import CorpusSet, PlannedSource
from ray_ulysses.data.plan.rows import Piece
from ray_ulysses.errors import UserError
from ray_ulysses.run.reference import pinned_reference, reference_command, reference_of


class PairReferences:
    """Reads the log-probabilities of pairs by document, from the files beside each corpus."""

    def __init__(self, config: Config, sources: Sequence[PlannedSource], digest: str, device: torch.device) -> None:
        """Open the values of each corpus on first use. ``digest`` is the reference model's."""
        self._config, self._digest, self._device = config, digest, device
        self._corpora = CorpusSet(sources)
        self._values: dict[str, NDArray[np.float64]] = {}

    def of(self, pieces: Sequence[Piece]) -> torch.Tensor:
        """Return the log-probability of each answer of a row's pairs, in order, fp64 ``[2 * pairs]``.

        Raises:
            UserError: The values of a corpus are missing or damaged.
        """
        found = []
        for piece in pieces:
            corpus, document = self._corpora.locate(piece.document)
            found.append(self._of(corpus)[document])
        return on_device(torch.from_numpy(np.concatenate([np.empty(0), *found])), self._device)

    def _of(self, corpus: Corpus) -> NDArray[np.float64]:
        if corpus.fingerprint not in self._values:
            wanted = reference_of(self._config, corpus, self._digest)
            values = read_reference(corpus, wanted)
            if values is None:
                command = reference_command(str(corpus.folder), wanted.model, wanted.dtype)
                raise UserError(f"data.path={corpus.folder}: has no log-probabilities of its pairs; run `{command}`")
            self._values[corpus.fingerprint] = values
        return self._values[corpus.fingerprint]


def open_references(config: Config, device: torch.device, sources: Sequence[PlannedSource]) -> PairReferences | None:
    """Return the reader of a run's reference model, if it has one.

    ``sources`` are the corpora, in the order in which a plan numbers their documents.
    """
    if not config.objective.needs_reference:
        return None
    digest = pinned_reference(config.run_dir)
    assert digest is not None, "the driver stores it before workers start"
    return PairReferences(config, sources, digest, device)
