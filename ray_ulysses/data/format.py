"""The layout of a prepared corpus on disk: names, schemas, and the JSON that commits it.

A corpus directory holds::

    corpus.json          written last: its presence means that the corpus is whole
    documents.parquet    the length sidecar, one row a document
    spans.parquet        label spans, one row a span; only where some document is supervised in part
    quarantine.jsonl     documents that were left out, each with its reason
    shards/shard-00000.parquet

A shard's rows are chunks of at most 65,536 tokens: a document starts a row of its own and goes on in the next
rows. Row groups hold about as many tokens, so that reading a piece of any document decodes little else. The
sidecars' row groups hold 65,536 rows, and are read one by one: opening a corpus reads no document.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from ray_ulysses.data.tokenizers import TokenizerInfo

FORMAT_VERSION = 3
CHUNK_TOKENS = 65_536
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
        pa.field("shard", pa.int32(), nullable=False),
        pa.field("first_row", pa.int64(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("id", pa.string(), nullable=False),
        # What documents of the same content share, in this corpus and in others.
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


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the smallest unsigned type that holds every id below ``vocab_size``."""
    for dtype in (np.uint8, np.uint16, np.uint32):
        if vocab_size - 1 <= np.iinfo(dtype).max:
            return np.dtype(dtype)
    raise ValueError(f"vocab_size={vocab_size} does not fit 32 bits")


def shard_schema(dtype: np.dtype[Any]) -> pa.Schema:
    """Return the schema of a shard whose tokens are stored as ``dtype``."""
    return pa.schema(
        [
            pa.field("document", pa.int64(), nullable=False),
            pa.field(
                "tokens",
                pa.list_(pa.field("token", pa.from_numpy_dtype(dtype), nullable=False)),
                nullable=False,
            ),
        ]
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardInfo:
    """One shard file.

    Attributes:
        name: File name under ``shards/``.
        num_rows: Chunk rows in it.
        num_documents: Documents written into it, those later set aside as duplicates included.
        num_tokens: Tokens in it.
        num_bytes: Size of the file.
        crc32: Of the file's bytes.
        tokens_crc32: Of the tokens, which does not depend on the library that wrote the file.
        rows_crc32: Of the rows' documents and lengths. It and ``tokens_crc32`` stand in the file's footer too, so
            that another shard in its place is noticed, however much it looks like this one.
    """

    name: str
    num_rows: int
    num_documents: int
    num_tokens: int
    num_bytes: int
    crc32: int
    tokens_crc32: int
    rows_crc32: int

    @property
    def footer(self) -> dict[str, str]:
        """Return what the file's own footer must say."""
        return shard_footer(self.tokens_crc32, self.rows_crc32)


def shard_footer(tokens_crc32: int, rows_crc32: int) -> dict[str, str]:
    """Return the key-value metadata of a shard."""
    return {"ray_ulysses.tokens_crc32": f"{tokens_crc32:08x}", "ray_ulysses.rows_crc32": f"{rows_crc32:08x}"}


@dataclass(frozen=True, kw_only=True, slots=True)
class SpansInfo:
    """The label spans of a corpus.

    Attributes:
        num_spans: Rows of ``spans.parquet``.
        num_supervised: Tokens that lie in a span.
        num_bytes: Size of the file.
        crc32: Of the file's bytes.
        content_crc32: Of documents, starts and stops, which does not depend on the library that wrote the file.
    """

    num_spans: int
    num_supervised: int
    num_bytes: int
    crc32: int
    content_crc32: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusInfo:
    """What ``corpus.json`` says.

    Attributes:
        tokenizer: The tokenizer that made the tokens.
        dtype: Name of the tokens' type on disk.
        num_documents: Documents in the sidecar.
        num_tokens: Their tokens, the end token of each included.
        max_token_id: Largest token id of all.
        num_quarantined: Documents left out; ``quarantine.jsonl`` says why.
        reasons: How many were left out for each reason, the most frequent ones first.
        shards: The shard files.
        documents_bytes: Size of the length sidecar.
        documents_crc32: CRC-32 of the length sidecar.
        lengths_crc32: CRC-32 of the document lengths as little-endian int64.
        byte_unigram_nats: Entropy of the raw bytes; None unless the byte tokenizer was used.
        token_unigram_nats: Entropy of the token ids, end tokens included; None unless the byte tokenizer was
            used.
        signature: Identifies sources and options, so that the same preparation is known again.
        spans: The label spans; None where every token of every document is supervised.
        turn_ends: The special tokens that end supervised stretches of documents.
    """

    tokenizer: TokenizerInfo
    dtype: str
    num_documents: int
    num_tokens: int
    max_token_id: int
    num_quarantined: int
    shards: tuple[ShardInfo, ...]
    documents_bytes: int
    documents_crc32: int
    lengths_crc32: int
    byte_unigram_nats: float | None
    token_unigram_nats: float | None
    signature: str
    spans: SpansInfo | None = None
    turn_ends: tuple[int, ...] = ()
    reasons: tuple[tuple[str, int], ...] = ()

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """Return the tokens that a model learns to end a text with: that of every document, and those of turns."""
        return tuple(dict.fromkeys((self.tokenizer.eos_token_id, *self.turn_ends)))

    @property
    def fingerprint(self) -> str:
        """Return the identity of the content: tokens, lengths and tokenizer, whatever wrote the files."""
        content = {
            "format": FORMAT_VERSION,
            "tokenizer": self.tokenizer.fingerprint,
            "dtype": self.dtype,
            "documents": [self.num_documents, self.lengths_crc32],
            "shards": [[s.num_rows, s.num_tokens, s.tokens_crc32] for s in self.shards],
            "spans": None if self.spans is None else [self.spans.num_spans, self.spans.content_crc32],
        }
        return stable_hash(content)

    def to_json(self) -> dict[str, Any]:
        """Return the object that ``corpus.json`` holds."""
        fields = asdict(self)
        fields["shards"] = [asdict(shard) for shard in self.shards]
        return {"format_version": FORMAT_VERSION, "fingerprint": self.fingerprint, **fields}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> CorpusInfo:
        """Return what ``to_json`` described.

        Raises:
            KeyError: A field is missing.
            TypeError: A field is unknown.
            ValueError: ``dtype`` is not the type that tokens of this vocabulary are stored as.
        """
        known = {key: value for key, value in fields.items() if key not in ("format_version", "fingerprint")}
        known["tokenizer"] = TokenizerInfo.from_json(known["tokenizer"])
        known["shards"] = tuple(ShardInfo(**shard) for shard in known["shards"])
        known["turn_ends"] = tuple(known.get("turn_ends", ()))
        known["reasons"] = tuple((str(reason), int(count)) for reason, count in known["reasons"])
        known["spans"] = None if known["spans"] is None else SpansInfo(**known["spans"])
        expected = token_dtype(known["tokenizer"].vocab_size).name
        if known["dtype"] != expected:
            raise ValueError(
                f"dtype={known['dtype']!r}: tokens of a vocabulary of {known['tokenizer'].vocab_size} are "
                f"stored as {expected}"
            )
        return cls(**known)


def stable_hash(value: object) -> str:
    """Return 32 hexadecimal digits that depend only on the JSON form of ``value``."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:32]
