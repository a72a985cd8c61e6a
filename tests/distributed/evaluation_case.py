"""An evaluation whose rows are shared by several ranks, held against one process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ray_ulysses import SequenceMesh, apply_ulysses
from ray_ulysses.data.tokenize.tokenizers import ByteTokenizer
from ray_ulysses.evaluation.held_out import held_out_documents
from ray_ulysses.evaluation.held_out_loss import context_gain, position_loss
from ray_ulysses.evaluation.needles import Haystack, retrieval_cells
from ray_ulysses.evaluation.report import KINDS, ContextGain, PositionLoss, RetrievalCell
from ray_ulysses.evaluation.scoring import Passage, PassageScores, score_passages
from tests.unit.attention.models import zoo_model

VOCAB = 320


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What one layout measured of one model."""

    by_position: PositionLoss
    gain: ContextGain
    cells: tuple[RetrievalCell, ...]
    correct: int


def measure_all(rank: int, world_size: int, corpus: Path, cases: list[tuple[str, int]]) -> list[Measured]:
    """Measure models of the zoo, each with a ring size."""
    return [_measure(world_size, corpus, *case) for case in cases]


def _measure(world_size: int, corpus: Path, architecture: str, ring_size: int) -> Measured:
    group: Any = dist.group.WORLD
    mesh = SequenceMesh.from_group(group if world_size > 1 else None, ring_size=ring_size)
    model = apply_ulysses(zoo_model(architecture, vocab_size=VOCAB, max_position_embeddings=1024).eval(), mesh)
    held, correct = held_out_documents(corpus, None), 0

    def score(passages: Iterator[Passage]) -> Iterator[PassageScores]:
        nonlocal correct
        for found in score_passages(model, passages, mesh, row_tokens=2500, device=torch.device("cpu")):
            correct += int(found.is_correct.sum())
            yield found

    by_position = position_loss(held, score, longest=700, max_tokens=6000, seed=0)
    gain = context_gain(held, score, contexts=(60, 500), num_spans=4, seed=0)
    assert by_position is not None and gain is not None
    haystack = Haystack(held, ByteTokenizer(), VOCAB)
    cells = [
        cell
        for kind in KINDS
        for cell in retrieval_cells(haystack, score, kind=kind, length=901, num_depths=2, cases=1, seed=0)
    ]
    return Measured(by_position=by_position, gain=gain, cells=tuple(cells), correct=correct)
