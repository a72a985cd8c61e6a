"""The contrastive loss of pairs of texts, whose negatives are all other positives of a step, in two passes.

The first pass computes all vectors of the step without gradients, and from them the loss and its gradient by each
vector. The second pass runs each micro-batch again for the gradient of the weights; see `ray_ulysses.engine.heads`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ray_ulysses.attention.batch import ShardedBatch
from ray_ulysses.data.read.reader import RowSlice
from ray_ulysses.engine.heads import Pooling, contrastive_loss, contrastive_objective, document_vectors
from ray_ulysses.parallel.layout import TileSetting
from ray_ulysses.trainer.row_objectives import NUM_SUMS, ObjectiveLoss


class EmbeddingObjective:
    """InfoNCE of the vectors of queries and positives."""

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
