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
from ray_ulysses.data.sources.rows import ChatRow, CompletionRow, Content, PairRow, QueryRow, RowError, TokenRow
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
NOT_SUPERVISED = "none of its tokens is supervised"


class OutsideVocabularyError(RowError):
    """Error for token ids that the tokenizer does not have."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EncodedTexts:
    """Encoded texts, each supervised completely."""

    ids: NDArray[np.int64]
    """Concatenated tokens of all texts."""
    lengths: NDArray[np.int64]
    """Number of tokens per text. A text with fewer than two tokens has no supervised token."""
    digests: list[bytes]
    """A 16-byte digest per text, equal for equal texts."""
    left_out: dict[int, str]
    """Reasons for rejecting texts, by text index: a part of the text would become a special token, or the tokenizer
    can't encode the text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodingInfo:
    """Description of how a corpus's documents were encoded, stored with the corpus."""

    __pydantic_config__ = KNOWN_FIELDS_ONLY

    bos_token_id: Whole | None
    """Token that begins texts and prompts, or None."""
    eos_token_id: Whole | None
    """Token that ends documents, or None."""
    chats: str | None = None
    """Description of how turns were found and which are supervised; None if the corpus has no conversations."""
    num_chats: Whole = 0
    """Number of encoded conversations."""
    num_chat_documents: Whole = 0
    """Number of documents made from the conversations. A turn may require a separate document."""
    num_open_turns: Whole = 0
    """Number of supervised turns that do not end with a special token."""
    num_unknown: Whole = 0
    """Number of unknown tokens, including those of duplicates that were excluded later."""
    chat_template: str | None = None
    """Text of the chat template that rendered the conversations; None if the corpus has no conversations or the byte
    tokenizer encoded them."""


class DocumentEncoder:
    """Encodes documents as tokens, with a tokenizer and the options of ``prepare``.

    Attributes:
        bos_token_id: Token that begins texts and prompts, or None.
        eos_token_id: Token that ends documents, or None.
        frame: Non-special bos and eos tokens, by id, that the tokenizer produces from a text that spells them.
        forgeable: Special tokens and ``frame``, by id. Texts that are tokenized to any of these tokens are rejected.

    Raises:
        UserError: The tokenizer lacks a token chosen in the options.
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
        """The tokenizer's chat format. Raises UserError if the tokenizer has no chat format."""
        return self.tokenizer.chat(self.options, self.frame)

    @property
    def fingerprint(self) -> str:
        """Hash of the tokens that begin and end documents."""
        return stable_hash([self.bos_token_id, self.eos_token_id])

    def encode(self, content: Content) -> list[EncodedDocument]:
        """Encode a document as tokens and label spans. A conversation may become several documents.

        Raises:
            RowError: The document can't be tokenized, contains token ids outside the vocabulary, or has no supervised
                token.
        """
        if isinstance(content, str):
            ids = self._framed(content)
            return [_encoded(ids, np.zeros(1, dtype=np.int64), np.array([ids.size], dtype=np.int64))]
        if isinstance(content, TokenRow):
            return self._window(content) if content.is_window else [self._token_row(content)]
        if isinstance(content, ChatRow):
            chats = self.chat.encode(content.messages, content.tools)
            if not chats:
                raise RowError(NOT_SUPERVISED)
            return [self._chat(chat) for chat in chats]
        if isinstance(content, PairRow):
            return [_joined(self._answer(content.chosen, "chosen"), self._answer(content.rejected, "rejected"))]
        if isinstance(content, QueryRow):
            [query], [positive] = self.encode(content.query), self.encode(content.positive)
            return [_joined(query, positive)]
        ids, num_prompt = self._completion(content)
        return [_encoded(ids, np.array([num_prompt], dtype=np.int64), np.array([ids.size], dtype=np.int64))]

    def _answer(self, content: ChatRow | CompletionRow, name: str) -> EncodedDocument:
        """Return a prompt with an answer, which is the only supervised span and ends the document."""
        if isinstance(content, ChatRow):
            try:
                _ = self.chat
            except UserError as error:
                raise RowError("the answers are messages, but the tokenizer has no chat template") from error
        found = self.encode(content)
        if len(found) != 1 or found[0].starts.size != 1:
            raise RowError(f"the {name} answer has several supervised turns")
        return replace(found[0], ids=found[0].ids[: found[0].stops[0]])

    def encode_texts(self, texts: Sequence[str]) -> EncodedTexts:
        """Encode texts as documents that are supervised completely."""
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
        """Encode a long, completely supervised text, and yield the tokens in parts if the tokenizer allows it.

        Raises:
            RowError: The text has fewer than two tokens, or a part of it would become a special token.
        """
        if self.forgeable:
            # Check all parts before yielding the first, because a part that was already stored is not removed.
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
        bare = self.tokenizer.encode_all([text])[0].astype(np.int64, copy=False)
        self._refuse_forged(bare)
        return np.concatenate([*_one(self.bos_token_id), bare, *_one(self.eos_token_id)])

    def _refuse_forged(self, bare: NDArray[np.integer[Any]]) -> None:
        if self.forgeable and (found := bare[np.isin(bare, [*self.forgeable])]).size:
            raise RowError(self._forged(int(found[0])))

    def _forged(self, token_id: int) -> str:
        return f"a part of its text is tokenized as the special token '{self.forgeable[token_id]}'"

    def _refuse_outside(self, ids: NDArray[np.int64]) -> None:
        vocab_size = self.tokenizer.info.vocab_size
        outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
        if outside.size:
            place = int(outside[0])
            raise OutsideVocabularyError(
                f"token {ids[place]} at index {place} is outside the vocabulary of {vocab_size} tokens"
            )

    def _window(self, row: TokenRow) -> list[EncodedDocument]:
        """Divide a window after each end token. The last document gets no end token, since it may continue."""
        self._refuse_outside(row.tokens)
        ends = row.tokens == self.eos_token_id if self.eos_token_id is not None else np.zeros(row.tokens.size, np.bool_)
        parts = [part for part in np.split(row.tokens, np.flatnonzero(ends) + 1) if part.size > 1]
        if not parts:
            raise RowError(NOT_SUPERVISED)
        start = np.zeros(1, dtype=np.int64)
        return [EncodedDocument(ids=part, starts=start, stops=start + part.size) for part in parts]

    def _token_row(self, row: TokenRow) -> EncodedDocument:
        ids, labels = row.tokens, row.labels
        self._refuse_outside(ids)
        mask = np.ones(ids.size, dtype=np.bool_)
        if labels is not None:
            mask = labels != IGNORED_LABEL
            wrong = np.flatnonzero(mask & (labels != ids))
            if wrong.size:
                place = int(wrong[0])
                raise RowError(f"label {labels[place]} at index {place} is neither -100 nor the token {ids[place]}")
        ends = frozenset[int]() if row.labels is None else _span_ends(ids, mask, self.tokenizer.special_ids)
        if self.eos_token_id is not None and ids[-1] != self.eos_token_id:
            # The appended end token is supervised if the last token is.
            ids, mask = np.append(ids, self.eos_token_id), np.append(mask, mask[-1])
        return _encoded(ids, *mask_spans(mask), ends)

    def _chat(self, chat: EncodedDocument) -> EncodedDocument:
        if not chat.ids.size:
            raise RowError("the chat template renders an empty string")
        if self.eos_token_id is not None and chat.ids[-1] != self.eos_token_id:
            if chat.ends_open:
                # The appended end token also ends the open turn. A turn that has its own end token does not need
                # another.
                stops = np.append(chat.stops[:-1], chat.ids.size + 1)
                chat = replace(chat, stops=stops, num_open=chat.num_open - 1)
            chat = replace(chat, ids=np.append(chat.ids, self.eos_token_id))
        _refuse_without_labels(chat.stops)
        return chat

    def _completion(self, row: CompletionRow) -> tuple[NDArray[np.int64], int]:
        """Return the row's tokens and the number of prompt tokens. The prompt is tokenized separately."""
        num_end = self.eos_token_id is not None
        prompt, together = self._framed(row.prompt), self._framed(row.prompt + row.completion)
        prompt = prompt[: prompt.size - num_end]
        if np.array_equal(together[: prompt.size], prompt) and together.size > prompt.size + num_end:
            return together, prompt.size
        # A token would cross the border. Separate tokenization gives the same text unless the tokenizer prepends a
        # space.
        completion = self._framed(row.completion)[self.bos_token_id is not None :]
        apart = np.concatenate([prompt, completion])
        if self.tokenizer.decode(apart) != self.tokenizer.decode(together):
            raise RowError("the completion changes the prompt's tokens; end the prompt with a complete word")
        return apart, prompt.size


