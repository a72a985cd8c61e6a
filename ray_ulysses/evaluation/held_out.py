"""Documents to evaluate a model on, and the tokenizer for texts inserted into them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.plan.corpus_set import CorpusSet, PlannedSource, open_sources
from ray_ulysses.data.read.masking import Masking, document_key
from ray_ulysses.data.tokenize.tokenizers import Tokenizer, load_tokenizer
from ray_ulysses.errors import UserError
from ray_ulysses.evaluation.scoring import Passage
from ray_ulysses.inspect.run_data import DATA_ERRORS, PlannedData, plan_if_readable, planned_data
from ray_ulysses.storage.place import Place

_GIVE = "specify a corpus of held-out documents, made by `ray-ulysses prepare`: --data CORPUS"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HeldOut:
    """The documents to evaluate on, each with at least two tokens."""

    corpora: CorpusSet
    """The corpora that contain the documents."""
    numbers: NDArray[np.int64]
    """int64 [documents]. Document numbers in ``corpora``."""
    lengths: NDArray[np.int64]
    """int64 [documents]. Number of tokens of each document, including the end token, or of both texts of a pair."""
    words: str
    """Description of the documents' source."""
    is_training_text: bool
    """Whether the model was trained on the documents. If so, the losses say nothing about new text."""
    are_pairs: bool = False
    """Whether each document is a pair of texts, the second one with the answer that should be less probable."""
    masking: Masking | None = None
    """How tokens are masked, if the model is a masked language model."""

    def read(self, place: int, start: int, length: int) -> NDArray[np.int64]:
        """Read ``length`` tokens (int64) of the document at an index of ``numbers``, from token ``start`` on."""
        return self.corpora.read(int(self.numbers[place]), start, length).astype(np.int64)

    def passage(self, place: int, start: int, length: int, first_scored: int = 1) -> Passage:
        """Read a part of a document as a passage. Tokens are scored from index ``first_scored`` on."""
        tokens, is_scored = self.read(place, start, length), np.arange(length) >= first_scored
        weights = self.corpora.label_weights(int(self.numbers[place]), start, start + length)
        may_predict = np.ones(length, dtype=np.bool_) if weights is None else weights > 0
        if self.masking is None:
            return Passage(tokens=tokens, is_scored=is_scored & may_predict)
        corpus, local = self.corpora.locate(int(self.numbers[place]))
        key = document_key(corpus.fingerprint, local)
        masked, is_predicted = self.masking.apply(tokens, document=key, first=start, may_predict=may_predict)
        return Passage(tokens=tokens, is_scored=is_scored & is_predicted, masked_tokens=masked)

    @property
    def longest_texts(self) -> NDArray[np.integer]:
        """Number of tokens of each document or, for a pair, of its longer text."""
        return np.concatenate([corpus.text_lengths for corpus in self.corpora.corpora])[self.numbers]

    def pair(self, place: int) -> tuple[Passage, Passage]:
        """Read the texts with the chosen and the rejected answer of the pair at an index of ``numbers``."""
        corpus, local = self.corpora.locate(int(self.numbers[place]))
        border = int(corpus.borders[local])
        return self.passage(place, 0, border), self.passage(place, border, int(self.lengths[place]) - border)


def held_out_documents(data: Place | None, run_dir: Place | None, *, trust_run: bool = False) -> HeldOut:
    """Return the documents in ``data`` if given, otherwise the run's held-out documents or its training documents.

    Raises:
        UserError: There are no documents, or they can't be read.
    """
    if data is not None:
        return _given(data, run_dir)
    if run_dir is None:
        raise UserError(f"--data: must be set, because a model directory has no documents; {_GIVE}")
    try:
        planned = planned_data(run_dir, trust_run=trust_run)
        if planned is None:
            raise UserError("the run has no data plan")
        return _planned(planned)
    except DATA_ERRORS as error:
        raise UserError(f"--data: is not set, and the run's own documents can't be read ({error}); {_GIVE}") from error


