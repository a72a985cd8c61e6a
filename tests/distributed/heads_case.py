"""Law 1's measurement for heads: a step on vectors of documents, held against one process with each document alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional
from transformers import AutoModel, AutoModelForSequenceClassification

from ray_ulysses import (
    SequenceMesh,
    apply_ulysses,
    classification_loss,
    contrastive_loss,
    contrastive_objective,
    document_vectors,
    loss_scale,
    shard_batch,
)
from ray_ulysses.attention.batch import ShardedBatch
from ray_ulysses.engine.zero import build_engine
from ray_ulysses.parallel.layout import ParallelLayout
from tests.distributed.seam_case import gradient_error, gradients_of, make_row, zero_settings
from tests.unit.attention.models import ARCHITECTURES, ENCODERS, moved_away

NUM_CLASSES, TEMPERATURE = 3, 0.3


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadCase:
    kind: str
    """"class", or the pooling of embeddings."""
    architecture: str = "llama"
    """Of the zoo, with the pooling of its classifier after a hyphen if it is not the default."""
    ulysses_size: int = 1
    ring_size: int = 1
    dp_size: int = 1
    zero_stage: int = 1
    accumulation: int = 1

    @property
    def sp_size(self) -> int:
        return self.ulysses_size * self.ring_size

    @property
    def world_size(self) -> int:
        return self.sp_size * self.dp_size


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadResult:
    case: HeadCase
    loss_error: float
    vector_error: float
    """Of the documents' vectors or logits on this rank."""
    num_right_error: int
    gradient_error: float
    """Worst tensor's relative error, divided by what law 1 allows it."""
    worst_tensor: str

    def check(self) -> None:
        assert self.loss_error <= 1e-5, self
        assert self.vector_error <= 1e-5, self
        assert self.num_right_error == 0, self
        assert self.gradient_error <= 1, self


def head_model(architecture: str, kind: str, dtype: torch.dtype = torch.float32) -> Any:
    """Return a model of the zoo with a head for documents, or without a head."""
    name, _, pooling = architecture.partition("-")
    changes = {"classifier_pooling": pooling} if pooling else {}
    config = {**ARCHITECTURES, **ENCODERS}[name](num_labels=NUM_CLASSES, **changes)
    torch.manual_seed(7)
    auto = AutoModelForSequenceClassification if kind == "class" else AutoModel
    return moved_away(auto.from_config(config, attn_implementation="eager"), 3.0, 0.3).to(dtype)


def rows_of(kind: str, index: int) -> tuple[torch.Tensor, tuple[int, ...], list[int]]:
    """Return a row's tokens, lengths of its documents, and their classes."""
    # A single pair, as in the first row of pairs, would have no negatives and no gradient.
    ids, _, lengths = make_row(index, "masked") if kind == "class" else make_row(index + 1, "pairs")
    return ids, lengths, [(7 * index + place) % NUM_CLASSES for place in range(len(lengths))]


def pooled(hidden_LH: torch.Tensor, pooling: str) -> torch.Tensor:
    return {"first": hidden_LH[0], "last": hidden_LH[-1], "mean": hidden_LH.mean(0)}[pooling]


@dataclass(frozen=True, kw_only=True, slots=True)
class Alone:
    """One process's step, with each document alone."""

    loss: float
    num_right: int
    vectors: list[torch.Tensor]
    """Vectors or logits of each row's documents."""
    gradients: dict[str, torch.Tensor]


