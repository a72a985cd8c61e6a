"""Encodes a document of any kind as tokens and label spans."""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ray_ulysses.data.fingerprint import stable_hash
from ray_ulysses.data.sources.rows import ChatRow, CompletionRow, Content, RowError, TokenRow
from ray_ulysses.data.tokenize.chat import ChatFormat
from ray_ulysses.data.tokenize.options import NONE, TOKENIZER, EncodingOptions
from ray_ulysses.data.tokenize.spans import DIGEST_BYTES, EncodedDocument, mask_spans, span_mask
from ray_ulysses.data.tokenize.tokenizers import (
    Tokenizer,
    load_tokenizer,
    spelled,
)
from ray_ulysses.errors import UserError
from ray_ulysses.validation import KNOWN_FIELDS_ONLY, Whole

IGNORED_LABEL = -100
_DIGEST_CHARACTERS = 1 << 20
NOT_SUPERVISED = "no token of it is supervised"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EncodedTexts:
    """Texts in their stored form, each supervised as a whole."""

    ids: NDArray[np.int64]
    """The tokens of all, one text after the other."""
    lengths: NDArray[np.int64]
    """The number of tokens of each; with fewer than two, none of them is supervised."""
    digests: list[bytes]
    """16 bytes for each, equal for equal texts."""
    left_out: dict[int, str]
    """The reason to leave out each text, by its place, that spells a special token and would become it, or that the
    tokenizer can't write."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodingInfo:
    """How the documents of a corpus were written; stored in the corpus."""

    __pydantic_config__ = KNOWN_FIELDS_ONLY

    bos_token_id: Whole | None
    """The token that begins texts and prompts; None for none."""
    eos_token_id: Whole | None
    """The token that ends documents; None for none."""
    chats: str | None = None
    """How the turns of conversations were found and which are learned; None if there were no conversations."""
    num_chats: Whole = 0
    """Conversations that were written."""
    num_chat_documents: Whole = 0
    """The documents made from them; a turn may need its own document."""
    num_open_turns: Whole = 0
    """Learned turns that no special token ends."""
    chat_template: str | None = None
    """The text of the chat template that wrote them; None if there were none, or if they were written as bytes."""


class DocumentEncoder:
    """Writes documents as tokens: a tokenizer with the options of a preparation.

    Attributes:
        bos_token_id: The token that begins texts and prompts; None for none.
        eos_token_id: The token that ends documents; None for none.
        frame: Those of the two, by id, that are not special and that a text or a chat becomes if it spells them.
        forgeable: The tokens, by id, that a text would become if it spelled them, and must not: special ones, and
            ``frame``.

    Raises:
        UserError: The tokenizer lacks a chosen token.
    """

    def __init__(self, tokenizer: Tokenizer, options: EncodingOptions | None = None) -> None:
        self.tokenizer, self.options = tokenizer, options or EncodingOptions()
        self.bos_token_id = _chosen("bos", self.options.bos, tokenizer.bos_token_id, tokenizer)
        self.eos_token_id = _chosen("eos", self.options.eos, tokenizer.info.eos_token_id, tokenizer)
        added = {
            token: text
            for token, text in tokenizer.added_tokens.items()
            if token in (self.bos_token_id, self.eos_token_id) and token not in tokenizer.special_ids
        }
        self.frame = spelled(added, lambda text: tokenizer.encode_all([text])[0])
        self.forgeable = {**tokenizer.forgeable, **self.frame}

    @functools.cached_property
    def chat(self) -> ChatFormat:
        """Return the format of conversations; UserError if the tokenizer has none."""
        return self.tokenizer.chat(self.options, self.frame)

    @property
    def fingerprint(self) -> str:
        """Return a hash of the tokens that begin and end documents."""
        return stable_hash([self.bos_token_id, self.eos_token_id])

    def encode(self, content: Content) -> list[EncodedDocument]:
        """Return a document as tokens and label spans; a conversation may become several.

        Raises:
            RowError: It can't be tokenized, names tokens outside the vocabulary, or nothing of it is supervised.
        """
        if isinstance(content, str):
            ids = self._framed(content)
            _refuse_without_labels(np.array([ids.size]))
            starts, stops = np.zeros(1, dtype=np.int64), np.array([ids.size], dtype=np.int64)
            return [EncodedDocument(ids=ids, starts=starts, stops=stops)]
        if isinstance(content, TokenRow):
            return [self._token_row(content)]
        if isinstance(content, ChatRow):
            chats = self.chat.encode(content.messages, content.tools)
            if not chats:
                raise RowError(NOT_SUPERVISED)
            return [self._chat(chat) for chat in chats]
        ids, num_prompt = self._completion(content)
        return [_encoded(ids, np.array([num_prompt], dtype=np.int64), np.array([ids.size], dtype=np.int64))]

    def encode_texts(self, texts: Sequence[str]) -> EncodedTexts:
        """Return texts as documents that are supervised as a whole."""
        left_out: dict[int, str] = {}
        try:
            bare, num_bare = self.tokenizer.encode_all(texts)
        except RowError:
            for place, text in enumerate(texts):
                try:
                    self.tokenizer.encode_all([text])
                except RowError as error:
                    left_out[place] = str(error)
            bare, num_bare = self.tokenizer.encode_all(
                ["" if place in left_out else text for place, text in enumerate(texts)]
            )
        if self.forgeable:
            places = np.flatnonzero(np.isin(bare, [*self.forgeable]))
            owners = np.searchsorted(np.cumsum(num_bare), places, side="right")
            left_out |= {
                int(owner): self._forged(int(bare[place])) for owner, place in zip(owners, places, strict=True)
            }
        begin, end = self.bos_token_id is not None, self.eos_token_id is not None
        lengths = num_bare + begin + end
        stops = np.cumsum(lengths)
        ids = np.empty(bare.size + len(texts) * (begin + end), dtype=np.int64)
        is_bare = np.ones(ids.size, dtype=np.bool_)
        for token, places in ((self.bos_token_id, stops - lengths), (self.eos_token_id, stops - 1)):
            if token is not None:
                ids[places], is_bare[places] = token, False
        ids[is_bare] = bare
        return EncodedTexts(ids=ids, lengths=lengths, digests=[text_digest(text) for text in texts], left_out=left_out)

    def encode_parts(self, text: str) -> Iterator[NDArray[np.integer[Any]]]:
        """Yield the tokens of a long text, supervised as a whole, in parts where its tokenizer allows it.

        Raises:
            RowError: It has a single token, or none, or it forges one.
        """
        if self.forgeable:
            # Checked before any is yielded, since stored parts of a document stay.
            for part in self.tokenizer.divide(text):
                self._refuse_forged(self.tokenizer.encode_all([part])[0])
        num_tokens, held = 0, []
        parts = (self.tokenizer.encode_all([part])[0] for part in self.tokenizer.divide(text))
        for ids in itertools.chain(_one(self.bos_token_id), parts, _one(self.eos_token_id)):
            num_tokens += ids.size
            held.append(ids)
            if num_tokens > 1:
                yield from held
                held = []
        _refuse_without_labels(np.array([num_tokens]))

    def _framed(self, text: str) -> NDArray[np.int64]:
        """Return the tokens of a text, from the token that begins it to the one that ends it."""
        bare = self.tokenizer.encode_all([text])[0].astype(np.int64, copy=False)
        self._refuse_forged(bare)
        return np.concatenate([*_one(self.bos_token_id), bare, *_one(self.eos_token_id)])

    def _refuse_forged(self, bare: NDArray[np.integer[Any]]) -> None:
        if self.forgeable and (found := bare[np.isin(bare, [*self.forgeable])]).size:
            raise RowError(self._forged(int(found[0])))

    def _forged(self, token_id: int) -> str:
        return f"text in it reads as the special token '{self.forgeable[token_id]}'"

    def _token_row(self, row: TokenRow) -> EncodedDocument:
        ids, labels, vocab_size = row.tokens, row.labels, self.tokenizer.info.vocab_size
        outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
        if outside.size:
            place = int(outside[0])
            raise RowError(f"token {ids[place]} at place {place} is outside the vocabulary of {vocab_size}")
        mask = np.ones(ids.size, dtype=np.bool_)
        if labels is not None:
            mask = labels != IGNORED_LABEL
            wrong = np.flatnonzero(mask & (labels != ids))
            if wrong.size:
                place = int(wrong[0])
                raise RowError(f"label {labels[place]} at place {place} is neither -100 nor the token {ids[place]}")
        ends = frozenset[int]() if row.labels is None else _span_ends(ids, mask, self.tokenizer.special_ids)
        if self.eos_token_id is not None and ids[-1] != self.eos_token_id:
            # The end token is supervised if the token before it is.
            ids, mask = np.append(ids, self.eos_token_id), np.append(mask, mask[-1])
        return _encoded(ids, *mask_spans(mask), ends)

    def _chat(self, chat: EncodedDocument) -> EncodedDocument:
        if not chat.ids.size:
            raise RowError("the chat template writes nothing")
        if self.eos_token_id is not None and chat.ids[-1] != self.eos_token_id:
            if chat.ends_open:
                # It also ends the open turn. A turn with its own end needs no other.
                stops = np.append(chat.stops[:-1], chat.ids.size + 1)
                chat = replace(chat, stops=stops, num_open=chat.num_open - 1)
            chat = replace(chat, ids=np.append(chat.ids, self.eos_token_id))
        _refuse_without_labels(chat.stops)
        return chat

    def _completion(self, row: CompletionRow) -> tuple[NDArray[np.int64], int]:
        """Return the tokens, and the number of the prompt's, which are the same as for the prompt alone."""
        num_end = self.eos_token_id is not None
        prompt, together = self._framed(row.prompt), self._framed(row.prompt + row.completion)
        prompt = prompt[: prompt.size - num_end]
        if np.array_equal(together[: prompt.size], prompt) and together.size > prompt.size + num_end:
            return together, prompt.size
        # A token would cross the border. Tokenizing both separately works unless the tokenizer prepends a space.
        completion = self._framed(row.completion)[self.bos_token_id is not None :]
        apart = np.concatenate([prompt, completion])
        if self.tokenizer.decode(apart) != self.tokenizer.decode(together):
            raise RowError(
                "the tokens of the prompt change when the completion follows; let the prompt end with a word"
            )
        return apart, prompt.size


