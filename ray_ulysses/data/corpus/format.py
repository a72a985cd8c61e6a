"""The on-disk layout of a prepared corpus: file names, schemas, and the JSON file that commits the corpus.

A corpus directory contains::

    corpus.json          written last: if it exists, the corpus is complete
    documents.parquet    one row per document: length, origin, digest, and the class if documents have classes
    documents.index      position of the first token and number of tokens of each document
    spans.parquet        label spans, one row per span; written only if some document is partly supervised
    quarantine.jsonl     excluded documents, each with the reason
    shards/shard-00000.tokens

Shards and the index are flat files (`ray_ulysses.data.corpus.flat_file`). The tokens of all shards form one array of
consecutive documents. The Parquet files have row groups of 65,536 rows, which are read one at a time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from ray_ulysses.data.corpus.flat_file import FlatInfo
from ray_ulysses.data.fingerprint import stable_hash
from ray_ulysses.data.tokenize.encoding import EncodingInfo
from ray_ulysses.data.tokenize.tokenizers import TokenizerInfo, Vocabulary
from ray_ulysses.validation import KNOWN_FIELDS_ONLY, ContentError, FileName, Number, Whole, adapter, checked

_NUMBER = re.compile(r"(?:0|-?[1-9]\d{0,17})\Z")
FORMAT_VERSION = 5
"""Format version, also incremented when tokenization changes, so that units with outdated tokens are not reused."""
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
        # Digest of the content, equal for equal documents in every corpus.
        pa.field("content", pa.binary(16), nullable=False),
    ]
)
LABELED_SCHEMA = DOCUMENT_SCHEMA.append(pa.field("label", pa.int32(), nullable=False))
"""With the index of each document's class."""
SPANS_SCHEMA = pa.schema(
    [
        pa.field("document", pa.int64(), nullable=False),
        pa.field("start", pa.int64(), nullable=False),
        pa.field("stop", pa.int64(), nullable=False),
    ]
)

WEIGHTED_SPANS_SCHEMA = SPANS_SCHEMA.append(pa.field("weight", pa.float32(), nullable=False))


