"""Encodes a document of any kind as tokens and label spans."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ray_ulysses.data.sources.row_fields import ChatRow, CompletionRow, Content, RowError, TokenRow
from ray_ulysses.data.tokenize.spans import mask_spans, span_mask
from ray_ulysses.data.tokenize.tokenizers import Tokenizer

IGNORED_LABEL = -100
_DIGEST_BYTES = 16


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EncodedDocument:
    """A document in its stored form.

    Attributes:
        ids: int64 token ids, the end token last.
        starts: int64, the first token of each label span.
        stops: int64, one past the last.
        digest: 16 bytes that are equal for equal documents.
        turn_ends: The special tokens at the end of supervised spans, with which a model learns to end its turn.
        weights: fp32, the factor on the loss of each span's tokens; None if all are 1.
    """

    ids: NDArray[np.int64]
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    digest: bytes
    turn_ends: frozenset[int] = frozenset()
    weights: NDArray[np.float32] | None = None

    @property
    def is_whole(self) -> bool:
        """Return whether one span of weight 1 covers the document."""
        return self.weights is None and self.starts.size == 1 and self.starts[0] == 0 and self.stops[0] == self.ids.size


def encode_document(content: Content, tokenizer: Tokenizer) -> EncodedDocument:
    """Return the tokens and label spans of a document.

    Raises:
        RowError: It can't be tokenized, names tokens outside the vocabulary, or nothing of it is supervised.
    """
    if isinstance(content, str):
        ids = tokenizer.encode(content)
        digest = hashlib.blake2b(content.encode("utf-8"), digest_size=_DIGEST_BYTES).digest()
        return EncodedDocument(
            ids=ids, starts=np.zeros(1, dtype=np.int64), stops=np.array([ids.size], dtype=np.int64), digest=digest
        )
    if isinstance(content, TokenRow):
        ids, mask = _token_row(content, tokenizer)
        given = mask_spans(mask[: content.tokens.size])[1] if content.labels is not None else np.empty(0, np.int64)
        return _encoded(ids, *mask_spans(mask), _turn_ends(ids, given, tokenizer))
    if isinstance(content, ChatRow):
        return _chat(content, tokenizer)
    ids, num_prompt = _completion(content, tokenizer)
    return _encoded(ids, np.array([num_prompt], dtype=np.int64), np.array([ids.size], dtype=np.int64))


def weighted(document: EncodedDocument, weight: float | NDArray[np.float32]) -> EncodedDocument:
    """Return a document with a loss weight, or with one for each of its tokens; the end token has that of the last.

    Raises:
        RowError: No supervised token has a weight above 0.
    """
    if isinstance(weight, np.ndarray):
        return _weighted_tokens(document, weight)
    if weight == 0:
        raise RowError("its weight is 0")
    if weight == 1:
        return document
    return replace(document, weights=np.full(document.starts.size, weight, dtype=np.float32))


def _weighted_tokens(document: EncodedDocument, weights: NDArray[np.float32]) -> EncodedDocument:
    size = document.ids.size
    weights = np.append(weights, np.full(size - weights.size, weights[-1]))
    weights = np.where(span_mask(document.starts, document.stops, 0, size), weights, 0)
    edges = np.flatnonzero(np.diff(weights, prepend=np.nan, append=np.nan))
    starts, stops = edges[:-1], edges[1:]
    learned = weights[starts] > 0
    starts, stops = starts[learned], stops[learned]
    if not (stops > 1).any():
        raise RowError("no token of it is supervised")
    of_spans = weights[starts]
    return replace(document, starts=starts, stops=stops, weights=None if (of_spans == 1).all() else of_spans)


def _encoded(
    ids: NDArray[np.int64],
    starts: NDArray[np.int64],
    stops: NDArray[np.int64],
    turn_ends: frozenset[int] = frozenset(),
) -> EncodedDocument:
    # Nothing predicts the first token of a document.
    if not (stops > 1).any():
        raise RowError("no token of it is supervised")
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES, person=b"tokens and spans")
    for values in (ids, starts, stops):
        digest.update(values.size.to_bytes(8, "little") + values.astype("<i8", copy=False).tobytes())
    return EncodedDocument(ids=ids, starts=starts, stops=stops, digest=digest.digest(), turn_ends=turn_ends)


def _turn_ends(ids: NDArray[np.int64], stops: NDArray[np.int64], tokenizer: Tokenizer) -> frozenset[int]:
    """Return the special tokens at the end of supervised spans, before an end token is added to the document."""
    return tokenizer.special_ids & frozenset(ids[stops - 1].tolist())


def _token_row(row: TokenRow, tokenizer: Tokenizer) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    tokens, labels, info = row.tokens, row.labels, tokenizer.info
    outside = np.flatnonzero((tokens < 0) | (tokens >= info.vocab_size))
    if outside.size:
        place = int(outside[0])
        raise RowError(f"token {tokens[place]} at place {place} is outside the vocabulary of {info.vocab_size}")
    mask = np.ones(tokens.size, dtype=np.bool_)
    if labels is not None:
        mask = labels != IGNORED_LABEL
        wrong = np.flatnonzero(mask & (labels != tokens))
        if wrong.size:
            place = int(wrong[0])
            raise RowError(f"label {labels[place]} at place {place} is neither -100 nor the token {tokens[place]}")
    if tokens[-1] != info.eos_token_id:
        # The end token is supervised if the token before it is.
        tokens, mask = np.append(tokens, info.eos_token_id), np.append(mask, mask[-1])
    return tokens, mask


def _chat(row: ChatRow, tokenizer: Tokenizer) -> EncodedDocument:
    chat = tokenizer.chat().encode(row.messages, row.tools)
    if not chat.ids.size:
        raise RowError("the chat template writes nothing")
    ids, stops, eos = chat.ids, chat.stops, tokenizer.info.eos_token_id
    turn_ends = _turn_ends(ids, stops, tokenizer)
    if ids[-1] != eos:
        if stops.size and stops[-1] == ids.size:
            stops = np.append(stops[:-1], ids.size + 1)
        ids = np.append(ids, eos)
    return _encoded(ids, chat.starts, stops, turn_ends)


def _completion(row: CompletionRow, tokenizer: Tokenizer) -> tuple[NDArray[np.int64], int]:
    """Return the tokens, and the number of the prompt's, which are the same as for the prompt alone."""
    prompt = tokenizer.encode(row.prompt)[:-1]
    together = tokenizer.encode(row.prompt + row.completion)
    if np.array_equal(together[: prompt.size], prompt) and together.size > prompt.size + 1:
        return together, prompt.size
    # A token would cross the border. Tokenizing both separately works unless the tokenizer prepends a space.
    apart = np.concatenate([prompt, tokenizer.encode(row.completion)])
    if tokenizer.decode(apart) != tokenizer.decode(together):
        raise RowError("the tokens of the prompt change when the completion follows; let the prompt end with a word")
    return apart, prompt.size
