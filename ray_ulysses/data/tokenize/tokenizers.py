"""Turns text into token ids: a byte tokenizer that needs no files, and Hugging Face tokenizers on disk."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from ray_ulysses.data.sources.quarantine import RowError
from ray_ulysses.data.tokenize.chat import ByteChat, ChatFormat, TemplateChat
from ray_ulysses.data.tokenize.chat_template import ChatTemplate, json_object, named_tokens, special_tokens
from ray_ulysses.data.tokenize.dividing import PART_CHARACTERS, divide, dividing_pattern, unwritable_text_refused
from ray_ulysses.data.tokenize.options import EncodingOptions
from ray_ulysses.data.tokenize.vocabulary import Tokens
from ray_ulysses.errors import UserError
from ray_ulysses.storage.hub import hub_folder
from ray_ulysses.storage.patience import transient_cause
from ray_ulysses.validation import KNOWN_FIELDS_ONLY, Positive, Whole, parse_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer

BYTES = "bytes"
_EOS_BYTE_ID = 256
BYTES_END = "<|end|>"
"""The end token of bytes where it needs a text, as in a `tokenizer.json`."""
_PROBE = "a"
_NONE: Mapping[int, str] = MappingProxyType({})
_SPELLED = ("{token}", " {token}", "a{token}a", "a {token} a")
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
"""Files of a hub id: AutoTokenizer reads the model's type in ``config.json``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerInfo:
    """The description of a tokenizer that a corpus stores.

    Attributes:
        kind: ``bytes`` or ``huggingface``.
        name: ``bytes``, or the directory or hub id the tokenizer was read from.
        vocab_size: One more than its largest token id.
        eos_token_id: Its end token, which ends every document unless ``prepare`` was told otherwise.
        fingerprint: Hash of the tokenizer's files, by which two tokenizers are compared.
    """

    __pydantic_config__ = KNOWN_FIELDS_ONLY

    kind: Literal["bytes", "huggingface"]
    name: str
    vocab_size: Positive
    eos_token_id: Whole
    fingerprint: str


@contextmanager
def _refused(directory: Path) -> Iterator[None]:
    """Refuse a tokenizer that has no token for the probe."""
    try:
        yield
    except RowError as error:
        raise UserError(
            f"tokenizer={directory}: can't write {_PROBE!r} ({error}); give it an unknown token that is in its "
            "vocabulary, or use another tokenizer"
        ) from error


class ByteTokenizer:
    """One token per UTF-8 byte (ids 0 to 255), and 256 for the end of a document.

    Attributes:
        info: The description of the tokenizer.
        special_ids: The tokens with a meaning beyond their text, such as the end of a turn.
        forgeable: The special tokens, by id, that the tokenizer itself makes of a text that spells them.
        added_tokens: The tokens, by id, that were added to the vocabulary of its model, special or not.
        bos_token_id: The token that the tokenizer itself puts before a text; None if it puts none.
        tokens: All tokens, to compare them with those of another tokenizer.
    """

    info = TokenizerInfo(
        kind="bytes", name=BYTES, vocab_size=_EOS_BYTE_ID + 1, eos_token_id=_EOS_BYTE_ID, fingerprint="bytes-eos256-v1"
    )
    special_ids = frozenset([_EOS_BYTE_ID])
    forgeable = _NONE
    added_tokens = _NONE
    bos_token_id = None

    @property
    def tokens(self) -> Tokens:
        """Return the bytes as byte-level tokenizers write them, and the end token."""
        ids = {character: byte for byte, character in _byte_characters().items()} | {BYTES_END: _EOS_BYTE_ID}
        return Tokens(ids=ids, added={}, merges=())

    def token_id(self, token: str) -> int | None:
        """Return the id of a token of the vocabulary; None if it has no such token: here the end token has no text."""
        return None

    def encode_all(self, texts: Sequence[str]) -> tuple[NDArray[np.integer[Any]], NDArray[np.int64]]:
        """Return the token ids of texts, one text after the other, and the number of each; no end tokens.

        Raises:
            RowError: A text holds a part for which the tokenizer has no token.
            UnicodeEncodeError: A text has a lone surrogate.
        """
        raw = [text.encode("utf-8") for text in texts]
        return np.frombuffer(b"".join(raw), dtype=np.uint8), np.fromiter(map(len, raw), dtype=np.int64)

    def divide(self, text: str) -> Iterator[str]:
        """Yield the parts of a long text whose tokens are those of the text: bytes may be cut anywhere."""
        return (text[start : start + PART_CHARACTERS] for start in range(0, len(text), PART_CHARACTERS))

    def decode(self, ids: NDArray[np.integer[Any]]) -> str:
        """Return the text without end tokens; a truncated character becomes U+FFFD."""
        kept = ids[ids < _EOS_BYTE_ID].astype(np.uint8)
        return kept.tobytes().decode("utf-8", errors="replace")

    def chat(self, options: EncodingOptions | None = None, frame: Mapping[int, str] = _NONE) -> ChatFormat:
        """Return the format of conversations; UserError if the tokenizer has none, or the options ask for another.

        Args:
            options: How turns are found, and which are learned.
            frame: Tokens, by id, that begin and end documents though they are not special: no text may become one.
        """
        return ByteChat(_EOS_BYTE_ID, options)


