"""Combines a run's corpora into one corpus, with documents numbered consecutively across the sources.

Processes that only read rows import this module instead of the planner, which imports Numba.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.plan.rows import Piece
from ray_ulysses.data.tokenize.spans import LabelSpans
from ray_ulysses.errors import UserError
from ray_ulysses.validation import KNOWN_FIELDS_ONLY, Number, Whole


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedSource:
    """A corpus as recorded in a plan."""

    __pydantic_config__ = KNOWN_FIELDS_ONLY

    path: str
    """Path of the corpus at planning time."""
    fingerprint: str
    """Hash that identifies the corpus's content."""
    num_documents: Whole
    weight: Number | None = None
    """Share of an epoch's tokens, relative to the other sources. None selects every document, 0 selects none."""
    tokenizer: str = ""
    """Fingerprint of the tokenizer that the corpus was prepared with, or an empty string if unknown."""
    end_tokens: tuple[Whole, ...] = ()
    """Tokens that a model learns to emit at the end of a text."""
    has_weights: bool = False
    """Whether any token has a loss weight other than 1."""
    are_pairs: bool = False
    """Whether each document is a pair of answers."""

    @property
    def is_used(self) -> bool:
        """Whether the plan uses documents from this source."""
        return self.weight is None or self.weight > 0

    @property
    def identity(self) -> list[Any]:
        """All fields that affect a plan, that is, all except the path."""
        return [self.fingerprint, self.num_documents, None if self.weight is None else float(self.weight)]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlanInput:
    """Lengths and label spans of the documents to plan."""

    sources: tuple[PlannedSource, ...]
    lengths: NDArray[np.integer]
    """Token count of each document, concatenated over all sources; [documents]."""
    spans: LabelSpans | None = None
    """Label spans, or None if every token may be a label."""
    validation: tuple[PlanInput, ...] = ()
    """Documents of each validation corpus, which only evaluations read. Their numbers continue those of ``sources``."""

    @property
    def validation_sources(self) -> tuple[PlannedSource, ...]:
        """The validation corpora."""
        return tuple(source for one in self.validation for source in one.sources)


def first_documents(sources: Sequence[PlannedSource]) -> NDArray[np.int64]:
    """Return the number of each source's first document, followed by the total number of documents."""
    return np.cumsum([0, *(source.num_documents for source in sources)], dtype=np.int64)