@cache
def alone(architecture: str, kind: str, num_rows: int, dtype: torch.dtype) -> Alone:
    model = head_model(architecture, kind, dtype)
    found: list[torch.Tensor] = []
    wanted, sizes = [], []
    for index in range(num_rows):
        ids, lengths, classes = rows_of(kind, index)
        ends = torch.tensor([0, *lengths]).cumsum(0).tolist()
        for start, stop in pairwise(ends):
            output = model(input_ids=ids[:, start:stop])
            found.append(output.logits[0] if kind == "class" else pooled(output.last_hidden_state[0], kind))
        wanted += classes
        sizes.append(len(lengths))
    if kind == "class":
        scores, targets = torch.stack(found), torch.tensor(wanted)
    else:
        queries, positives = functional.normalize(torch.stack(found), dim=-1).view(len(found) // 2, 2, -1).unbind(1)
        scores, targets = queries @ positives.T / TEMPERATURE, torch.arange(len(queries))
    loss = functional.cross_entropy(scores, targets)
    loss.backward()
    num_right = int((scores.argmax(-1) == targets).sum())
    gradients = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    vectors = torch.stack(found).detach().split(sizes)
    return Alone(loss=float(loss.detach()), num_right=num_right, vectors=list(vectors), gradients=gradients)


def run_head_cases(rank: int, world_size: int, cases: list[HeadCase]) -> list[HeadResult]:
    """Run every case of one world on this rank."""
    results = []
    for case in cases:
        layout = ParallelLayout(world_size=world_size, sp_size=case.sp_size, ring_size=case.ring_size)
        mesh = SequenceMesh.from_layout(layout)
        mine = [m * case.dp_size + layout.dp_rank(rank) for m in range(case.accumulation)]
        results.append(_run_case(case, mesh, mine))
    return results


def _run_case(case: HeadCase, mesh: SequenceMesh, mine: list[int]) -> HeadResult:
    rows = [rows_of(case.kind, index) for index in mine]
    batches = [shard_batch(ids, None, lengths, mesh) for ids, lengths, _ in rows]
    settings = zero_settings(stage=case.zero_stage, accumulation=case.accumulation)
    engine = build_engine(apply_ulysses(head_model(case.architecture, case.kind), mesh), settings)
    num_rows = case.dp_size * case.accumulation
    own, truth = (alone(case.architecture, case.kind, num_rows, dtype) for dtype in (torch.float32, torch.float64))
    step = _classification if case.kind == "class" else _embedding
    loss, num_right, vectors = step(case, engine, mesh, batches, rows)
    gradients = gradients_of(engine)
    engine.step()
    engine.destroy()
    error, worst = gradient_error({name: gradients[name] for name in truth.gradients}, own.gradients, truth.gradients)
    wanted = torch.cat([truth.vectors[index] for index in mine])
    return HeadResult(
        case=case, loss_error=abs(loss - truth.loss) / truth.loss, num_right_error=num_right - truth.num_right,
        vector_error=float((torch.cat(vectors).double() - wanted).norm() / wanted.norm()),
        gradient_error=error, worst_tensor=worst,
    )  # fmt: skip


def _classification(
    case: HeadCase, engine: Any, mesh: SequenceMesh, batches: list[ShardedBatch], rows: list[Any]
) -> tuple[float, int, list[torch.Tensor]]:
    count = torch.tensor(sum(len(classes) for *_, classes in rows) if mesh.sp_rank == 0 else 0)
    dist.all_reduce(count)
    scale = loss_scale(count, mesh, zero_stage=case.zero_stage, accumulation=case.accumulation)
    sums, logits = torch.zeros(2, dtype=torch.float64), []
    for number, (batch, (*_, classes)) in enumerate(zip(batches, rows, strict=True), start=1):
        found = classification_loss(engine, batch, classes)
        assert found.num_documents == (len(classes) if mesh.sp_rank == 0 else 0)
        engine.backward(found.objective_sum * scale)
        sums[0] += found.loss_sum
        logits.append(found.logits_DC)
        if mesh.sp_rank == 0:
            sums[1] += (found.logits_DC.argmax(-1) == torch.tensor(classes)).sum()
        _advance(engine, number, len(batches))
    dist.all_reduce(sums)
    return float(sums[0] / count), int(sums[1]), logits


def _embedding(
    case: HeadCase, engine: Any, mesh: SequenceMesh, batches: list[ShardedBatch], rows: list[Any]
) -> tuple[float, int, list[torch.Tensor]]:
    pooling: Any = case.kind
    with torch.no_grad():
        vectors = [document_vectors(engine, batch, pooling) for batch in batches]
    found = contrastive_loss(vectors, mesh, TEMPERATURE)
    scale = loss_scale(found.num_pairs, mesh, zero_stage=case.zero_stage, accumulation=case.accumulation)
    for number, (batch, gradient) in enumerate(zip(batches, found.gradients, strict=True), start=1):
        engine.backward(contrastive_objective(engine, batch, pooling, gradient) * scale)
        _advance(engine, number, len(batches))
    return found.loss_sum / found.num_pairs, found.num_right, vectors


def _advance(engine: Any, number: int, accumulation: int) -> None:
    # An engine steps on the boundary only; before it, step() advances the micro-batch.
    if number < accumulation:
        engine.step()
