"""Tokenizers: of bytes and of biological sequences, which need no files, and Hugging Face tokenizers stored on disk.

Two tokenizers are compatible if their token ids represent the same texts and their merges are equal.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from ray_ulysses.data.sources.rows import RowError
from ray_ulysses.data.tokenize.chat import ByteChat, ChatFormat, TemplateChat
from ray_ulysses.data.tokenize.chat_template import ChatTemplate, json_object, named_tokens
from ray_ulysses.data.tokenize.dividing import PART_CHARACTERS, divide, dividing_pattern, unwritable_text_refused
from ray_ulysses.data.tokenize.options import EncodingOptions
from ray_ulysses.data.tokenize.sequences import SequenceVocabulary
from ray_ulysses.errors import UserError
from ray_ulysses.storage.hub import hub_folder
from ray_ulysses.storage.retry import transient_cause
from ray_ulysses.validation import KNOWN_FIELDS_ONLY, Positive, Whole

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer

BYTES = "bytes"
_EOS_BYTE_ID = 256
BYTES_END = "<|end|>"
"""Text of the byte tokenizer's end token in files that need one, such as `tokenizer.json`."""
_PROBE = "a"
_NONE: Mapping[int, str] = MappingProxyType({})
_SPELLED = ("{token}", " {token}", "a{token}a", "a {token} a")
_MASKS = ("[MASK]", "<mask>")
_MOST_NAMED = 3
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
)
_FETCHED = ("tokenizer_config.json", "config.json", "chat_template*", *TOKENIZER_FILES)
"""Files to download for a Hub id. AutoTokenizer reads the model type from ``config.json``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerInfo:
    """Description of a tokenizer, stored with a corpus."""

    __pydantic_config__ = KNOWN_FIELDS_ONLY

    kind: Literal["bytes", "huggingface"]
    name: str
    """``bytes``, or the directory or Hub id from which the tokenizer was loaded."""
    vocab_size: Positive
    """Largest token id plus one."""
    eos_token_id: Whole
    """End-of-sequence token, which ends every document unless ``prepare`` is given another token."""
    fingerprint: str
    """Hash of the tokenizer's files. Equal hashes mean equal tokenizers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """Meaning of a corpus's token ids, stored with the corpus.

    The vocabulary is independent of how the tokenizer is stored: library version, order of entries, padding and
    truncation settings, and chat template.
    """

    __pydantic_config__ = KNOWN_FIELDS_ONLY

    size: Positive
    """Largest id plus one."""
    added: tuple[tuple[Whole, str], ...]
    """Added tokens, special or not, by ascending id."""
    others: str
    """Hash of the ids and texts of all other tokens."""
    merges: str
    """Hash of the ordered list of BPE merges, which may be empty."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Tokens:
    """All tokens of a tokenizer, for comparison with a corpus's vocabulary."""

    ids: Mapping[str, int]
    """Token ids by token text, including added tokens."""
    added: Mapping[int, str]
    """Added tokens by id."""
    merges: Sequence[Sequence[str]]
    """BPE merges as in `tokenizer.json`: pairs."""

    def vocabulary(self) -> Vocabulary:
        """Return the description to store with a corpus."""
        return Vocabulary(
            size=max(self.ids.values()) + 1,
            added=tuple(sorted(self.added.items())),
            others=self._hash_without(self.added.keys()),
            merges=_hash(map(" ".join, self.merges)),
        )

    def difference_from(self, corpus: Vocabulary) -> str | None:
        """Describe how a corpus's token ids differ in meaning from these tokens, or return None if they agree.

        An added token that exists on only one side is not a difference, because the other side does not use the id.
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
            last, own_last = corpus.size - 1, max(self.ids.values())
            return f"ids up to {last} in the corpus and up to {own_last} in the model have different texts"
        if _hash(map(" ".join, self.merges)) != corpus.merges:
            return "their merges differ, so the same text gets different tokens"
        return None

    def _hash_without(self, left_out: Iterable[int]) -> str:
        skipped = frozenset(left_out)
        entries = sorted((token_id, text) for text, token_id in self.ids.items() if token_id not in skipped)
        return _hash(f"{token_id} {text}" for token_id, text in entries)


def _hash(texts: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(texts).encode("utf-8", "surrogatepass")).hexdigest()[:32]


class ByteTokenizer:
    """A tokenizer with one token per UTF-8 byte (ids 0 to 255), and token 256 as the end of a document."""

    info = TokenizerInfo(
        kind="bytes", name=BYTES, vocab_size=_EOS_BYTE_ID + 1, eos_token_id=_EOS_BYTE_ID, fingerprint="bytes-eos256-v1"
    )
    special_ids = frozenset([_EOS_BYTE_ID])
    """Tokens with a meaning beyond their text, such as the end of a turn."""
    forgeable = _NONE
    """Special tokens, by id, that the tokenizer produces from a text that spells them."""
    added_tokens = _NONE
    """Tokens, by id, that were added to the model's vocabulary, special or not."""
    bos_token_id = None
    """Token that the tokenizer prepends to a text by default, or None."""
    mask_token_id = None
    """Token that replaces masked tokens, or None."""
    unknown_token_id = None
    """Token of a part of a text for which the vocabulary has no other token, or None."""

    @property
    def tokens(self) -> Tokens:
        """All tokens: the bytes in the notation of byte-level tokenizers, and the end token."""
        # The printable characters are those of GPT-2's encoder.py.
        printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
        others = [byte for byte in range(256) if byte not in printable]
        ids = {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}
        ids[BYTES_END] = _EOS_BYTE_ID
        return Tokens(ids=ids, added={}, merges=())

    def token_id(self, token: str) -> int | None:
        """Return the id of the token with the given text, or None. The byte tokenizer's end token has no text."""
        return None

    def encode_all(self, texts: Sequence[str]) -> tuple[NDArray[np.integer[Any]], NDArray[np.int64]]:
        """Tokenize texts without adding end tokens; return the concatenated token ids and each text's number of tokens.

        Raises:
            RowError: The tokenizer has no token for a part of a text.
            UnicodeEncodeError: A text contains a lone surrogate.
        """
        raw = [text.encode("utf-8") for text in texts]
        return np.frombuffer(b"".join(raw), dtype=np.uint8), np.fromiter(map(len, raw), dtype=np.int64)

    def divide(self, text: str) -> Iterator[str]:
        """Yield parts of a long text whose concatenated tokens equal the text's tokens. Bytes may be cut anywhere."""
        return (text[start : start + PART_CHARACTERS] for start in range(0, len(text), PART_CHARACTERS))

    def decode(self, ids: NDArray[np.integer[Any]]) -> str:
        """Decode tokens to text without end tokens. A truncated character becomes U+FFFD."""
        kept = ids[ids < _EOS_BYTE_ID].astype(np.uint8)
        return kept.tobytes().decode("utf-8", errors="replace")

    def chat(self, options: EncodingOptions | None = None, frame: Mapping[int, str] = _NONE) -> ChatFormat:
        """Return the chat format; raise UserError if there is none, or if the options do not apply to the format.

        Args:
            options: Settings for finding and supervising turns.
            frame: Non-special tokens, by id, that begin or end documents. Texts must not be tokenized to these tokens.
        """
        return ByteChat(_EOS_BYTE_ID, options)