class CorpusSet:
    """Corpora of a run, each opened on first use."""

    def __init__(self, sources: Sequence[PlannedSource], opened: Sequence[Corpus] = ()) -> None:
        """Create a set of ``sources``. ``opened`` contains the corpora that are already open."""
        self.sources = tuple(sources)
        # A list, not an array: it is bisected at least once per piece of a row, and NumPy would take ten times as long.
        self._bases: list[int] = first_documents(sources).tolist()
        by_fingerprint = {corpus.fingerprint: corpus for corpus in opened}
        self._opened = {
            number: by_fingerprint[source.fingerprint]
            for number, source in enumerate(sources)
            if source.fingerprint in by_fingerprint
        }

    @property
    def corpora(self) -> tuple[Corpus, ...]:
        """All corpora, opened if necessary.

        Raises:
            UserError: A corpus can't be opened, or has been replaced since planning.
        """
        return tuple(self._corpus(number) for number in range(len(self.sources)))

    def without_gone(self, needed: Collection[str]) -> CorpusSet:
        """Return the set without corpora that can't be opened and whose fingerprints are not in ``needed``."""
        kept = list(self.sources)
        for number, source in enumerate(self.sources):
            if source.fingerprint not in needed:
                try:
                    self._corpus(number)
                except UserError:
                    kept.remove(source)
        return self if len(kept) == len(self.sources) else CorpusSet(kept, tuple(self._opened.values()))

    def read(self, document: int, start: int, length: int) -> NDArray[np.integer]:
        """Return ``length`` tokens of a document, starting at token ``start``, in the corpus's dtype.

        Raises:
            UserError: The corpus can't be read, or has been replaced since planning.
        """
        corpus, local = self.locate(document)
        return corpus.read(local, start, length)

    def fetch(self, ranges: Sequence[tuple[int, int, int]]) -> None:
        """Fetch token ranges ``(document, start, length)``, like `Corpus.fetch`."""
        by_corpus: defaultdict[Corpus, list[tuple[int, int, int]]] = defaultdict(list)
        for document, start, length in ranges:
            corpus, local = self.locate(document)
            by_corpus[corpus].append((local, start, length))
        for corpus, wanted in by_corpus.items():
            corpus.fetch(wanted)

    @property
    def has_weights(self) -> bool:
        """Whether any token has a loss weight other than 1."""
        return any(source.has_weights for source in self.sources)

    @property
    def loss_weights(self) -> tuple[float, float] | None:
        """Smallest and largest loss weight of any token, or None if all weights are 1."""
        spans = [corpus.info.spans for corpus in self.corpora]
        ranges = [(1.0, 1.0) if one is None or one.weights is None else one.weights for one in spans]
        return (min(low for low, _ in ranges), max(high for _, high in ranges)) if self.has_weights else None

    def label_weights(self, document: int, first: int, last: int) -> NDArray[np.float32] | None:
        """Return the loss weight of each token ``[first, last)`` of a document, like `Corpus.label_weights`."""
        corpus, local = self.locate(document)
        return corpus.label_weights(local, first, last)

    def documents_of(self, pieces: Sequence[Piece]) -> Sequence[Piece]:
        """Return the parts of a row that attend to themselves alone: its pieces, or both texts of each pair."""
        if not any(source.are_pairs for source in self.sources):
            return pieces
        answers = []
        for piece in pieces:
            corpus, local = self.locate(piece.document)
            border = int(corpus.borders[local])
            answers.append(replace(piece, start=0, length=border, has_next_label=False))
            # Of a pair that is one token longer than a row, the last token is only a label.
            answers.append(replace(piece, start=border, length=piece.length - border))
        return answers

    def locate(self, document: int) -> tuple[Corpus, int]:
        """Return the corpus that contains a document, and the document's number in that corpus."""
        number = bisect_right(self._bases, document) - 1
        return self._corpus(number), document - self._bases[number]

    def _corpus(self, number: int) -> Corpus:
        if number not in self._opened:
            source = self.sources[number]
            corpus = Corpus.open(source.path)
            if corpus.fingerprint != source.fingerprint:
                raise UserError(
                    f"data.path={source.path}: the corpus has been replaced since the plan was made: the plan uses "
                    f"corpus {source.fingerprint}, but found {corpus.fingerprint}; restore the corpus, or start a new "
                    "run under another run.name"
                )
            self._opened[number] = corpus
        return self._opened[number]


def open_sources(shares: Sequence[tuple[str, float | None]], known: Sequence[PlannedSource] = ()) -> CorpusSet:
    """Open the corpora listed in a configuration.

    Args:
        shares: Path and weight of each corpus.
        known: Sources of the run so far, whose order is preserved. A source missing from ``shares`` gets weight 0.

    Raises:
        UserError: A corpus can't be opened, is listed twice, or was prepared with a different tokenizer.
    """
    found: dict[str, PlannedSource] = {}
    tokenizers = {source.tokenizer: source.path for source in known if source.tokenizer}
    opened = []
    for path, weight in shares:
        corpus = Corpus.open(path)
        opened.append(corpus)
        if corpus.fingerprint in found:
            raise UserError(
                f"data.sources: {path} and {found[corpus.fingerprint].path} are the same corpus; list it once"
            )
        tokenizers[corpus.info.tokenizer.fingerprint] = path
        found[corpus.fingerprint] = _planned(path, corpus, weight)
    if len(tokenizers) > 1:
        raise UserError(
            f"data.sources: {' and '.join(tokenizers.values())} were prepared with different tokenizers; prepare all "
            "corpora with the same tokenizer"
        )
    places = [found.pop(source.fingerprint, replace(source, weight=0.0)) for source in known]
    return CorpusSet([*places, *found.values()], opened)


