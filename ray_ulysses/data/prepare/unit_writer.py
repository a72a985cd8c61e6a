"""Prepares one unit: writes the unit's documents to a shard, and notes for the merge to separate files.

The unit's JSON file is written last, so that a unit is considered finished only if all its other files exist.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ray_ulysses.data.corpus.flat_file import FlatWriter
from ray_ulysses.data.corpus.format import FORMAT_VERSION, SHARDS_DIRECTORY, UNITS_DIRECTORY, ShardInfo, token_dtype
from ray_ulysses.data.sources.extraction import RawDocument, read_unit
from ray_ulysses.data.sources.files import changed
from ray_ulysses.data.sources.records import LineCounts
from ray_ulysses.data.sources.rows import ChatRow, PairRow, Rejected, RowError
from ray_ulysses.data.sources.units import TOKENIZED, Unit
from ray_ulysses.data.tokenize.encoding import (
    NOT_SUPERVISED,
    DocumentEncoder,
    OutsideVocabularyError,
    text_digest,
    weighted,
)
from ray_ulysses.data.tokenize.spans import EncodedDocument
from ray_ulysses.errors import UserError
from ray_ulysses.storage.atomic import atomic_file, write_text
from ray_ulysses.storage.local import LocalStore
from ray_ulysses.storage.regular import open_regular, read_regular
from ray_ulysses.storage.retry import RETRY, RetryPolicy, is_transient
from ray_ulysses.validation import adapter, checked, parse_json

_LONG_CHARACTERS = 1 << 20
_BATCH_CHARACTERS = 1 << 20
_BATCH_TEXTS = 1024
NOTES_SCHEMA = pa.schema(
    [
        ("length", pa.int64()),
        ("max_token_id", pa.int64()),
        # Position in the shard.
        ("first_token", pa.int64()),
        ("source", pa.string()),
        ("offset", pa.int64()),
        ("id", pa.string()),
        ("content", pa.binary(16)),
        # Null if a single span covers the document.
        ("span_starts", pa.list_(pa.int64())),
        ("span_stops", pa.list_(pa.int64())),
        # Null if all weights are 1.
        ("span_weights", pa.list_(pa.float32())),
        # Null if the documents have no classes.
        ("label", pa.string()),
    ]
)


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitResult:
    """Result of one unit."""

    index: int
    signature: str
    """Hash of the unit's content, the tokenizer, and the encoding options."""
    shard: ShardInfo | None
    """Metadata of the shard that was written, or None if the unit contains no usable document."""
    num_documents: int
    """Number of documents written."""
    num_tokens: int
    num_rejected: int
    """Number of documents excluded."""
    has_spans: bool
    """Whether any document is partly supervised or has a loss weight."""
    has_weights: bool
    turn_ends: tuple[int, ...]
    """Special tokens that end supervised spans."""
    token_counts: tuple[int, ...] | None
    """Number of occurrences of each token id, or None unless the byte tokenizer is used."""
    lines: LineCounts | None
    """Line counts of the unit's file or range, or None if the source format has no lines."""
    are_pairs: bool = False
    """Whether each document is a pair of texts, or a labeled answer followed by another."""
    are_queries: bool = False
    """Whether each document is a pair of a query and a text that matches it."""
    has_labels: bool = False
    """Whether each document has a class."""
    num_chats: int = 0
    """Number of conversations written."""
    num_chat_documents: int = 0
    """Number of documents made from conversations."""
    num_open_turns: int = 0
    """Number of supervised turns that do not end with a special token."""
    num_unknown: int = 0
    """Number of unknown tokens."""


def unit_file(out: Path, index: int, suffix: str) -> Path:
    """Return the path of a unit's notes file with the given suffix."""
    return out / UNITS_DIRECTORY / f"unit-{index:05d}.{suffix}"


def unit_signature(unit: Unit, encoder: DocumentEncoder) -> str:
    """Return a hash of a unit's content, format and encoding. A finished unit with the same hash is reused."""
    parts = [str(FORMAT_VERSION), unit.signature, encoder.tokenizer.info.fingerprint, encoder.fingerprint]
    if unit.fields.kind == "messages":
        parts.append(encoder.chat.fingerprint)
    if unit.fields.kind == "pair":
        # Answers that are text need no chat format.
        with suppress(UserError):
            parts.append(encoder.chat.fingerprint)
    return "-".join(parts)


def finished_unit(out: Path, unit: Unit, encoder: DocumentEncoder) -> UnitResult | None:
    """Return the result of a unit that an earlier command finished with the same content, or None.

    Raises:
        OSError: The storage does not respond.
    """
    try:
        result = checked(adapter(UnitResult), parse_json(read_regular(unit_file(out, unit.index, "json"), out)))
        if result.signature != unit_signature(unit, encoder):
            return None
        # These files are written before the result, but a power failure may not preserve that order.
        for suffix in ("parquet", "quarantine.jsonl"):
            open_regular(unit_file(out, unit.index, suffix), out).close()
        if result.shard is not None:
            num_bytes = result.shard.tokens.num_bytes(token_dtype(encoder.tokenizer.info.vocab_size))
            if LocalStore(out).size(f"{SHARDS_DIRECTORY}/{result.shard.name}") != num_bytes:
                return None
    except (OSError, ValueError) as error:
        if is_transient(error):
            raise
        return None
    return result