class _FastTokenizer:
    """A ``tokenizer.json`` through the ``tokenizers`` library."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory = directory
        self._tokenizer = _load_rust(directory)
        # Text that spells a special token stays text: a document can't end itself or forge a chat turn. A model whose
        # vocabulary or merges make the token of it ignores this.
        self._tokenizer.encode_special_tokens = True
        self.added_tokens: Mapping[int, str] = {
            key: token.content for key, token in self._tokenizer.get_added_tokens_decoder().items()
        }
        self._special = special_tokens(directory, self._tokenizer)
        self.special_ids = frozenset(self._special)
        self.bos_token_id = self._own_bos()
        self.forgeable = _forgeable(self._special, lambda text: self._bare_ids(text), self._meaningless_ids)
        self.info = _describe(directory, name, self._tokenizer.get_vocab(with_added_tokens=True))

    def _bare_ids(self, text: str) -> list[int]:
        with unwritable_text_refused(text):
            return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _meaningless_ids(self) -> set[int | None]:
        """Return the tokens of unknown text and of padding, which end nothing, unless they are the end token too."""
        named = named_tokens(self._directory)
        padding = {named.get("pad_token")} - {named.get("eos_token"), named.get("bos_token")}
        return {self._unknown_id(), *(self.token_id(token) for token in padding if token)}

    def _unknown_id(self) -> int | None:
        model = json.loads(self._tokenizer.to_str())["model"]
        unknown = model.get("unk_token")
        if unknown is None and isinstance(model.get("unk_id"), int):
            unknown = model["vocab"][model["unk_id"]][0]
        return self.token_id(unknown) if unknown else None

    @property
    def tokens(self) -> Tokens:
        # Not of the file, which may be gone by the end of a long preparation.
        model = json.loads(self._tokenizer.to_str())["model"]
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        return Tokens(ids=ids, added=self.added_tokens, merges=model.get("merges", ()))

    def encode_all(self, texts: Sequence[str]) -> tuple[NDArray[np.integer[Any]], NDArray[np.int64]]:
        with unwritable_text_refused(*texts):
            found = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return _joined([encoding.ids for encoding in found])

    def divide(self, text: str) -> Iterator[str]:
        return divide(text, self._divides_after)

    @functools.cached_property
    def _divides_after(self) -> re.Pattern[str] | None:
        # In the library's own form: a file may have lists in place of objects.
        return dividing_pattern(json.loads(self._tokenizer.to_str()))

    def decode(self, ids: NDArray[np.integer[Any]]) -> str:
        return str(self._tokenizer.decode(ids.tolist(), skip_special_tokens=False))

    def token_id(self, token: str) -> int | None:
        found = self._tokenizer.token_to_id(token)
        return None if found is None else int(found)

    def chat(self, options: EncodingOptions | None = None, frame: Mapping[int, str] = _NONE) -> ChatFormat:
        options = options or EncodingOptions()
        template = ChatTemplate(self._directory, options.chat_template)
        # A separate tokenizer: in a template special tokens are meant, in a text they are not.
        tokenizer = _load_rust(self._directory)
        unknown = self._unknown_id()
        return TemplateChat(template, tokenizer, self._special, self.info.eos_token_id, options, frame, unknown)

    def _own_bos(self) -> int | None:
        if json_object(self._directory / "tokenizer_config.json").get("add_bos_token") is True:
            # Transformers 5 leaves it out for byte-level tokenizers such as DeepSeek-V3's, which version 4 did not.
            return self.token_id(named_tokens(self._directory).get("bos_token", ""))
        with _refused(self._directory):
            bare = self._bare_ids(_PROBE)
            with unwritable_text_refused():
                whole = self._tokenizer.encode(_PROBE, add_special_tokens=True).ids
        return _first_added(whole, bare)


class _SlowTokenizer:
    """A tokenizer without ``tokenizer.json``, through Transformers."""

    def __init__(self, directory: Path, name: str) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError, KeyError, ImportError) as error:
            if (away := transient_cause(error)) is not None:
                raise away from error
            if "trust_remote_code" in str(error):
                raise UserError(
                    f"tokenizer={directory}: needs its own Python code, which ray-ulysses never runs; give a directory "
                    "with a tokenizer.json, which most tokenizers can be saved as"
                ) from error
            raise UserError(
                f"tokenizer={directory}: can't be loaded ({error}); "
                "give a directory that AutoTokenizer.from_pretrained can load"
            ) from error
        self.info = _describe(directory, name, self._tokenizer.get_vocab())
        self.special_ids: frozenset[int] = frozenset(self._tokenizer.all_special_ids)
        with _refused(directory):
            bare = self._ids(_PROBE, is_bare=True)
        self.bos_token_id = _first_added(self._ids(_PROBE, is_bare=False), bare)
        self.added_tokens: Mapping[int, str] = {
            key: token.content for key, token in self._tokenizer.added_tokens_decoder.items()
        }
        special = dict(zip(self._tokenizer.all_special_ids, self._tokenizer.all_special_tokens, strict=True))
        self.forgeable = _forgeable(special, lambda text: self._ids(text, is_bare=True), self._meaningless_ids)

    @property
    def tokens(self) -> Tokens:
        fast = getattr(self._tokenizer, "backend_tokenizer", None)
        merges = None if fast is None else json.loads(fast.to_str())["model"].get("merges", ())
        return Tokens(ids=self._tokenizer.get_vocab(), added=self.added_tokens, merges=merges)

    def encode_all(self, texts: Sequence[str]) -> tuple[NDArray[np.integer[Any]], NDArray[np.int64]]:
        return _joined([self._ids(text, is_bare=True) for text in texts])

    def divide(self, text: str) -> Iterator[str]:
        yield text

    def token_id(self, token: str) -> int | None:
        return self._tokenizer.get_vocab().get(token)

    def _ids(self, text: str, *, is_bare: bool) -> list[int]:
        with unwritable_text_refused(text):
            found = self._tokenizer(text, add_special_tokens=not is_bare, split_special_tokens=True, verbose=False)
        return list(found["input_ids"])

    def _meaningless_ids(self) -> set[int | None]:
        tokenizer = self._tokenizer
        padding = {tokenizer.pad_token_id} - {tokenizer.eos_token_id, tokenizer.bos_token_id}
        return {tokenizer.unk_token_id, *padding}

    def decode(self, ids: NDArray[np.integer[Any]]) -> str:
        return str(self._tokenizer.decode(ids.tolist()))

    def chat(self, options: EncodingOptions | None = None, frame: Mapping[int, str] = _NONE) -> ChatFormat:
        # Only tokenizer.json gives the place of each token in the text.
        raise UserError(
            f"--messages-field: the tokenizer {self.info.name} has no tokenizer.json, which chats need; "
            "save it with AutoTokenizer.from_pretrained(...).save_pretrained(...), or use another"
        )


def _byte_characters() -> dict[int, str]:
    """Return the printable character of each byte in byte-level tokenizers, as in GPT-2's encoder.py."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + place) for place, byte in enumerate(others)}


