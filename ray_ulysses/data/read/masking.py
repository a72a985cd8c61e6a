"""Masks tokens of documents for a masked language model.

Every draw is a hash of the seed, the epoch, the document and the token's position in the document. A document therefore
has the same mask at every world size, in every row and at every place in it, and after every resume.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from ray_ulysses.data.fingerprint import UInt64Array, mix, mix_int, stable_hash
from ray_ulysses.errors import UserError

if TYPE_CHECKING:
    from ray_ulysses.data.tokenize.tokenizers import Tokenizer

MaskUnit = Literal["token", "word", "span"]
MaskReplacement = Literal["bert", "mask"]
LONGEST_UNIT = 10
"""Maximum length of a span in words or tokens, as in SpanBERT. A longer word is divided into words of this length."""
_WORD_MARKS = (("##", False), ("Ġ", True), ("▁", True))
"""Marks of WordPiece, byte-level BPE and SentencePiece, and whether a mark begins a word instead of continuing one."""
_WHITE_SPACE = ("Ċ", "ĉ", "č", "\n", "\t", "\r")
_CHOICE, _LENGTH, _REPLACEMENT, _RANDOM = range(4)
# SpanBERT (arXiv:1907.10529): lengths are geometric with probability 0.2, at most 10, with a mean of 3.8.
_LONGER = np.array([(0.8**length - 0.8**LONGEST_UNIT) / (1 - 0.8**LONGEST_UNIT) for length in range(LONGEST_UNIT)])
"""Probability that a span is longer than each length from 0 to 9."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Masking:
    """Settings of a masked language model's masks."""

    seed: int
    fraction: float = 0.15
    """Expected share of a document's maskable tokens that are predicted."""
    unit: MaskUnit = "token"
    """What is drawn: single tokens, complete words, or spans of several words (of tokens without ``word_starts``)."""
    replace: MaskReplacement = "bert"
    """``bert`` replaces 80% of the predicted tokens by the mask token and 10% by a random token, and keeps 10%, drawn
    for each token or for each span. ``mask`` replaces all of them by the mask token."""
    mask_id: int
    vocab_size: int
    """Random tokens are drawn from the ids below, without ``special_ids``."""
    special_ids: frozenset[int] = frozenset()
    """Tokens that are neither predicted nor drawn as random tokens."""
    word_starts: NDArray[np.bool_] | None = None
    """Whether each token begins a word; bool [vocab_size]. None if the vocabulary has no words."""

    def refuse_small(self, vocab_size: int) -> None:
        """Raise UserError if a model's vocabulary lacks the mask token or some of the random tokens."""
        if self.vocab_size > vocab_size:
            raise UserError(
                f"the tokenizer has {self.vocab_size} tokens, but the model's vocab_size is {vocab_size}; prepare the "
                "corpus with the model's own tokenizer"
            )

    def apply(
        self,
        tokens: NDArray[np.integer],
        *,
        document: int,
        epoch: int = 0,
        first: int = 0,
        may_predict: NDArray[np.bool_] | None = None,
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the input ids of a document, or of a piece of it, and whether each token is predicted; [tokens].

        At least one token is predicted if any token may be predicted, since the document's loss would vanish otherwise.

        Args:
            tokens: All tokens of the document or piece.
            document: Number that identifies the document in the run.
            epoch: Epoch, from 0. The mask of a document changes with each epoch.
            first: Position of the first token in the document.
            may_predict: Tokens that may be predicted, by default all; bool [tokens]. Other tokens are never masked.
        """
        ids = tokens.astype(np.int64)
        may = ~np.isin(ids, [*self.special_ids])
        if may_predict is not None:
            may &= may_predict
        if not may.any():
            return ids, may
        key = mix_int(mix_int(mix_int(self.seed) ^ epoch) ^ document)
        places = np.arange(first, first + ids.size, dtype=np.int64)
        chosen, owners = self._chosen(key, ids, places, may)
        drawn = _uniform(key, _REPLACEMENT, owners[chosen]) if self.replace == "bert" else np.zeros(int(chosen.sum()))
        special = np.array(sorted(self.special_ids), dtype=np.int64)
        random = (_hash(key, _RANDOM, places[chosen]) % np.uint64(self.vocab_size - special.size)).astype(np.int64)
        # Skip the special ids: the number of other ids below each of them is its own value minus its rank.
        random += np.searchsorted(special - np.arange(special.size), random, side="right")
        ids[chosen] = np.where(drawn < 0.8, self.mask_id, np.where(drawn < 0.9, random, ids[chosen]))
        return ids, chosen

    def _chosen(
        self, key: int, ids: NDArray[np.int64], places: NDArray[np.int64], may: NDArray[np.bool_]
    ) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        """Return which tokens are predicted, and the position whose draw decides each token's replacement; [tokens]."""
        begins = np.ones(ids.size, dtype=np.bool_)
        if self.unit != "token" and self.word_starts is not None:
            begins = self.word_starts[ids] | ~may
            begins[0] = True
            begins[1:] |= ~may[:-1]
            index = np.arange(ids.size)
            begins |= (index - np.maximum.accumulate(np.where(begins, index, 0))) % LONGEST_UNIT == 0
        # Each token or word has the position of its first token, and a unit that may not be predicted has one token.
        keys, unit_may, unit_of = places[begins], may[begins], np.cumsum(begins) - 1
        owners = places
        if self.unit == "span":
            # Spans that begin before the first token may extend into the document, so that its edges are not favoured.
            keys = np.concatenate([keys[0] - np.arange(LONGEST_UNIT - 1, 0, -1), keys])
            index = np.arange(keys.size)
            starts = _uniform(key, _CHOICE, keys) < _start_probability(self.fraction)
            lengths = 1 + (_uniform(key, _LENGTH, keys)[:, None] < _LONGER[1:]).sum(axis=1)
            covered = np.maximum.accumulate(np.where(starts, index + lengths, 0)) > index
            newest = keys[np.maximum.accumulate(np.where(starts, index, 0))]
            own = slice(LONGEST_UNIT - 1, None)
            keys, units, owners = keys[own], covered[own], newest[own][unit_of]
        else:
            units = _uniform(key, _CHOICE, keys) < self.fraction
        units &= unit_may
        if not units.any():
            candidates = np.flatnonzero(unit_may)
            units[candidates[_hash(key, _CHOICE, keys[candidates]).argmin()]] = True
        return units[unit_of], owners


@functools.cache
def _source_key(fingerprint: str) -> int:
    return int(stable_hash(fingerprint)[:16], 16)


def document_key(fingerprint: str, number: int) -> int:
    """Return the number that identifies a document for `Masking.apply`: document ``number`` of a corpus."""
    return _source_key(fingerprint) ^ mix_int(number)


def masking_with(
    tokenizer: Tokenizer, *, seed: int, fraction: float, unit: MaskUnit, replace: MaskReplacement
) -> Masking:
    """Return the masking for a tokenizer's token ids.

    Raises:
        UserError: The tokenizer has no mask token, or does not mark words although they are masked.
    """
    name = tokenizer.info.name
    if tokenizer.mask_token_id is None:
        raise UserError(
            f"tokenizer={name}: has no mask token, which a masked language model needs; use an encoder's tokenizer, or "
            'set "mask_token" in tokenizer_config.json to a token of the vocabulary'
        )
    starts = word_starts(tokenizer.tokens.ids)
    if unit == "word" and starts is None:
        raise UserError(
            f"objective.mask_unit=word: the vocabulary of the tokenizer {name} does not mark where words begin; use "
            "token or span"
        )
    return Masking(
        seed=seed,
        fraction=fraction,
        unit=unit,
        replace=replace,
        mask_id=tokenizer.mask_token_id,
        vocab_size=tokenizer.info.vocab_size,
        special_ids=tokenizer.special_ids,
        word_starts=starts,
    )


def word_starts(vocabulary: Mapping[str, int]) -> NDArray[np.bool_] | None:
    """Return whether each token of a vocabulary begins a word, or None if the vocabulary does not mark words.

    Args:
        vocabulary: Token ids by token text, in the notation of `tokenizer.json`.
    """
    uses = {mark: sum(text.startswith(mark) for text in vocabulary) for mark, _ in _WORD_MARKS}
    # A large vocabulary may contain the mark of another algorithm as text, such as "##" of Markdown.
    mark, begins = max(_WORD_MARKS, key=lambda one: uses[one[0]])
    if not uses[mark]:
        return None
    found = np.zeros(max(vocabulary.values()) + 1, dtype=np.bool_)
    for text, token in vocabulary.items():
        found[token] = text.startswith((mark, *_WHITE_SPACE)) if begins else not text.startswith(mark)
    return found


@functools.lru_cache(maxsize=8)
def _start_probability(fraction: float) -> float:
    """Return the probability with which a span must begin at each unit so that ``fraction`` of all units are covered.

    A unit stays uncovered if none of the units up to it begins a span that is long enough.
    """
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if 1 - np.prod(1 - middle * _LONGER) < fraction else (low, middle)
    return high


def _hash(key: int, use: int, places: NDArray[np.int64]) -> UInt64Array:
    return mix(np.uint64(mix_int(key + use)) ^ mix(places.view(np.uint64)))


def _uniform(key: int, use: int, places: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return a number in [0, 1) for each position."""
    return (_hash(key, use, places) >> np.uint64(11)).astype(np.float64) * 2.0**-53