def ordered_classes(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names of classes in the order of a model's outputs: numbers by value, then other names by text."""
    return tuple(sorted({*names}, key=lambda name: (0, int(name), name) if _NUMBER.match(name) else (1, 0, name)))


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the smallest unsigned dtype that can store every id below ``vocab_size``."""
    for dtype in (np.uint8, np.uint16, np.uint32):
        if vocab_size - 1 <= np.iinfo(dtype).max:
            return np.dtype(dtype)
    raise ValueError(f"vocab_size={vocab_size} does not fit in 32 bits")


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardInfo:
    """Metadata of a shard file."""

    __pydantic_config__ = KNOWN_FIELDS_ONLY

    name: FileName
    """File name in ``shards/``."""
    num_documents: Whole
    """Number of documents stored in the shard, including duplicates that were excluded later."""
    tokens: FlatInfo

    @property
    def num_tokens(self) -> int:
        """Number of tokens, including those of documents that were excluded later."""
        return self.tokens.num_items


@dataclass(frozen=True, kw_only=True, slots=True)
class SpansInfo:
    """Metadata of a corpus's label spans."""

    __pydantic_config__ = KNOWN_FIELDS_ONLY

    num_spans: Whole
    """Number of rows in ``spans.parquet``."""
    num_supervised: Whole
    """Number of tokens that the spans contain."""
    num_bytes: Whole
    crc32: Whole
    """CRC-32 of the bytes of ``spans.parquet``."""
    content_crc32: Whole
    """CRC-32 of documents, starts, stops and weights, independent of the Parquet library that wrote the file."""
    weights: tuple[Number, Number] | None = None
    """Smallest and largest loss weight of a span, or None if all weights are 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusInfo:
    """The content of ``corpus.json``."""

    __pydantic_config__ = KNOWN_FIELDS_ONLY

    tokenizer: TokenizerInfo
    vocabulary: Vocabulary
    """The tokenizer's vocabulary, for comparison with the tokenizer of a model."""
    encoding: EncodingInfo
    dtype: str
    """Dtype of the stored tokens, such as ``uint16``."""
    num_documents: Whole
    num_tokens: Whole
    """Number of tokens in all documents, including one end token per document."""
    max_token_id: Whole
    num_quarantined: Whole
    """Number of excluded documents; ``quarantine.jsonl`` lists them with the reasons."""
    shards: tuple[ShardInfo, ...]
    documents_bytes: Whole
    documents_crc32: Whole
    """CRC-32 of the bytes of ``documents.parquet``."""
    lengths_crc32: Whole
    """CRC-32 of the document lengths as little-endian int64."""
    index: FlatInfo
    """Size and checksums of the index: each document's first token position (over all shards) and length."""
    byte_unigram_nats: Number | None
    """Unigram entropy of the raw bytes in nats, or None unless the byte tokenizer was used."""
    token_unigram_nats: Number | None
    """Unigram entropy of the token ids in nats, including end tokens, or None unless the byte tokenizer was used."""
    signature: str
    """Hash of the sources and options, used to recognize a repeated preparation."""
    spans: SpansInfo | None = None
    """Label span metadata, or None if every token of every document is supervised."""
    turn_ends: tuple[Whole, ...] = ()
    """Special tokens that end supervised spans."""
    are_pairs: bool = False
    """Whether each document is a pair of answers: the chosen and the rejected one, each with its prompt. The document's
    first label span ends with the chosen answer, and the second with the rejected one. With classes, see
    `has_labeled_answers`. Or a pair of texts; see `are_queries`."""
    are_queries: bool = False
    """Whether each document is a pair of a query and a text that matches it."""
    classes: tuple[str, ...] = ()
    """Names of the documents' classes, in order; empty if the documents have no classes."""
    labels_crc32: Whole = 0
    """CRC-32 of the indices of the documents' classes as little-endian int32."""
    reasons: tuple[tuple[str, Whole], ...] = ()
    """Reasons for excluding documents, each with the number of documents, most frequent first."""

    @property
    def has_labeled_answers(self) -> bool:
        """Whether each document is an answer, followed by its prompt with the answer of another document.

        The class ``true`` is that of desirable answers, and ``false`` that of others.
        """
        return self.are_pairs and bool(self.classes)

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """Tokens that a model learns to emit at the end of a text: document ends and turn ends."""
        end = self.encoding.eos_token_id
        return tuple(dict.fromkeys((*(() if end is None else (end,)), *self.turn_ends)))

    @property
    def fingerprint(self) -> str:
        """Hash that identifies the content: each document's tokens, in order, their labels, and the tokenizer.

        The hash includes the index because shards also contain excluded duplicates, so lengths do not locate documents.
        """
        content = {
            "format": FORMAT_VERSION,
            "tokenizer": self.tokenizer.fingerprint,
            "dtype": self.dtype,
            "documents": [self.num_documents, self.index.crc32],
            "shards": [[shard.num_tokens, shard.tokens.crc32] for shard in self.shards],
            "spans": None if self.spans is None else [self.spans.num_spans, self.spans.content_crc32],
            **({"pairs": True} if self.are_pairs else {}),
            **({"queries": True} if self.are_queries else {}),
            **({"classes": [*self.classes, self.labels_crc32]} if self.classes else {}),
        }
        return stable_hash(content)

    def to_json(self) -> dict[str, Any]:
        """Return the content of ``corpus.json``, including a checksum of all other fields."""
        fields = {"format_version": FORMAT_VERSION, "fingerprint": self.fingerprint, **asdict(self)}
        return {**fields, "checksum": stable_hash(fields)}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> CorpusInfo:
        """Parse the output of ``to_json``.

        Raises:
            ContentError: A field is missing, unknown or invalid, or the fields do not match the checksum.
        """
        known = dict(fields)
        if known.pop("checksum", None) != stable_hash(known):
            raise ContentError("the fields do not match the checksum: the file was changed")
        fingerprint = known.pop("fingerprint", None)
        del known["format_version"]
        info = checked(adapter(cls), known)
        try:
            expected = token_dtype(info.tokenizer.vocab_size).name
        except ValueError as error:
            raise ContentError(f"tokenizer.{error}") from error
        if info.dtype != expected:
            raise ContentError(
                f"dtype={info.dtype!r}: a vocabulary of {info.tokenizer.vocab_size} tokens requires {expected}"
            )
        if fingerprint != info.fingerprint:
            raise ContentError("the fields do not match the fingerprint")
        if info.index.num_items != 2 * info.num_documents:
            raise ContentError(f"the index has {info.index.num_items} values for {info.num_documents} documents")
        if info.num_tokens > (held := sum(shard.num_tokens for shard in info.shards)):
            raise ContentError(f"num_tokens is {info.num_tokens}, but the shards contain only {held} tokens")
        return info
