"""Compares the tokens of two tokenizers: the text of each id, and the merges that make tokens of a text."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ray_ulysses.validation import KNOWN_FIELDS_ONLY, Positive, Whole

_MOST_NAMED = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """The meaning of a corpus's token ids, stored with the corpus.

    It does not depend on how the tokenizer is stored: the library's version, the order of entries, settings of padding
    and truncation, and the chat template.
    """

    __pydantic_config__ = KNOWN_FIELDS_ONLY

    size: Positive
    """One more than the largest id."""
    added: tuple[tuple[Whole, str], ...]
    """The added tokens, special or not, by ascending id."""
    others: str
    """Hash of the ids and texts of all other tokens."""
    merges: str | None
    """Hash of the merges of BPE in their order, of which there may be none; None if they are unknown."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Tokens:
    """All tokens of a tokenizer, by which it is compared with the vocabulary of a corpus."""

    ids: Mapping[str, int]
    """The id of each token, added ones included."""
    added: Mapping[int, str]
    """The added tokens by id."""
    merges: Sequence[str | Sequence[str]] | None
    """The merges of BPE as `tokenizer.json` has them, pairs or strings with a space; None if they are unknown."""

    def vocabulary(self) -> Vocabulary:
        """Return what a corpus stores of them."""
        return Vocabulary(
            size=max(self.ids.values()) + 1,
            added=tuple(sorted(self.added.items())),
            others=self._hash_without(self.added.keys()),
            merges=self._hash_of_merges(),
        )

    def difference_from(self, corpus: Vocabulary) -> str | None:
        """Return how the ids of a corpus mean other text than these tokens; None if they mean the same.

        Tokens that only one of the two has are no difference, if they were added: their ids are free in the other.
        """
        texts = {token_id: text for text, token_id in self.ids.items()}
        others = [
            f"token {token_id} is {text!r} in the corpus and {texts[token_id]!r} in the model"
            for token_id, text in corpus.added
            if texts.get(token_id, text) != text
        ]
        others += [
            f"{text!r} is token {token_id} in the corpus and {self.ids[text]} in the model"
            for token_id, text in corpus.added
            if self.ids.get(text, token_id) != token_id
        ]
        if others:
            more = f", and {len(others) - _MOST_NAMED} more" if len(others) > _MOST_NAMED else ""
            return ", ".join(others[:_MOST_NAMED]) + more
        beyond = [token_id for token_id in self.added if token_id >= corpus.size]
        if self._hash_without({*beyond, *(token_id for token_id, _ in corpus.added)}) != corpus.others:
            size = max(self.ids.values()) + 1
            return f"ids up to {corpus.size - 1} in the corpus and up to {size - 1} in the model stand for other texts"
        merges = self._hash_of_merges()
        if None not in (merges, corpus.merges) and merges != corpus.merges:
            return "their merges differ, so that a text becomes other tokens"
        return None

    def _hash_without(self, left_out: Iterable[int]) -> str:
        skipped = frozenset(left_out)
        entries = sorted((token_id, text) for text, token_id in self.ids.items() if token_id not in skipped)
        return _hash(f"{token_id} {text}" for token_id, text in entries)

    def _hash_of_merges(self) -> str | None:
        if self.merges is None:
            return None
        return _hash(merge if isinstance(merge, str) else " ".join(merge) for merge in self.merges)


def _hash(texts: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(texts).encode("utf-8", "surrogatepass")).hexdigest()[:32]