def _joined(chosen: EncodedDocument, rejected: EncodedDocument) -> EncodedDocument:
    """Return a pair as one document, whose first span ends where the second text begins."""
    # The first token of a text is never predicted, and would be the label of the other text's last token.
    others = chosen.ids.size + np.maximum(rejected.starts, 1)
    starts, stops = np.append(chosen.starts, others), [chosen.ids.size, rejected.ids.size]
    return EncodedDocument(
        ids=np.concatenate([chosen.ids, rejected.ids]),
        starts=starts,
        stops=np.cumsum(stops, dtype=np.int64),
        turn_ends=chosen.turn_ends | rejected.turn_ends,
        num_open=chosen.num_open + rejected.num_open,
    )


def load_encoder(name: str | Path, options: EncodingOptions | None = None) -> DocumentEncoder:
    """Return an encoder for a tokenizer given by name; see ``load_tokenizer`` and `DocumentEncoder`."""
    return DocumentEncoder(load_tokenizer(name), options)


def weighted(
    document: EncodedDocument, weight: float | NDArray[np.float32], special_ids: frozenset[int]
) -> EncodedDocument:
    """Apply one loss weight, or one per token, to a document. An appended end token gets the last token's weight.

    Tokens of weight 0 are not supervised. Raises RowError if no supervised token has a nonzero weight.
    """
    if not isinstance(weight, np.ndarray):
        if weight == 0:
            raise RowError("the loss weight is 0")
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
    # A different mask makes a different document, as different labels do.
    masked = _encoded(document.ids, starts, stops, ends)
    return replace(masked, weights=None if (of_spans == 1).all() else of_spans)


def _span_ends(ids: NDArray[np.int64], mask: NDArray[np.bool_], special_ids: frozenset[int]) -> frozenset[int]:
    """Return the special tokens that end a row's supervised spans, excluding an appended end token."""
    return special_ids & frozenset(ids[mask_spans(mask)[1] - 1].tolist())


def text_digest(text: str) -> bytes:
    """Return the digest of a text document. Only a part of the text is encoded to bytes at a time."""
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
    # The first token of a document is never predicted.
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
            f"--{name}={chosen!r}: is not a token of the tokenizer {tokenizer.info.name}; use one of its tokens, "
            f"{TOKENIZER} or {NONE}"
        )
    return found