def load_encoder(name: str | Path, options: EncodingOptions | None = None) -> DocumentEncoder:
    """Return the encoder of a tokenizer's name, as ``load_tokenizer`` and `DocumentEncoder` do."""
    return DocumentEncoder(load_tokenizer(name), options)


def weighted(
    document: EncodedDocument, weight: float | NDArray[np.float32], special_ids: frozenset[int]
) -> EncodedDocument:
    """Return a document with a loss weight, or with one per token; the end token gets the weight of the last.

    Tokens of weight 0 are not supervised; RowError if no supervised token has another.
    """
    if not isinstance(weight, np.ndarray):
        if weight == 0:
            raise RowError("its weight is 0")
        if weight == 1:
            return document
        return replace(document, weights=np.full(document.starts.size, weight, dtype=np.float32))
    size, num_own = document.ids.size, weight.size
    weights = np.append(weight, np.full(size - num_own, weight[-1]))
    weights = np.where(span_mask(document.starts, document.stops, 0, size), weights, 0)
    ends = _span_ends(document.ids[:num_own], weights[:num_own] > 0, special_ids)
    edges = np.flatnonzero(np.diff(weights, prepend=np.nan, append=np.nan))
    starts, stops = edges[:-1], edges[1:]
    learned = weights[starts] > 0
    starts, stops = starts[learned], stops[learned]
    of_spans = weights[starts]
    # A mask of other tokens makes another document, as labels do.
    masked = _encoded(document.ids, starts, stops, ends)
    return replace(masked, weights=None if (of_spans == 1).all() else of_spans)


