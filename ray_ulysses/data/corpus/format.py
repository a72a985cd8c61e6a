"""The layout of a prepared corpus on disk: names, schemas, and the JSON that commits it.

A corpus directory holds::

    corpus.json          written last: its presence means that the corpus is complete
    documents.parquet    one row per document: length, origin, digest
    documents.index      position of the first token and number of tokens of each document
    spans.parquet        label spans, one row per span; only if some document is partly supervised
    quarantine.jsonl     documents that were left out, each with its reason
    shards/shard-00000.tokens

Shards and the index are flat files (`ray_ulysses.data.corpus.flat_file`). The tokens of all shards form one array of
consecutive documents. The Parquet files' row groups hold 65,536 rows and are read one at a time.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from ray_ulysses.data.corpus.flat_file import FlatInfo
from ray_ulysses.data.fingerprint import stable_hash
from ray_ulysses.data.tokenize.encoding import EncodingInfo
from ray_ulysses.data.tokenize.tokenizers import TokenizerInfo, Vocabulary
from ray_ulysses.validation import KNOWN_FIELDS_ONLY, ContentError, FileName, Number, Whole, adapter, checked

FORMAT_VERSION = 5
"""Also incremented when the same documents and options give other tokens, so that no older unit is reused."""
INDEX_FILE = "documents.index"
INDEX_DTYPE = np.dtype(np.int64)
CORPUS_FILE = "corpus.json"
DOCUMENTS_FILE = "documents.parquet"
SPANS_FILE = "spans.parquet"
QUARANTINE_FILE = "quarantine.jsonl"
PREPARATION_FILE = "preparation.json"
SHARDS_DIRECTORY = "shards"
UNITS_DIRECTORY = "units"

DOCUMENT_SCHEMA = pa.schema(
    [
        pa.field("length", pa.int64(), nullable=False),
        pa.field("max_token_id", pa.int64(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("id", pa.string(), nullable=False),
        # A digest, equal for documents of equal content in any corpus.
        pa.field("content", pa.binary(16), nullable=False),
    ]
)
SPANS_SCHEMA = pa.schema(
    [
        pa.field("document", pa.int64(), nullable=False),
        pa.field("start", pa.int64(), nullable=False),
        pa.field("stop", pa.int64(), nullable=False),
    ]
)

WEIGHTED_SPANS_SCHEMA = SPANS_SCHEMA.append(pa.field("weight", pa.float32(), nullable=False))


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the smallest unsigned dtype that holds every id below ``vocab_size``."""
    for dtype in (np.uint8, np.uint16, np.uint32):
        if vocab_size - 1 <= np.iinfo(dtype).max:
            return np.dtype(dtype)
    raise ValueError(f"vocab_size={vocab_size} does not fit 32 bits")


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardInfo:
    """One shard file."""

    __pydantic_config__ = KNOWN_FIELDS_ONLY

    name: FileName
    """File name under ``shards/``."""
    num_documents: Whole
    """Documents written to it, including duplicates that were left out later."""
    tokens: FlatInfo

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens, including documents that were left out later."""
        return self.tokens.num_items


@dataclass(frozen=True, kw_only=True, slots=True)
class SpansInfo:
    """The label spans of a corpus."""

    __pydantic_config__ = KNOWN_FIELDS_ONLY

    num_spans: Whole
    """Rows of ``spans.parquet``."""
    num_supervised: Whole
    """Tokens in a span."""
    num_bytes: Whole
    crc32: Whole
    """Of the file's bytes."""
    content_crc32: Whole
    """Of documents, starts, stops and weights, independent of the library that wrote the file."""
    weights: tuple[Number, Number] | None = None
    """The smallest and the largest loss weight of a span; None if all are 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusInfo:
    """The content of ``corpus.json``."""

    __pydantic_config__ = KNOWN_FIELDS_ONLY

    tokenizer: TokenizerInfo
    vocabulary: Vocabulary
    """The tokenizer's tokens, to compare it with a model's tokenizer."""
    encoding: EncodingInfo
    dtype: str
    """Name of the tokens' dtype on disk."""
    num_documents: Whole
    num_tokens: Whole
    """Tokens of all documents, including the end token of each."""
    max_token_id: Whole
    num_quarantined: Whole
    """Documents left out, for the reasons in ``quarantine.jsonl``."""
    shards: tuple[ShardInfo, ...]
    documents_bytes: Whole
    documents_crc32: Whole
    """Of the bytes of ``documents.parquet``."""
    lengths_crc32: Whole
    """Of the document lengths as little-endian int64."""
    index: FlatInfo
    """The index, with two values per document: the position of its first token in all shards, and its length."""
    byte_unigram_nats: Number | None
    """Unigram entropy of the raw bytes; None unless the byte tokenizer was used."""
    token_unigram_nats: Number | None
    """Unigram entropy of the token ids, including end tokens; None unless the byte tokenizer was used."""
    signature: str
    """Identifies the sources and options, to recognize the same preparation."""
    spans: SpansInfo | None = None
    """None if every token of every document is supervised."""
    turn_ends: tuple[Whole, ...] = ()
    """The special tokens that end supervised spans of documents."""
    reasons: tuple[tuple[str, Whole], ...] = ()
    """Number of documents left out for each reason, most frequent first."""

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """Return the tokens with which a model learns to end a text: after documents and after turns."""
        end = self.encoding.eos_token_id
        return tuple(dict.fromkeys((*(() if end is None else (end,)), *self.turn_ends)))

    @property
    def fingerprint(self) -> str:
        """Return the identity of the content: the tokens of each document in order, their labels, and the tokenizer.

        It covers the index, since shards also hold duplicates that were left out: lengths do not locate documents.
        """
        content = {
            "format": FORMAT_VERSION,
            "tokenizer": self.tokenizer.fingerprint,
            "dtype": self.dtype,
            "documents": [self.num_documents, self.index.crc32],
            "shards": [[shard.num_tokens, shard.tokens.crc32] for shard in self.shards],
            "spans": None if self.spans is None else [self.spans.num_spans, self.spans.content_crc32],
        }
        return stable_hash(content)

    def to_json(self) -> dict[str, Any]:
        """Return the content of ``corpus.json``, with a checksum of all other fields."""
        fields = {"format_version": FORMAT_VERSION, "fingerprint": self.fingerprint, **asdict(self)}
        return {**fields, "checksum": stable_hash(fields)}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> CorpusInfo:
        """Parse the output of ``to_json``.

        Raises:
            ContentError: A field is missing, unknown or invalid, or the fields do not match their checksum.
        """
        known = dict(fields)
        if known.pop("checksum", None) != stable_hash(known):
            raise ContentError("its fields were changed: they do not match its checksum")
        fingerprint = known.pop("fingerprint", None)
        del known["format_version"]
        info = checked(adapter(cls), known)
        try:
            expected = token_dtype(info.tokenizer.vocab_size).name
        except ValueError as error:
            raise ContentError(f"tokenizer.{error}") from error
        if info.dtype != expected:
            raise ContentError(
                f"dtype={info.dtype!r}: tokens of a vocabulary of {info.tokenizer.vocab_size} are stored as {expected}"
            )
        if fingerprint != info.fingerprint:
            raise ContentError("its fields do not match its fingerprint")
        if info.index.num_items != 2 * info.num_documents:
            raise ContentError(f"its index has {info.index.num_items} values for {info.num_documents} documents")
        if info.num_tokens > (held := sum(shard.num_tokens for shard in info.shards)):
            raise ContentError(f"num_tokens is {info.num_tokens}, but its shards hold only {held}")
        return info