def _planned(path: str, corpus: Corpus, weight: float | None) -> PlannedSource:
    return PlannedSource(
        path=path,
        fingerprint=corpus.fingerprint,
        num_documents=corpus.num_documents,
        weight=weight,
        tokenizer=corpus.info.tokenizer.fingerprint,
        end_tokens=corpus.info.end_tokens,
        has_weights=corpus.has_weights,
        are_pairs=corpus.info.are_pairs,
    )


def open_validation(paths: Sequence[str], trained: Sequence[PlannedSource]) -> CorpusSet:
    """Open the validation corpora of a configuration.

    Args:
        paths: Paths of the corpora.
        trained: Corpora that the run trains on.

    Raises:
        UserError: A corpus can't be opened, is listed twice, is trained on, or was prepared with another tokenizer than
            the training corpora.
    """
    found: dict[str, PlannedSource] = {}
    others = {source.fingerprint: source.path for source in trained}
    tokenizers = {source.tokenizer: source.path for source in trained if source.tokenizer}
    opened = []
    for path in paths:
        corpus = Corpus.open(path)
        opened.append(corpus)
        if corpus.fingerprint in others:
            raise UserError(
                f"data.validation: {path} is the same corpus as {others[corpus.fingerprint]}, so its loss would not "
                "measure unseen text; remove it, or hold documents of a training corpus out with data.eval_fraction"
                if corpus.fingerprint not in found
                else f"data.validation: {path} and {others[corpus.fingerprint]} are the same corpus; list it once"
            )
        if tokenizers and corpus.info.tokenizer.fingerprint not in tokenizers:
            raise UserError(
                f"data.validation: {path} was prepared with the tokenizer {corpus.info.tokenizer.name}, which is not "
                f"that of {next(iter(tokenizers.values()))}; prepare both with the same tokenizer"
            )
        others[corpus.fingerprint] = path
        found[corpus.fingerprint] = _planned(path, corpus, None)
    return CorpusSet(tuple(found.values()), opened)


def plan_input(corpora: CorpusSet, validation: CorpusSet | None = None) -> PlanInput:
    """Return the planner's input for all documents of all corpora; raise UserError if a corpus can't be read."""
    opened = corpora.corpora
    lengths = [corpus.lengths for corpus in opened]
    return PlanInput(
        sources=corpora.sources,
        lengths=lengths[0] if len(lengths) == 1 else np.concatenate(lengths),
        spans=_joined_spans(opened),
        validation=()
        if validation is None
        else tuple(
            plan_input(CorpusSet((source,), (corpus,)))
            for source, corpus in zip(validation.sources, validation.corpora, strict=True)
        ),
    )


def _joined_spans(corpora: Sequence[Corpus]) -> LabelSpans | None:
    """Return all corpora's label spans, or None if no corpus has any. A corpus without spans is fully supervised."""
    known = [corpus.spans for corpus in corpora]
    if all(spans is None for spans in known):
        return None
    whole = [spans or _whole(corpus.lengths) for spans, corpus in zip(known, corpora, strict=True)]
    if len(whole) == 1:
        return whole[0]
    shifts = np.cumsum([0, *(spans.starts.size for spans in whole)])
    ends = [spans.offsets[1:] + shift for spans, shift in zip(whole, shifts[:-1], strict=True)]
    return LabelSpans(
        offsets=np.concatenate([np.zeros(1, dtype=np.int64), *ends]),
        starts=np.concatenate([spans.starts for spans in whole]),
        stops=np.concatenate([spans.stops for spans in whole]),
    )


def _whole(lengths: NDArray[np.uint32]) -> LabelSpans:
    return LabelSpans(
        offsets=np.arange(lengths.size + 1, dtype=np.int64),
        starts=np.zeros(lengths.size, dtype=np.int64),
        stops=lengths.astype(np.int64),
    )
