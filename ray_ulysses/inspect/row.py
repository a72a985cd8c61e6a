"""Reports on one row of a run: its content, its sources, and the steps that trained it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.plan.corpus_set import CorpusSet, first_documents
from ray_ulysses.data.plan.plan import Plan
from ray_ulysses.data.plan.rows import Piece
from ray_ulysses.data.tokenize.spans import mask_spans
from ray_ulysses.data.tokenize.tokenizers import Tokenizer, TokenizerInfo, load_tokenizer
from ray_ulysses.errors import UserError
from ray_ulysses.inspect.run_data import find_sources, open_plan
from ray_ulysses.inspect.trained_steps import trained_steps
from ray_ulysses.run.run_files import check_run
from ray_ulysses.storage.place import Place
from ray_ulysses.tracking.events import StepDone
from ray_ulysses.tracking.journal_reader import read_entries
from ray_ulysses.tracking.steps import Entry

TextMode = Literal["cut", "full", "none"]
"""How much of a row's text is shown."""
_HEAD_CHARACTERS, _TAIL_CHARACTERS = 320, 160
_OPEN, _CLOSE = "⟦", "⟧"
"""Enclose the supervised parts of a document that has others, too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PieceText:
    """The text of a piece, shortened in the middle if it is long."""

    head: str
    tail: str
    """Its end; empty if nothing was left out."""
    left_out: int
    """Number of characters between the two."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowCorpus:
    """One corpus of a row's documents."""

    path: str
    """The path where it is searched."""
    fingerprint: str
    problem: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class RowPiece:
    """One piece of a row, and its document; the source and labels are None if the corpus can't be read."""

    document: int
    """Number of the document in the plan, which numbers the documents of all corpora."""
    corpus_document: int
    """Its number in its own corpus."""
    start: int
    """First token of the piece in the document."""
    length: int
    goes_on: bool
    """Whether the document continues beyond it, so that its last token has a label."""
    corpus: str
    labels: tuple[tuple[int, int], ...] | None = None
    """Supervised ranges of the document in this piece, each as first token and the token after the last."""
    source: str | None = None
    offset: int | None = None
    """Line or row in it, from 1; 0 for a whole file."""
    id: str | None = None
    text: PieceText | None = None
    """Its text; None if it was not requested or can't be decoded."""
    text_problem: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TimesTrained:
    """A step that trained a row."""

    step: int
    attempt: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RowReport:
    """The report on a row."""

    run: str
    row: int
    planned_step: int
    trained: tuple[TimesTrained, ...]
    """The steps that trained it and count: one, once the run has reached it."""
    thrown_away: tuple[TimesTrained, ...]
    """Steps that trained it and were thrown away, because an attempt resumed before them."""
    segment: int
    plan_id: str
    epoch: int
    row_tokens: int
    """Its length, including padding."""
    tokens: int
    padding: int
    supervised: int
    cost: int
    """Sum of ``length * (length + token_cost)`` over its pieces."""
    corpora: tuple[RowCorpus, ...]
    pieces: tuple[RowPiece, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the object that ``ray-ulysses inspect RUN --row N --json`` prints."""
        return asdict(self)


def report_row(
    run_dir: Place, row: int, *, corpora: Sequence[Place] = (), text: TextMode = "cut", trust_run: bool = False
) -> RowReport:
    """Return the report on a row; a missing corpus or tokenizer leaves out only what it would provide.

    Args:
        run_dir: The run's directory.
        row: Its number over the whole run, from 0.
        corpora: Current directories of corpora that are no longer at their planned paths.
        text: How much of the text to show.
        trust_run: As of `find_sources`.

    Raises:
        UserError: This is not a run directory, there is no plan, the plan has no such row, or ``corpora`` are wrong.
    """
    check_run(run_dir)
    plan = open_plan(run_dir)
    entries = read_entries(run_dir)
    _check_row(plan, entries, row)
    trained = trained_steps(entries, plan, row=row)
    number = plan.segment_of_row(row)
    segment = plan.segments[number]
    stats = plan.stats(range(row, row + 1))
    tokens, row_tokens = int(stats.document_tokens[0]), plan.row_tokens(row)
    sources = find_sources(run_dir, plan, corpora, trust_run=trust_run)
    found, pieces = _pieces(CorpusSet(sources), plan.pieces(row), text)
    return RowReport(
        run=run_dir.absolute().name,
        row=row,
        planned_step=segment.base_step + (row - segment.base_row) // segment.settings.rows_per_step + 1,
        trained=_times(trained.steps),
        thrown_away=_times((*trained.lost, *trained.superseded)),
        segment=number,
        plan_id=segment.plan_id,
        epoch=segment.epoch_of(row - segment.base_row),
        row_tokens=row_tokens,
        tokens=tokens,
        padding=row_tokens - tokens,
        supervised=int(stats.supervised[0]),
        cost=int(stats.cost(segment.settings.token_cost)[0]),
        corpora=found,
        pieces=pieces,
    )


def _check_row(plan: Plan, entries: Sequence[Entry], row: int) -> None:
    if 0 <= row < plan.num_rows:
        return
    trained = trained_steps(entries, plan)
    done = f"; rows 0 to {trained.steps[-1].rows[1] - 1} are trained so far" if trained.steps else ""
    raise UserError(
        f"--row={row}: the plan {plan.plan_id} has rows 0 to {plan.num_rows - 1} in {plan.num_steps} steps{done}; "
        "give one of them"
    )


def _times(steps: Sequence[StepDone]) -> tuple[TimesTrained, ...]:
    return tuple(TimesTrained(step=step.step, attempt=step.attempt) for step in steps)


def _pieces(
    store: CorpusSet, pieces: Sequence[Piece], mode: TextMode
) -> tuple[tuple[RowCorpus, ...], tuple[RowPiece, ...]]:
    """Return the corpora of some pieces, and the pieces with their sources and texts."""
    bases = first_documents(store.sources)
    corpora: dict[int, RowCorpus] = {}
    # Of thousands of pieces each tokenizer is loaded, or fails to load, only once.
    load = cache(_tokenizer)
    found = []
    for piece in pieces:
        number = int(np.searchsorted(bases, piece.document, side="right")) - 1
        if number not in corpora:
            corpora[number] = _corpus(store, number, piece.document)
        known: dict[str, Any] = {}
        if corpora[number].problem is None:
            known = _source_fields(store, piece, mode, load)
        found.append(
            RowPiece(
                document=piece.document,
                corpus_document=piece.document - int(bases[number]),
                start=piece.start,
                length=piece.length,
                goes_on=piece.has_next_label,
                corpus=corpora[number].path,
                **known,
            )
        )
    return tuple(corpora[number] for number in sorted(corpora)), tuple(found)


def _corpus(store: CorpusSet, number: int, document: int) -> RowCorpus:
    source = store.sources[number]
    problem = None
    try:
        store.locate(document)
    except UserError as error:
        problem = str(error)
    return RowCorpus(path=source.path, fingerprint=source.fingerprint, problem=problem)


def _source_fields(
    store: CorpusSet, piece: Piece, mode: TextMode, load: Callable[[TokenizerInfo], Tokenizer | UserError]
) -> dict[str, Any]:
    """Return the fields of a piece that are read from its corpus."""
    corpus, local = store.locate(piece.document)
    try:
        source = corpus.source(local)
        known: dict[str, Any] = {"source": source.source, "offset": source.offset, "id": source.id or None}
    except UserError as error:
        return {"text_problem": str(error)}
    try:
        known["labels"] = labels = _labels(corpus, local, piece)
        if mode != "none":
            tokens, tokenizer = corpus.read(local, piece.start, piece.length), load(corpus.info.tokenizer)
            if isinstance(tokenizer, UserError):
                raise tokenizer
            spans = [(first - piece.start, last - piece.start) for first, last in labels]
            text = tokenizer.decode(tokens) if corpus.info.spans is None else _marked(tokens, spans, tokenizer)
            known["text"] = PieceText(head=text, tail="", left_out=0) if mode == "full" else shortened(text)
    except UserError as error:
        known["text_problem"] = str(error)
    return known


def _labels(corpus: Corpus, document: int, piece: Piece) -> tuple[tuple[int, int], ...]:
    """Return the ranges of a document that are labels in a piece; a document's first token is not a label."""
    first = piece.start + 1
    weights = corpus.label_weights(document, first, first + piece.num_labels)
    if weights is None:
        return ((first, first + piece.num_labels),) if piece.num_labels else ()
    starts, stops = mask_spans(weights > 0)
    return tuple((first + start, first + stop) for start, stop in zip(starts.tolist(), stops.tolist(), strict=True))


def _tokenizer(info: TokenizerInfo) -> Tokenizer | UserError:
    """Return the tokenizer that prepared a corpus, or why it can't be used."""
    try:
        tokenizer = load_tokenizer(info.name)
    except UserError as error:
        return error
    if tokenizer.info.fingerprint == info.fingerprint:
        return tokenizer
    return UserError(
        f"tokenizer={info.name}: its files are not those that prepared the corpus (fingerprint "
        f"{tokenizer.info.fingerprint}, the corpus has {info.fingerprint}); restore them to see the text"
    )


def shortened(text: str) -> PieceText:
    """Return head and tail of a text, or all of it if hardly anything would be left out (pure)."""
    left_out = len(text) - _HEAD_CHARACTERS - _TAIL_CHARACTERS
    if left_out <= _TAIL_CHARACTERS:
        return PieceText(head=text, tail="", left_out=0)
    return PieceText(head=text[:_HEAD_CHARACTERS], tail=text[-_TAIL_CHARACTERS:], left_out=left_out)


def _marked(tokens: NDArray[np.integer], labels: Sequence[tuple[int, int]], tokenizer: Tokenizer) -> str:
    """Return the text of tokens, with marks around the supervised ranges (pure)."""
    parts, at = [], 0
    # A document that continues beyond the piece has one more label, whose token is in the next piece.
    for first, last in ((first, last) for first, last in labels if first < tokens.size):
        parts += [tokenizer.decode(tokens[at:first]), _OPEN, tokenizer.decode(tokens[first:last]), _CLOSE]
        at = last
    return "".join([*parts, tokenizer.decode(tokens[at:])])