def _forgeable(
    special: Mapping[int, str], encode: Callable[[str], Sequence[int]], meaningless: Callable[[], set[int | None]]
) -> Mapping[int, str]:
    """Return the special tokens that come out where a text spells one, but for those that mean nothing."""
    made = spelled(special, encode)
    ignored = meaningless() if made else set()
    return MappingProxyType({token_id: text for token_id, text in made.items() if token_id not in ignored})


def spelled(tokens: Mapping[int, str], encode: Callable[[str], Iterable[int]]) -> dict[int, str]:
    """Return those of some tokens that come out where a text spells one, alone or beside other text."""
    forms = (form.format(token=token) for token in tokens.values() for form in _SPELLED)
    made: set[int] = set()
    for text in forms:
        # A text that can't be written is left out.
        with suppress(RowError):
            made.update(map(int, encode(text)))
    return {token_id: tokens[token_id] for token_id in sorted(made & tokens.keys())}


def _joined(ids: Sequence[Sequence[int]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    lengths = np.fromiter(map(len, ids), dtype=np.int64, count=len(ids))
    return np.fromiter(itertools.chain.from_iterable(ids), dtype=np.int64, count=int(lengths.sum())), lengths


def _first_added(ids: Sequence[int], bare: Sequence[int]) -> int | None:
    """Return the token that begins ``ids`` before those of ``bare``; None if there is none."""
    if len(ids) > len(bare) and list(ids[: len(bare)]) != list(bare):
        return ids[0]
    return None


def _load_rust(directory: Path) -> RustTokenizer:
    from tokenizers import Tokenizer as RustTokenizer
    from tokenizers.models import BPE

    data = (directory / "tokenizer.json").read_bytes()
    try:
        tokenizer = RustTokenizer.from_buffer(data)
    except Exception as error:
        # The library raises a bare Exception for a file that is not a tokenizer.
        raise UserError(
            f"tokenizer={directory}: tokenizer.json can't be read ({error}); "
            "give a directory that AutoTokenizer.from_pretrained can load"
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if isinstance(tokenizer.model, BPE):
        # Merges that are skipped at random would give the same text other tokens each time.
        tokenizer.model.dropout = None
    return tokenizer


Tokenizer = ByteTokenizer | _FastTokenizer | _SlowTokenizer
"""Turns texts into token ids; `ByteTokenizer` says what each has."""


def load_tokenizer(name: str | Path) -> Tokenizer:
    """Return the tokenizer of a name: ``bytes``, a directory of Hugging Face tokenizer files, or a hub id.

    Raises:
        UserError: The directory is missing and the hub has none of that id, it holds no tokenizer, or the tokenizer has
            no end-of-sequence token.
    """
    if str(name) == BYTES:
        return ByteTokenizer()
    directory = tokenizer_folder(name)
    if (directory / "tokenizer.json").is_file():
        return _FastTokenizer(directory, str(name))
    if not any((directory / file).is_file() for file in TOKENIZER_FILES):
        raise UserError(
            f"tokenizer={name}: holds no tokenizer file (looked for {', '.join(TOKENIZER_FILES)}); "
            "use 'bytes', or the directory of a Hugging Face tokenizer"
        )
    return _SlowTokenizer(directory, str(name))


def tokenizer_folder(name: str | Path) -> Path:
    """Return the directory of a Hugging Face tokenizer: ``name``, or the copy of a hub id in the hub's cache.

    Raises:
        UserError: There is no such directory, and the hub has none of that id.
    """
    hint = "use 'bytes', or the local directory or the hub id of a Hugging Face tokenizer"
    return hub_folder(name, f"tokenizer={name}", _FETCHED, hint)


def files_fingerprint(directory: Path) -> str:
    """Return the hash of a tokenizer's files in a directory."""
    digest = hashlib.sha256()
    for file in TOKENIZER_FILES:
        if (directory / file).is_file():
            digest.update(file.encode() + b"\0" + (directory / file).read_bytes())
    return digest.hexdigest()[:32]


def _describe(directory: Path, name: str, vocabulary: dict[str, int]) -> TokenizerInfo:
    return TokenizerInfo(
        kind="huggingface",
        name=name,
        vocab_size=max(vocabulary.values()) + 1,
        eos_token_id=_eos_id(directory, vocabulary),
        fingerprint=files_fingerprint(directory),
    )


def _eos_id(directory: Path, vocabulary: dict[str, int]) -> int:
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        path = directory / file
        if not path.is_file():
            continue
        try:
            token = parse_json(path.read_bytes()).get("eos_token")
        except (ValueError, AttributeError) as error:
            raise UserError(f"tokenizer={directory}: {file} is not a JSON object ({error})") from error
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str) and content in vocabulary:
            return vocabulary[content]
    raise UserError(
        f"tokenizer={directory}: names no eos_token that is in its vocabulary, and documents must end with one; "
        'set "eos_token" in tokenizer_config.json'
    )
