"""Sums the loss of each training corpus of a mixture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ray_ulysses.attention.documents import on_device
from ray_ulysses.config.objective import Counts
from ray_ulysses.data.plan.corpus_set import first_documents
from ray_ulysses.data.plan.plan import Plan
from ray_ulysses.data.plan.segment import distinct_names
from ray_ulysses.data.read.reader import IGNORE_INDEX, RowSlice


class SourceLoss(NamedTuple):
    """The summed loss of a training corpus's tokens, documents or pairs in a step."""

    name: str
    """Name of the corpus in metrics."""
    loss_sum: float
    """Sum of the losses in nats, multiplied by the label weights."""
    weight: float
    """Number of supervised tokens, or the sum of their label weights; or number of documents or pairs."""


class SourceLosses:
    """Sums the losses of a rank's slices by training corpus, in the order of the plan's sources."""

    def __init__(self, plan: Plan, device: torch.device, counts: Counts = "tokens") -> None:
        """Create empty sums. ``plan`` must have the rows of every later slice."""
        sources = plan.newest.sources
        self._names = distinct_names([source.path for source in sources])
        self._plan, self._firsts, self._counts = plan, first_documents(sources), counts
        self._sums = torch.zeros(len(sources), 2, dtype=torch.float64, device=device)

    @classmethod
    def of_mixture(cls, plan: Plan, device: torch.device, counts: Counts) -> SourceLosses | None:
        """Return empty sums, or None if the run trains on a single corpus."""
        return cls(plan, device, counts) if sum(source.is_used for source in plan.newest.sources) > 1 else None

    def add(self, row: RowSlice, losses: torch.Tensor) -> None:
        """Add the losses of a slice's tokens, which are 0 where the label is ignored, or of the pieces of its row."""
        documents = [piece.document for piece in self._plan.pieces(row.row)]
        numbers = np.searchsorted(self._firsts, documents, side="right") - 1
        if self._counts != "tokens":
            # All ranks of an SP group have the losses, and the first one adds them.
            if row.sp_rank == 0:
                self._add(numbers, losses, np.ones(len(numbers)))
            return
        of_row = np.zeros(row.row_tokens, dtype=np.int32)
        of_row[: sum(row.document_lengths)] = np.repeat(numbers, row.document_lengths)
        of_slice = np.concatenate([of_row[start:stop] for start, stop in row.ranges])
        weights = (row.labels != IGNORE_INDEX) * (1.0 if row.label_weights is None else row.label_weights)
        self._add(of_slice, losses, weights)

    def _add(self, numbers: NDArray[np.integer], losses: torch.Tensor, weights: NDArray[np.floating]) -> None:
        device = losses.device
        self._sums[:, 0].index_add_(0, on_device(torch.from_numpy(numbers), device), losses.double())
        self._sums[:, 1] += on_device(torch.from_numpy(np.bincount(numbers, weights, len(self._sums))), device)

    def take(self) -> torch.Tensor:
        """Return the sums as one tensor, fp64 ``[2 * corpora]``, and begin the next step."""
        sums = self._sums.flatten()
        self._sums = torch.zeros_like(self._sums)
        return sums

    def summary(self, sums: Sequence[float]) -> tuple[SourceLoss, ...]:
        """Return each corpus's loss from the values of `take`, summed over the ranks."""
        return tuple(map(SourceLoss, self._names, sums[::2], sums[1::2]))
