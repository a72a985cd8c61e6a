"""Takes the tokens for the check of an export: text of the run's corpus if it exists, else random tokens."""

from __future__ import annotations

import random
from dataclasses import dataclass

from ray_ulysses.data.plan.corpus_set import CorpusSet
from ray_ulysses.data.plan.rows import Piece
from ray_ulysses.errors import UserError
from ray_ulysses.export.planned_data import DATA_ERRORS, PlannedData, planned_data, unreadable_plan
from ray_ulysses.storage.place import Place

_NUM_DOCUMENTS = 2
_MOST_TOKENS = 256
_LEAST_TOKENS = 2
_MOST_ROWS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """The beginnings of two documents."""

    documents: tuple[tuple[int, ...], ...]
    """Token ids of each."""
    origin: str
    """Their source, in words."""


def take_sample(run_dir: Place, vocab_size: int, max_positions: int | None, *, trust_run: bool = False) -> Sample:
    """Return two documents of the run's first training rows, or seeded tokens if they can't be read.

    Args:
        run_dir: The run's directory.
        vocab_size: Size of the model's vocabulary.
        max_positions: The model's longest document; None without a limit.
        trust_run: As of `planned_data`.
    """
    most = min(_MOST_TOKENS, max_positions or _MOST_TOKENS)
    try:
        data = planned_data(run_dir, trust_run=trust_run)
        pieces = _first_pieces(data) if data is not None else ()
    except UserError as error:
        return _seeded(vocab_size, most, str(error))
    if data is None or not pieces:
        return _seeded(vocab_size, most, "the run has no data plan, or too few documents")
    corpora = CorpusSet(data.sources)
    try:
        read = [corpora.read(piece.document, piece.start, min(piece.length, most)) for piece in pieces]
    except DATA_ERRORS as error:
        return _seeded(vocab_size, most, f"the run's corpus can't be read ({error})")
    documents = tuple(tuple(int(token) for token in tokens) for tokens in read)
    return Sample(documents=documents, origin="the run's first training rows")


def _first_pieces(data: PlannedData) -> tuple[Piece, ...]:
    """Return the first pieces that are long enough; none if there are too few.

    Raises:
        UserError: The plan can't be read.
    """
    found: list[Piece] = []
    try:
        for row in range(min(data.plan.num_rows, _MOST_ROWS)):
            found += [piece for piece in data.plan.pieces(row) if piece.length >= _LEAST_TOKENS]
            if len(found) >= _NUM_DOCUMENTS:
                return tuple(found[:_NUM_DOCUMENTS])
    except DATA_ERRORS as error:
        raise unreadable_plan(error) from error
    return ()


def _seeded(vocab_size: int, most: int, why: str) -> Sample:
    draw = random.Random(0)
    documents = tuple(tuple(draw.randrange(vocab_size) for _ in range(most)) for _ in range(_NUM_DOCUMENTS))
    return Sample(documents=documents, origin=f"seeded tokens, since {why}")