class _FastTokenizer:
    """A Hugging Face tokenizer, loaded with the ``tokenizers`` library."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory = directory
        self._tokenizer = _loaded(directory)
        # A text that spells a special token stays plain text, so a document can't end itself or forge a chat turn.
        # Models whose vocabulary or merges produce the token ignore this setting.
        self._tokenizer.encode_special_tokens = True
        added, named = self._tokenizer.get_added_tokens_decoder(), named_tokens(directory)
        self.added_tokens: Mapping[int, str] = {key: token.content for key, token in added.items()}
        special = (key for key, token in added.items() if token.special or token.content in named.values())
        self._special = {key: self.added_tokens[key] for key in special}
        self.special_ids = frozenset(self._special)
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.bos_token_id, end = self._own_ends()
        self.info = TokenizerInfo(
            kind="huggingface",
            name=name,
            vocab_size=max(vocabulary.values()) + 1,
            eos_token_id=_eos_id(directory, vocabulary, end),
            fingerprint=files_fingerprint(directory),
        )
        masks = (named.get("mask_token", ""), *_MASKS)
        self.mask_token_id = next((vocabulary[token] for token in masks if token in vocabulary), None)
        self.unknown_token_id = self._unknown_id()
        made = spelled(self._special, self._ids)
        # Unknown tokens, and padding that is not also the eos or bos token, have no meaning.
        padding = {named.get("pad_token")} - {named.get("eos_token"), named.get("bos_token")}
        ignored = {self._unknown_id(), *(self.token_id(token) for token in padding if token)} if made else set()
        self.forgeable = MappingProxyType({one: text for one, text in made.items() if one not in ignored})

    def _ids(self, text: str, *, is_bare: bool = True) -> list[int]:
        with unwritable_text_refused(text):
            return list(self._tokenizer.encode(text, add_special_tokens=not is_bare).ids)

    def _unknown_id(self) -> int | None:
        if hasattr(self._tokenizer.model, "unk_token"):
            unknown = self._tokenizer.model.unk_token
            return self.token_id(unknown) if unknown else None
        # A Unigram model, whose pieces are numbered by their place in the vocabulary.
        number: int | None = self._fields["model"]["unk_id"]
        return number

    @property
    def _fields(self) -> Any:
        # Read the library's own form: a file may have lists where objects are expected, and may be deleted during a
        # long preparation. The fields are large and therefore not cached.
        return json.loads(self._tokenizer.to_str())

    @property
    def tokens(self) -> Tokens:
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        return Tokens(ids=ids, added=self.added_tokens, merges=self._fields["model"].get("merges", ()))

    def encode_all(self, texts: Sequence[str]) -> tuple[NDArray[np.integer[Any]], NDArray[np.int64]]:
        with unwritable_text_refused(*texts):
            found = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        ids = [encoding.ids for encoding in found]
        lengths = np.fromiter(map(len, ids), dtype=np.int64, count=len(ids))
        joined = np.fromiter(itertools.chain.from_iterable(ids), dtype=np.int64, count=int(lengths.sum()))
        return joined, lengths

    def divide(self, text: str) -> Iterator[str]:
        return divide(text, self._divides_after)

    @functools.cached_property
    def _divides_after(self) -> re.Pattern[str] | None:
        return dividing_pattern(self._fields)

    def decode(self, ids: NDArray[np.integer[Any]]) -> str:
        return str(self._tokenizer.decode(ids.tolist(), skip_special_tokens=False))

    def token_id(self, token: str) -> int | None:
        found = self._tokenizer.token_to_id(token)
        return None if found is None else int(found)

    def chat(self, options: EncodingOptions | None = None, frame: Mapping[int, str] = _NONE) -> ChatFormat:
        options = options or EncodingOptions()
        template = ChatTemplate(self._directory, options.chat_template)
        # A separate tokenizer instance: special tokens are allowed in a template but not in a text.
        tokenizer, unknown = _loaded(self._directory), self._unknown_id()
        return TemplateChat(template, tokenizer, self._special, self.info.eos_token_id, options, frame, unknown)

    def _own_ends(self) -> tuple[int | None, int | None]:
        """Return the tokens that the tokenizer itself adds before and after a text, such as BERT's [CLS] and [SEP]."""
        try:
            bare, whole = self._ids(_PROBE), self._ids(_PROBE, is_bare=False)
        except RowError as error:
            raise UserError(
                f"tokenizer={self._directory}: can't encode {_PROBE!r} ({error}); add an unknown token to "
                "its vocabulary, or use another tokenizer"
            ) from error
        is_framed = len(whole) > len(bare)
        begin = whole[0] if is_framed and whole[: len(bare)] != bare else None
        end = whole[-1] if is_framed and whole[-len(bare) :] != bare else None
        if json_object(self._directory / "tokenizer_config.json").get("add_bos_token") is True:
            # Transformers 5, unlike version 4, ignores add_bos_token for byte-level tokenizers such as DeepSeek-V3's.
            begin = self.token_id(named_tokens(self._directory).get("bos_token", ""))
        return begin, end


