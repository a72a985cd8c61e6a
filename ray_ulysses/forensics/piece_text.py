"""Decodes the text of a piece of a document with the tokenizer that produced its tokens.

If only parts of a document are supervised, they are enclosed in ``⟦`` and ``⟧``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.tokenize.tokenizers import Tokenizer, TokenizerInfo, load_tokenizer
from ray_ulysses.errors import UserError
from ray_ulysses.forensics.request import TextMode

_HEAD_CHARACTERS, _TAIL_CHARACTERS = 320, 160
_OPEN, _CLOSE = "⟦", "⟧"


@dataclass(frozen=True, kw_only=True, slots=True)
class PieceText:
    """The text of a piece, shortened in the middle if it is long."""

    head: str
    tail: str
    """Its end; empty if nothing was left out."""
    left_out: int
    """Number of characters between the two."""


class PieceTexts:
    """Decodes pieces; each tokenizer is loaded, or fails to load, only once."""

    def __init__(self, mode: TextMode) -> None:
        self._mode = mode
        self._tokenizers: dict[str, Tokenizer | UserError] = {}

    def of(
        self, corpus: Corpus, document: int, start: int, length: int, labels: Sequence[tuple[int, int]]
    ) -> PieceText | None:
        """Return the text of a range of tokens of a document; None if no text is wanted.

        Args:
            corpus: The corpus.
            document: Number of the document in it.
            start: First token.
            length: Number of tokens.
            labels: The supervised ranges, each as first token and the token after the last.

        Raises:
            UserError: The tokenizer can't be loaded, is not the one that prepared the corpus, or the tokens can't be
                read.
        """
        if self._mode == "none":
            return None
        tokens, tokenizer = corpus.read(document, start, length), self._tokenizer(corpus.info.tokenizer)
        if corpus.info.spans is None:
            text = tokenizer.decode(tokens)
        else:
            text = _marked(tokens, [(first - start, last - start) for first, last in labels], tokenizer)
        return PieceText(head=text, tail="", left_out=0) if self._mode == "full" else shortened(text)

    def _tokenizer(self, info: TokenizerInfo) -> Tokenizer:
        if info.fingerprint not in self._tokenizers:
            try:
                self._tokenizers[info.fingerprint] = _load(info)
            except UserError as error:
                self._tokenizers[info.fingerprint] = error
        found = self._tokenizers[info.fingerprint]
        if isinstance(found, UserError):
            raise found
        return found


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


def _load(info: TokenizerInfo) -> Tokenizer:
    tokenizer = load_tokenizer(info.name)
    if tokenizer.info.fingerprint != info.fingerprint:
        raise UserError(
            f"tokenizer={info.name}: its files are not those that prepared the corpus (fingerprint "
            f"{tokenizer.info.fingerprint}, the corpus has {info.fingerprint}); restore them to see the text"
        )
    return tokenizer