def _given(data: Place, run_dir: Place | None) -> HeldOut:
    try:
        corpora = open_sources([(str(data), None)])
    except UserError as error:
        raise UserError(f"--data={str(data)!r}: {error}") from error
    plan = None if run_dir is None else plan_if_readable(run_dir)
    trained = () if plan is None else plan.newest.sources
    _refuse_other_tokens(data, corpora.corpora[0], trained)
    is_training_text = corpora.sources[0].fingerprint in {one.fingerprint for one in trained}
    words = f"all documents of {data}" + (", which the run was trained on" if is_training_text else "")
    return _of(corpora, None, words=words, is_training_text=is_training_text)


def _refuse_other_tokens(data: Place, corpus: Corpus, sources: Sequence[PlannedSource]) -> None:
    """Refuse documents prepared with a different tokenizer than the run's, if the run's plan records the tokenizer."""
    trained = {source.tokenizer: source.path for source in sources if source.tokenizer}
    if trained and corpus.info.tokenizer.fingerprint not in trained:
        raise UserError(
            f"--data={str(data)!r}: was prepared with the tokenizer {corpus.info.tokenizer.name}, which differs from "
            f"the tokenizer of the run's corpus ({next(iter(trained.values()))}); prepare the documents with that one"
        )


def _planned(planned: PlannedData) -> HeldOut:
    corpora, numbers = CorpusSet(planned.sources), np.flatnonzero(planned.plan.held_out())
    if numbers.size == 0:
        words = "the run's training documents, because the run has no held-out documents"
        return _of(corpora, None, words=words, is_training_text=True)
    words = "the run's held-out documents (data.eval_fraction)"
    return _of(corpora, numbers, words=words, is_training_text=False)


def _of(corpora: CorpusSet, numbers: NDArray[np.int64] | None, *, words: str, is_training_text: bool) -> HeldOut:
    lengths = np.concatenate([corpus.lengths for corpus in corpora.corpora]).astype(np.int64)
    numbers = np.arange(lengths.size) if numbers is None else numbers
    numbers = numbers[lengths[numbers] > 1]
    if numbers.size == 0:
        raise UserError(f"--data: no document has at least two tokens ({words}); {_GIVE}")
    return HeldOut(
        corpora=corpora,
        numbers=numbers,
        lengths=lengths[numbers],
        words=words,
        is_training_text=is_training_text,
        are_pairs=any(source.are_pairs for source in corpora.sources),
    )


def refuse_other_tokens(held: HeldOut, model_dir: Path) -> None:
    """Refuse documents whose tokens or end token differ from those of the model directory's tokenizer, if it has one.

    Raises:
        UserError: The tokenizers differ.
    """
    info, own = held.corpora.corpora[0].info, _loaded(model_dir)
    if isinstance(own, str) or own.info.fingerprint == info.tokenizer.fingerprint:
        return
    difference = own.tokens.difference_from(info.vocabulary)
    if difference is None and own.info.eos_token_id != info.tokenizer.eos_token_id:
        difference = (
            f"the end token is {info.tokenizer.eos_token_id} in the corpus and {own.info.eos_token_id} in the model"
        )
    if difference is not None:
        raise UserError(
            f"--data: the documents were prepared with the tokenizer {info.tokenizer.name}, which differs from the "
            f"model's tokenizer in {model_dir} ({difference}); prepare the documents with the model's tokenizer, or "
            "set --tokenizer DIR if the documents are correct"
        )


def find_tokenizer(held: HeldOut, given: Path | None, model_dir: Path | None) -> Tokenizer:
    """Load the tokenizer ``given`` (or ``bytes``) if set, otherwise the documents' tokenizer, otherwise the model's.

    Raises:
        UserError: No tokenizer can be loaded.
    """
    if given is not None:
        try:
            return load_tokenizer(given)
        except UserError as error:
            raise UserError(f"--{error}") from error
    info = held.corpora.corpora[0].info.tokenizer
    prepared = _loaded(info.name)
    if not isinstance(prepared, str) and prepared.info.fingerprint == info.fingerprint:
        return prepared
    own = None if model_dir is None else _loaded(model_dir)
    if own is None or isinstance(own, str):
        why = prepared if isinstance(prepared, str) else f"its files in {info.name} have changed"
        raise UserError(
            f"--tokenizer: is not set, and the documents' tokenizer can't be loaded ({why}); set --tokenizer DIR, "
            "or skip retrieval with --task loss"
        )
    return own


def _loaded(name: Path | str) -> Tokenizer | str:
    try:
        return load_tokenizer(name)
    except (UserError, OSError) as error:
        return str(error)
