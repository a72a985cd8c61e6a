"""Opens the data that a run was trained on, if they still exist, and takes the tokens for the check of an export.

The export of weights does not need them: without a corpus, the check takes random tokens.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from ray_ulysses.config import Config
from ray_ulysses.data.plan.corpus_set import CorpusSet, PlannedSource
from ray_ulysses.data.plan.plan import Plan
from ray_ulysses.data.plan.plan_files import load_plan_if_any
from ray_ulysses.data.plan.rows import Piece
from ray_ulysses.errors import UlyssesError, UserError
from ray_ulysses.forensics.run_data import find_sources
from ray_ulysses.run_names import PLAN_FOLDER
from ray_ulysses.storage.place import Place, UnnamedServerError

DATA_ERRORS = (UlyssesError, OSError)
"""Raised for a plan or a corpus that is missing, damaged or away."""
_NUM_DOCUMENTS = 2
_MOST_TOKENS = 256
_LEAST_TOKENS = 2
_MOST_ROWS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedData:
    """A run's plan, and its corpora at their current paths."""

    plan: Plan
    sources: tuple[PlannedSource, ...]


def planned_data(run_dir: Place, *, trust_run: bool = False) -> PlannedData | None:
    """Return the data of a run; None if it has no plan.

    Raises:
        UserError: The plan can't be read; the text is only the reason.
        UnnamedServerError: As of `find_sources`.
    """
    try:
        plan = load_plan_if_any(run_dir / PLAN_FOLDER)
        if plan is None:
            return None
        return PlannedData(plan=plan, sources=find_sources(run_dir, plan, trust_run=trust_run))
    except UnnamedServerError:
        raise
    except DATA_ERRORS as error:
        raise unreadable_plan(error) from error


def with_planned_context(config: Config, run_dir: Place, step: int) -> Config:
    """Return a configuration with the context that a step was planned with, which a branch may have changed since.

    It is returned as it is if there is no plan that can be read.
    """
    try:
        plan = load_plan_if_any(run_dir / PLAN_FOLDER)
    except DATA_ERRORS:
        plan = None
    if plan is None or not 1 <= step <= plan.num_steps:
        return config
    context = plan.segments[plan.segment_of_step(step)].settings.context_tokens
    return config.model_copy(update={"data": config.data.model_copy(update={"context_tokens": context})})


def unreadable_plan(error: Exception) -> UserError:
    """Return the error for a plan that can't be read, without the hint, which is for training."""
    if isinstance(error.__cause__, OSError) and error.__cause__.filename:
        error = error.__cause__
    if isinstance(error, OSError):
        reason = f"{error.filename or PLAN_FOLDER}: {error.strerror or error}"
    else:
        text = " ".join(str(error).split())
        reason = text.rpartition("; ")[0] or text
    return UserError(f"the run's data plan can't be read ({reason})")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """The beginnings of two documents."""

    documents: tuple[tuple[int, ...], ...]
    origin: str
    """Their source, in words."""


def take_sample(run_dir: Place, vocab_size: int, max_positions: int | None, *, trust_run: bool = False) -> Sample:
    """Return two documents of the run's first training rows, or seeded tokens if they can't be read."""
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