def _span_ends(ids: NDArray[np.int64], mask: NDArray[np.bool_], special_ids: frozenset[int]) -> frozenset[int]:
    """Return the special tokens at the end of supervised spans of a row, before an end token is added."""
    return special_ids & frozenset(ids[mask_spans(mask)[1] - 1].tolist())


def text_digest(text: str) -> bytes:
    """Return the digest of a text that is a document; only a part of it at a time is held as bytes."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for start in range(0, len(text), _DIGEST_CHARACTERS):
        digest.update(text[start : start + _DIGEST_CHARACTERS].encode("utf-8"))
    return digest.digest()


def _one(token: int | None) -> list[NDArray[np.int64]]:
    return [] if token is None else [np.array([token], dtype=np.int64)]


def _encoded(
    ids: NDArray[np.int64],
    starts: NDArray[np.int64],
    stops: NDArray[np.int64],
    turn_ends: frozenset[int] = frozenset(),
) -> EncodedDocument:
    _refuse_without_labels(stops)
    return EncodedDocument(ids=ids, starts=starts, stops=stops, turn_ends=turn_ends)


def _refuse_without_labels(stops: NDArray[np.int64]) -> None:
    # Nothing predicts the first token of a document.
    if not (stops > 1).any():
        raise RowError(NOT_SUPERVISED)


def _chosen(name: str, chosen: str, own: int | None, tokenizer: Tokenizer) -> int | None:
    if chosen == TOKENIZER:
        return own
    if chosen == NONE:
        return None
    found = tokenizer.token_id(chosen)
    if found is None:
        raise UserError(
            f"--{name}={chosen!r}: is not a token of the tokenizer {tokenizer.info.name}; give one of its tokens, "
            f"{TOKENIZER} or {NONE}"
        )
    return found