class _SequenceTokenizer(_FastTokenizer):
    """A tokenizer of biological sequences, which encodes a hundred times faster than the ``tokenizers`` library."""

    def __init__(self, vocabulary: SequenceVocabulary, name: str) -> None:
        super().__init__(vocabulary.folder(name), name)
        self._vocabulary = vocabulary

    def encode_all(self, texts: Sequence[str]) -> tuple[NDArray[np.integer[Any]], NDArray[np.int64]]:
        parts = [self._vocabulary.encode(text) for text in texts]
        lengths = np.fromiter((part.size for part in parts), dtype=np.int64, count=len(parts))
        return np.concatenate([np.empty(0, dtype=np.int64), *parts]), lengths

    def divide(self, text: str) -> Iterator[str]:
        start = 0
        while len(text) - start > PART_CHARACTERS:
            part = text[start : start + PART_CHARACTERS]
            yield part[: self._vocabulary.cut(part)]
            start += self._vocabulary.cut(part)
        yield text[start:]


def spelled(tokens: Mapping[int, str], encode: Callable[[str], Iterable[int]]) -> dict[int, str]:
    """Return the tokens that a tokenizer produces from a text that spells them, alone or next to other text."""
    forms = (form.format(token=token) for token in tokens.values() for form in _SPELLED)
    made: set[int] = set()
    for text in forms:
        # Skip a text that can't be encoded.
        with suppress(RowError):
            made.update(map(int, encode(text)))
    return {token_id: tokens[token_id] for token_id in sorted(made & tokens.keys())}


