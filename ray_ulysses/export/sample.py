"""The tokens that an exported model is tried with: real text of the run where its corpus is there."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from ray_ulysses.data.corpus_set import CorpusSet
from ray_ulysses.data.plan_files import PLAN_FOLDER, has_plan, load_plan
from ray_ulysses.errors import UserError
from ray_ulysses.forensics.run_data import find_sources

_NUM_DOCUMENTS = 2
_MOST_TOKENS = 256
_LEAST_TOKENS = 2
_MOST_ROWS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Beginnings of two documents.

    Attributes:
        documents: Token ids of each.
        origin: Where they come from, in words.
    """

    documents: tuple[tuple[int, ...], ...]
    origin: str


def take_sample(run_dir: Path, vocab_size: int, max_positions: int | None) -> Sample:
    """Return two documents of the run's first training rows, or seeded tokens where they can't be read.

    Args:
        run_dir: The run's directory.
        vocab_size: Tokens that the model knows.
        max_positions: Longest document that it can take; None where there is no limit.
    """
    most = min(_MOST_TOKENS, max_positions or _MOST_TOKENS)
    try:
        documents = _first_documents(run_dir, most)
    except UserError as error:
        return _seeded(vocab_size, most, f"the run's corpus can't be read ({error})")
    if len(documents) < _NUM_DOCUMENTS:
        return _seeded(vocab_size, most, "the run has no data plan, or too few documents")
    return Sample(documents=documents, origin="the run's first training rows")


def _first_documents(run_dir: Path, most: int) -> tuple[tuple[int, ...], ...]:
    if not has_plan(run_dir / PLAN_FOLDER):
        return ()
    plan = load_plan(run_dir / PLAN_FOLDER)
    corpora = CorpusSet(find_sources(run_dir, plan))
    found: list[tuple[int, ...]] = []
    for row in range(min(plan.num_rows, _MOST_ROWS)):
        for piece in plan.pieces(row):
            if piece.length >= _LEAST_TOKENS:
                tokens = corpora.read(piece.document, piece.start, min(piece.length, most))
                found.append(tuple(int(token) for token in tokens))
            if len(found) == _NUM_DOCUMENTS:
                return tuple(found)
    return ()


def _seeded(vocab_size: int, most: int, why: str) -> Sample:
    draw = random.Random(0)
    documents = tuple(tuple(draw.randrange(vocab_size) for _ in range(most)) for _ in range(_NUM_DOCUMENTS))
    return Sample(documents=documents, origin=f"seeded tokens, since {why}")
