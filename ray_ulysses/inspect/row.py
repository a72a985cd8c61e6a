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

TextMode = Literal["cut", "full", "none"]
"""Amount of a row's text to show: the head and the tail, all of it, or none."""
_HEAD_CHARACTERS, _TAIL_CHARACTERS = 320, 160
_OPEN, _CLOSE = "⟦", "⟧"
"""Markers around the supervised parts of a document that is only partly supervised."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PieceText:
    """Text of a piece; if the text is long, its middle is omitted."""

    head: str
    tail: str
    """End of the text; empty if the text is complete in `head`."""
    left_out: int
    """Number of characters omitted between `head` and `tail`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowCorpus:
    """A corpus that contains documents of a row."""

    path: str
    """Path at which the corpus is expected."""
    fingerprint: str
    problem: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class RowPiece:
    """A piece of a row, and the document that contains it. Source and labels are None if the corpus can't be read."""

    document: int
    """Number of the document across all corpora of the plan."""
    corpus_document: int
    """Number of the document in its corpus."""
    start: int
    """Index of the piece's first token in the document."""
    length: int
    goes_on: bool
    """Whether the document continues after the piece, so that the piece's last token has a label."""
    corpus: str
    labels: tuple[tuple[int, int], ...] | None = None
    """Supervised token ranges in document coordinates, each as (first token, token after the last)."""
    source: str | None = None
    offset: int | None = None
    """Line number or row number in the source, starting at 1; 0 if the document is an entire file."""
    id: str | None = None
    text: PieceText | None = None
    """Text of the piece; None if it was not requested or can't be decoded."""
    text_problem: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TimesTrained:
    """A step that trained a row, and the attempt that ran the step."""

    step: int
    attempt: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RowReport:
    """Report on a row."""

    run: str
    row: int
    planned_step: int
    trained: tuple[TimesTrained, ...]
    """Steps that trained the row and count: exactly one, once the run has reached the row."""
    thrown_away: tuple[TimesTrained, ...]
    """Steps that trained the row but were discarded, because an attempt resumed from an earlier step."""
    segment: int
    plan_id: str
    epoch: int
    row_tokens: int
    """Length of the row in tokens, including padding."""
    tokens: int
    padding: int
    supervised: int
    cost: int
    """Sum of ``length * (length + token_cost)`` over the row's pieces."""
    corpora: tuple[RowCorpus, ...]
    pieces: tuple[RowPiece, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the output of ``ray-ulysses inspect RUN --row N --json``."""
        return asdict(self)


def report_row(
    run_dir: Place, row: int, *, corpora: Sequence[Place] = (), text: TextMode = "cut", trust_run: bool = False
) -> RowReport:
    """Return a report on a row. If a corpus or tokenizer is missing, only the fields that need it are omitted.

    Args:
        run_dir: The run's directory.
        row: Number of the row in the run, starting at 0.
        corpora: Current directories of corpora that are no longer at their planned paths.
        text: How much of the text to show.
        trust_run: See `find_sources`.

    Raises:
        UserError: ``run_dir`` is not a run directory, the plan or the row does not exist, or ``corpora`` are wrong.
    """
    check_run(run_dir)
    plan = open_plan(run_dir)
    entries = read_entries(run_dir)
    if not 0 <= row < plan.num_rows:
        steps = trained_steps(entries, plan).steps
        done = f"; rows 0 to {steps[-1].rows[1] - 1} are trained so far" if steps else ""
        raise UserError(
            f"--row={row}: the plan {plan.plan_id} has rows 0 to {plan.num_rows - 1} in {plan.num_steps} steps{done}; "
            "choose one of these rows"
        )
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


def _times(steps: Sequence[StepDone]) -> tuple[TimesTrained, ...]:
    return tuple(TimesTrained(step=step.step, attempt=step.attempt) for step in steps)


def _pieces(
    store: CorpusSet, pieces: Sequence[Piece], mode: TextMode
) -> tuple[tuple[RowCorpus, ...], tuple[RowPiece, ...]]:
    """Return the corpora of a row's pieces, and the pieces with their sources and texts."""
    bases = first_documents(store.sources)
    corpora: dict[int, RowCorpus] = {}
    # A row can have thousands of pieces; load each tokenizer only once, even if loading fails.
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
    """Return the token ranges that are labels in a piece. A document's first token is never a label."""
    first = piece.start + 1
    weights = corpus.label_weights(document, first, first + piece.num_labels)
    if weights is None:
        return ((first, first + piece.num_labels),) if piece.num_labels else ()
    starts, stops = mask_spans(weights > 0)
    return tuple((first + start, first + stop) for start, stop in zip(starts.tolist(), stops.tolist(), strict=True))


def _tokenizer(info: TokenizerInfo) -> Tokenizer | UserError:
    """Return the tokenizer that prepared a corpus, or the error if it can't be used."""
    try:
        tokenizer = load_tokenizer(info.name)
    except UserError as error:
        return error
    if tokenizer.info.fingerprint == info.fingerprint:
        return tokenizer
    return UserError(
        f"tokenizer={info.name}: the tokenizer has fingerprint {tokenizer.info.fingerprint}, but the corpus was "
        f"prepared with {info.fingerprint}; restore the original tokenizer files to see the text"
    )


def shortened(text: str) -> PieceText:
    """Return the head and the tail of a text, or the complete text if little would be omitted."""
    left_out = len(text) - _HEAD_CHARACTERS - _TAIL_CHARACTERS
    if left_out <= _TAIL_CHARACTERS:
        return PieceText(head=text, tail="", left_out=0)
    return PieceText(head=text[:_HEAD_CHARACTERS], tail=text[-_TAIL_CHARACTERS:], left_out=left_out)


def _marked(tokens: NDArray[np.integer], labels: Sequence[tuple[int, int]], tokenizer: Tokenizer) -> str:
    """Decode tokens, with markers around the supervised ranges."""
    parts, at = [], 0
    # If the document continues after the piece, the last label's token is in the next piece.
    for first, last in ((first, last) for first, last in labels if first < tokens.size):
        parts += [tokenizer.decode(tokens[at:first]), _OPEN, tokenizer.decode(tokens[first:last]), _CLOSE]
        at = last
    return "".join([*parts, tokenizer.decode(tokens[at:])])