def _loaded(directory: Path) -> RustTokenizer:
    """Load a directory's tokenizer, using Transformers if the directory has no ``tokenizer.json``."""
    from tokenizers import Tokenizer as RustTokenizer
    from tokenizers.models import BPE

    if not (directory / "tokenizer.json").is_file():
        loaded = transformers_tokenizer(directory)
        backend = getattr(loaded, "backend_tokenizer", None)
        if backend is None:
            raise UserError(
                f"tokenizer={directory}: Transformers has only the pure Python class {type(loaded).__name__}; "
                "use a directory with a tokenizer.json"
            )
        tokenizer = RustTokenizer.from_str(backend.to_str())
    else:
        data = (directory / "tokenizer.json").read_bytes()
        try:
            tokenizer = RustTokenizer.from_buffer(data)
        except Exception as error:
            # The library raises a bare Exception if the file is not a tokenizer.
            raise UserError(
                f"tokenizer={directory}: tokenizer.json can't be read ({error}); "
                "use a directory that AutoTokenizer.from_pretrained can load"
            ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if isinstance(tokenizer.model, BPE):
        # BPE dropout would tokenize the same text differently each time.
        tokenizer.model.dropout = None
    return tokenizer


def transformers_tokenizer(directory: Path) -> Any:
    """Load a directory's tokenizer with Transformers, without network access and without running its code.

    Raises:
        UserError: The directory has no tokenizer, or one that requires custom code.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        if (away := transient_cause(error)) is not None:
            raise away from error
        if "trust_remote_code" in str(error):
            raise UserError(
                f"tokenizer={directory}: requires custom Python code, which ray-ulysses never runs; use a directory "
                "with a tokenizer.json, the format in which most tokenizers can be saved"
            ) from error
        raise UserError(
            f"tokenizer={directory}: can't be loaded ({error}); "
            "use a directory that AutoTokenizer.from_pretrained can load"
        ) from error


Tokenizer = ByteTokenizer | _FastTokenizer
"""A tokenizer. `ByteTokenizer` documents the interface."""


def load_tokenizer(name: str | Path) -> Tokenizer:
    """Load a tokenizer: ``bytes``, ``chars:LETTERS``, ``kmer:K``, a Hugging Face tokenizer's directory, or a Hub id.

    Raises:
        UserError: Neither the directory nor the Hub id exists, the directory has no tokenizer, or the tokenizer has no
            end-of-sequence token.
    """
    if str(name) == BYTES:
        return ByteTokenizer()
    if (sequences := SequenceVocabulary.named(str(name))) is not None:
        return _SequenceTokenizer(sequences, str(name))
    directory = tokenizer_folder(name)
    if not any((directory / file).is_file() for file in TOKENIZER_FILES):
        raise UserError(
            f"tokenizer={name}: has no tokenizer file (looked for {', '.join(TOKENIZER_FILES)}); "
            "use 'bytes', or the directory of a Hugging Face tokenizer"
        )
    return _FastTokenizer(directory, str(name))


def load_unchanged(info: TokenizerInfo) -> Tokenizer:
    """Load the tokenizer that prepared a corpus.

    Raises:
        UserError: The tokenizer can't be loaded, or has changed.
    """
    tokenizer = load_tokenizer(info.name)
    if tokenizer.info.fingerprint != info.fingerprint:
        raise UserError(
            f"the files in {info.name} have changed since the corpus was prepared; restore them, or prepare it again"
        )
    return tokenizer


def tokenizer_folder(name: str | Path) -> Path:
    """Return a Hugging Face tokenizer's directory: ``name`` itself, or a cached copy of a Hub id or sequence tokenizer.

    Raises:
        UserError: Neither the directory nor the Hub id exists.
    """
    if (sequences := SequenceVocabulary.named(str(name))) is not None:
        return sequences.folder(str(name))
    hint = "use 'bytes', or the local directory or the hub id of a Hugging Face tokenizer"
    return hub_folder(name, f"tokenizer={name}", _FETCHED, hint)


def files_fingerprint(directory: Path) -> str:
    """Return a hash of a tokenizer directory's files."""
    digest = hashlib.sha256()
    for file in TOKENIZER_FILES:
        if (directory / file).is_file():
            digest.update(file.encode() + b"\0" + (directory / file).read_bytes())
    return digest.hexdigest()[:32]


def _eos_id(directory: Path, vocabulary: dict[str, int], own: int | None) -> int:
    """Return the named eos_token or, as encoders have none, the token that the tokenizer adds after a text."""
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        token = json_object(directory / file).get("eos_token")
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str) and content in vocabulary:
            return vocabulary[content]
    if own is not None:
        return own
    raise UserError(
        f"tokenizer={directory}: the vocabulary has no eos_token, but documents must end with this token; "
        'set "eos_token" in tokenizer_config.json'
    )