def write_unit(out: Path, unit: Unit, encoder: DocumentEncoder, retry: RetryPolicy = RETRY) -> UnitResult:
    """Read, tokenize and store one unit. Processing the unit again writes the same files.

    If the storage of the sources or of the corpus stops answering, the unit is processed again from the start.

    Raises:
        UserError: A file of the unit can't be read, or changed while it was read.
        RunError: The corpus can't be written. ``StorageAwayError`` if the storage did not respond in time.
    """
    return retry.call_or_fail(f"unit {unit.index} of {out}", lambda: _write_unit(out, unit, encoder))


def _write_unit(out: Path, unit: Unit, encoder: DocumentEncoder) -> UnitResult:
    shard_path = out / SHARDS_DIRECTORY / f"shard-{unit.index:05d}.tokens"
    collected = _Collected(encoder, unit)
    with atomic_file(shard_path, out) as temporary:
        writer = FlatWriter(temporary, token_dtype(encoder.tokenizer.info.vocab_size))
        try:
            for found in read_unit(unit):
                collected.add(found, writer)
            collected.write_texts(writer)
            num_documents = len(collected.columns["length"])
            shard = ShardInfo(name=shard_path.name, num_documents=num_documents, tokens=writer.close())
        except BaseException:
            writer.abandon()
            raise
        _refuse_changed_files(unit)
    if not shard.num_documents:
        shard_path.unlink()
    result = UnitResult(
        index=unit.index,
        signature=unit_signature(unit, encoder),
        shard=shard if shard.num_documents else None,
        num_documents=shard.num_documents,
        num_tokens=shard.num_tokens,
        num_rejected=len(collected.rejected),
        has_spans=collected.has_spans,
        has_weights=collected.has_weights,
        turn_ends=tuple(sorted(collected.turn_ends)),
        token_counts=None if collected.counts is None else tuple(collected.counts.tolist()),
        lines=collected.lines,
        are_pairs=unit.fields.kind in ("pair", "answer", "query"),
        are_queries=unit.fields.kind == "query",
        has_labels=unit.fields.label is not None,
        num_chats=collected.num_chats,
        num_chat_documents=collected.num_chat_documents,
        num_open_turns=collected.num_open_turns,
        num_unknown=collected.num_unknown,
    )
    collected.write(out, unit.index)
    write_text(unit_file(out, unit.index, "json"), json.dumps(asdict(result)), out)
    return result


