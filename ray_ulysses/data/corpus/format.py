"""The layout of a prepared corpus on disk: names, schemas, and the JSON that commits it.

A corpus directory holds::

    corpus.json          written last: its presence means that the corpus is complete
    documents.parquet    one row per document: length, origin, digest
    documents.index      where the tokens of each document begin, and how many they are
    spans.parquet        label spans, one row per span; only if some document is supervised in part
    quarantine.jsonl     documents that were left out, each with its reason
    shards/shard-00000.tokens

Shards and the index are flat files (`ray_ulysses.data.corpus.flat_file`). The tokens of all shards count as one array;
documents follow one another in it. The Parquet files' row groups hold 65,536 rows and are read one at a time.
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
"""Rises also when the same documents and options give other tokens, so that no unit of before is used again."""
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
        # A digest that is equal for documents of equal content, in this corpus and in others.
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
    """Return the smallest unsigned type that holds every id below ``vocab_size``."""
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
    """Documents written into it, including those later left out as duplicates."""
    tokens: FlatInfo

    @property
    def num_tokens(self) -> int:
        """Return its tokens, including those of documents later left out."""
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
    """Of documents, starts, stops and weights; it does not depend on the library that wrote the file."""
    weights: tuple[Number, Number] | None = None
    """The smallest and the largest factor on the loss of a span's tokens; None if all are 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusInfo:
    """The content of ``corpus.json``."""

    __pydantic_config__ = KNOWN_FIELDS_ONLY

    tokenizer: TokenizerInfo
    vocabulary: Vocabulary
    """The tokenizer's tokens, by which it is compared with a model's."""
    encoding: EncodingInfo
    dtype: str
    """Name of the tokens' type on disk."""
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
    """The index, with two values per document: the place of its first token in all shards, and its length."""
    byte_unigram_nats: Number | None
    """Entropy of the raw bytes; None unless the byte tokenizer was used."""
    token_unigram_nats: Number | None
    """Entropy of the token ids, including end tokens; None unless the byte tokenizer was used."""
    signature: str
    """Identifies sources and options, by which the same preparation is recognized."""
    spans: SpansInfo | None = None
    """None if every token of every document is supervised."""
    turn_ends: tuple[Whole, ...] = ()
    """The special tokens that end supervised spans of documents."""
    reasons: tuple[tuple[str, Whole], ...] = ()
    """How many were left out for each reason, the most frequent reasons first."""

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """Return the tokens that a model learns to end a text with, at the end of documents and of turns."""
        end = self.encoding.eos_token_id
        return tuple(dict.fromkeys((*(() if end is None else (end,)), *self.turn_ends)))

    @property
    def fingerprint(self) -> str:
        """Return the identity of the content: the tokens of each document, in order, their labels and the tokenizer.

        Shards also hold documents that were left out as duplicates, so the tokens of a document follow from its place
        in the index and not from its length.
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
        """Return the object that ``corpus.json`` holds; its checksum covers everything else in it."""
        fields = {"format_version": FORMAT_VERSION, "fingerprint": self.fingerprint, **asdict(self)}
        return {**fields, "checksum": stable_hash(fields)}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> CorpusInfo:
        """Return what ``to_json`` described.

        Raises:
            ContentError: A field is missing, unknown or wrong, or the fields do not match their checksum.
        """
        known = dict(fields)
        if known.pop("checksum", None) != stable_hash(known):
            raise ContentError("its fields were changed: they do not give its checksum")
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
            raise ContentError("its fields do not give its fingerprint")
        if info.index.num_items != 2 * info.num_documents:
            raise ContentError(f"its index has {info.index.num_items} values for {info.num_documents} documents")
        if info.num_tokens > (held := sum(shard.num_tokens for shard in info.shards)):
            raise ContentError(f"num_tokens is {info.num_tokens}, and its shards hold {held}")
        return info