class _Collected:
    """Notes of a unit, collected while the unit is read."""

    def __init__(self, encoder: DocumentEncoder, unit: Unit) -> None:
        self.rejected: list[Rejected] = []
        self.columns: dict[str, list[Any]] = {name: [] for name in NOTES_SCHEMA.names}
        self.has_spans = self.has_weights = False
        self.turn_ends: set[int] = set()
        self.lines: LineCounts | None = None
        self.num_chats = self.num_chat_documents = self.num_open_turns = self.num_unknown = 0
        self._encoder, self._is_tokenized = encoder, unit.kind in TOKENIZED
        # Texts are encoded in batches. Rejected documents wait with the texts around them, to preserve the order.
        self._texts: list[RawDocument | Rejected] = []
        self._num_characters = 0
        info = encoder.tokenizer.info
        self.counts = np.zeros(info.vocab_size, dtype=np.int64) if info.kind == "bytes" else None

    def add(self, document: RawDocument | Rejected | LineCounts, writer: FlatWriter) -> None:
        """Tokenize and store a document, or record a rejected document or line counts."""
        if isinstance(document, LineCounts):
            self.lines = document
            return
        if isinstance(document, Rejected):
            self._texts.append(document)
            return
        if isinstance(document.content, str) and isinstance(document.weight, float) and document.weight == 1:
            self._add_text(document, len(document.content), writer)
            return
        self.write_texts(writer)
        try:
            special = self._encoder.tokenizer.special_ids
            written = [weighted(one, document.weight, special) for one in self._encoder.encode(document.content)]
        except RowError as error:
            if self._is_tokenized and isinstance(error, OutsideVocabularyError):
                rule = f"document {document.offset}: {error}"
                raise other_tokenizer(document.source, rule, self._encoder) from error
            self._reject(document, str(error))
            return
        content = document.content
        if isinstance(content.chosen if isinstance(content, PairRow) else content, ChatRow):
            self.num_chats += 1
            self.num_chat_documents += len(written)
            self.num_open_turns += sum(one.num_open for one in written)
        for encoded in written:
            self._note(document, encoded, writer.add(encoded.ids))
            self._count(encoded.ids)

    def write_texts(self, writer: FlatWriter) -> None:
        """Tokenize and store the pending texts."""
        waiting, self._texts, self._num_characters = self._texts, [], 0
        texts = [one for one in waiting if isinstance(one, RawDocument)]
        if not texts:
            self.rejected += [one for one in waiting if isinstance(one, Rejected)]
            return
        encoded = self._encoder.encode_texts([str(one.content) for one in texts])
        stops = np.cumsum(encoded.lengths)
        is_kept = encoded.lengths > 1
        is_kept[[*encoded.left_out]] = False
        largest = np.maximum.reduceat(np.append(encoded.ids, 0), stops - encoded.lengths)
        ids = encoded.ids if is_kept.all() else encoded.ids[np.repeat(is_kept, encoded.lengths)]
        lengths = encoded.lengths[is_kept]
        firsts = writer.add(ids) + np.cumsum(lengths) - lengths
        self._count(ids)
        kept = [one for one, keep in zip(texts, is_kept.tolist(), strict=True) if keep]
        self._extend(
            kept,
            length=lengths.tolist(),
            max_token_id=largest[is_kept].tolist(),
            first_token=firsts.tolist(),
            content=[digest for digest, keep in zip(encoded.digests, is_kept.tolist(), strict=True) if keep],
        )
        left = enumerate(is_kept.tolist())
        for one in waiting:
            if isinstance(one, Rejected):
                self.rejected.append(one)
                continue
            place, is_stored = next(left)
            if not is_stored:
                self._reject(one, encoded.left_out.get(place, NOT_SUPERVISED))

    def _add_text(self, document: RawDocument, size: int, writer: FlatWriter) -> None:
        if size > _LONG_CHARACTERS:
            self.write_texts(writer)
            self._write_long(document, writer)
            return
        self._texts.append(document)
        self._num_characters += size
        if self._num_characters >= _BATCH_CHARACTERS or len(self._texts) >= _BATCH_TEXTS:
            self.write_texts(writer)

    def _write_long(self, document: RawDocument, writer: FlatWriter) -> None:
        text, largest, first = str(document.content), 0, writer.num_items
        try:
            for ids in self._encoder.encode_parts(text):
                self._count(ids)
                largest = max(largest, int(ids.max(initial=0)))
                writer.add(ids)
        except RowError as error:
            self._reject(document, str(error))
            return
        self._extend(
            [document],
            length=[writer.num_items - first],
            max_token_id=[largest],
            first_token=[first],
            content=[text_digest(text)],
        )

    def _count(self, ids: NDArray[np.integer[Any]]) -> None:
        if (unknown := self._encoder.tokenizer.unknown_token_id) is not None:
            self.num_unknown += int(np.count_nonzero(ids == unknown))
        if self.counts is not None:
            self.counts += np.bincount(ids, minlength=self.counts.size)

    def _reject(self, document: RawDocument, reason: str) -> None:
        self.rejected.append(Rejected(source=document.source, offset=document.offset, reason=reason))

    def _extend(self, documents: Sequence[RawDocument], **columns: list[Any]) -> None:
        """Append one note per document. Without span columns, a single span of weight 1 covers each document."""
        columns |= {name: [getattr(one, name) for one in documents] for name in ("source", "offset", "id", "label")}
        for name, column in self.columns.items():
            column.extend(columns.get(name) or [None] * len(documents))

    def _note(self, document: RawDocument, encoded: EncodedDocument, first_token: int) -> None:
        whole, content = encoded.is_whole, document.content
        self.has_spans |= not whole
        self.has_weights |= encoded.weights is not None
        self.turn_ends |= encoded.turn_ends
        self._extend(
            [document],
            length=[encoded.ids.size],
            max_token_id=[int(encoded.ids.max())],
            first_token=[first_token],
            content=[text_digest(content) if isinstance(content, str) else encoded.digest],
            span_starts=[None if whole else encoded.starts],
            span_stops=[None if whole else encoded.stops],
            span_weights=[encoded.weights],
        )

    def write(self, out: Path, index: int) -> None:
        lines = "".join(json.dumps(asdict(rejected)) + "\n" for rejected in self.rejected)
        write_text(unit_file(out, index, "quarantine.jsonl"), lines, out)
        with atomic_file(unit_file(out, index, "parquet"), out) as temporary:
            pq.write_table(pa.table(self.columns, schema=NOTES_SCHEMA), temporary, compression="zstd")


def other_tokenizer(source: str, rule: str, encoder: DocumentEncoder) -> UserError:
    """Return the error for a file whose tokens do not fit the tokenizer."""
    return UserError(
        f"source={source}: {rule}, but --tokenizer={encoder.tokenizer.info.name}; set --tokenizer to the tokenizer "
        "that made the file, or exclude the file (--exclude)"
    )


def _refuse_changed_files(unit: Unit) -> None:
    # Data sets are checked while they are read.
    if unit.kind == "datasets":
        return
    for file in unit.files:
        try:
            status = os.stat(file.path)
        except OSError as error:
            if is_transient(error):
                raise
            status = None
        if status is None or (status.st_size, status.st_mtime_ns) != (file.num_bytes, file.modified_ns):
            raise changed(file.path)
