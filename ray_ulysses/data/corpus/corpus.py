"""Reads a prepared corpus.

Opening a corpus reads only metadata and checksums. The document table and the label spans are read one row group at a
time.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ray_ulysses.data.corpus.flat_file import MAX_OPEN_FILES, MAX_OPEN_OBJECTS, DamagedFileError, FlatFiles
from ray_ulysses.data.corpus.format import (
    CORPUS_FILE,
    DOCUMENT_SCHEMA,
    DOCUMENTS_FILE,
    FORMAT_VERSION,
    INDEX_DTYPE,
    INDEX_FILE,
    LABELED_SCHEMA,
    PREPARATION_FILE,
    SHARDS_DIRECTORY,
    SPANS_FILE,
    SPANS_SCHEMA,
    WEIGHTED_SPANS_SCHEMA,
    CorpusInfo,
    ShardInfo,
    SpansInfo,
)
from ray_ulysses.data.corpus.row_groups import RowGroupReader
from ray_ulysses.data.tokenize.spans import LabelSpans, span_mask
from ray_ulysses.errors import UserError, shown
from ray_ulysses.storage.local import LocalStore
from ray_ulysses.storage.place import FileStore, open_folder
from ray_ulysses.storage.retry import READ_ERRORS, RETRY, RetryPolicy, is_transient
from ray_ulysses.validation import ContentError, adapter, read_json

_BATCH_ROWS = 1 << 18
_MAX_LENGTH = 2**32 - 1
_NUM_PARTS = 16


class DocumentSource(NamedTuple):
    """Origin of a document."""

    source: str
    """File path or dataset name."""
    offset: int
    """1-based line or row number in the source, or 0 if the document is the complete file."""
    id: str
    """Row id from the source, or an empty string if the row has no id."""


class Corpus:
    """A prepared corpus, whose documents are numbered from 0.

    Reading methods raise UserError if a file is missing or damaged, or was replaced after ``prepare`` wrote it. If the
    storage does not respond, reads are retried under the ``RetryPolicy`` and then raise ``StorageAwayError``.
    """

    def __init__(self, folder: FileStore, info: CorpusInfo, *, retry: RetryPolicy = RETRY) -> None:
        self.folder = folder
        self.info = info
        self._retry = retry
        self._shards = read_shards(folder, info.shards, np.dtype(info.dtype), retry)
        self._index = FlatFiles(folder, [INDEX_FILE], [info.index], INDEX_DTYPE, unreadable=unreadable, retry=retry)

    @classmethod
    def open(cls, location: Path | str, *, retry: RetryPolicy = RETRY) -> Corpus:
        """Open a prepared corpus without reading its documents.

        Args:
            location: A directory, or the URI of a folder in an object store.
            retry: Retry policy for storage that does not respond.

        Raises:
            UserError: The corpus is missing, empty or unreadable, or the location does not contain a prepared corpus.
        """
        folder = open_folder(location)
        try:
            info = retry.call(folder, lambda: _read_info(folder))
        except OSError as error:
            raise unreadable(folder, error.strerror) from error
        if info.num_documents == 0:
            raise UserError(f"data.path={folder}: the corpus is empty; prepare sources that contain documents")
        corpus = cls(folder, info, retry=retry)
        corpus._check_sidecars()
        _ = corpus._documents
        corpus._index.check()
        _ = corpus._span_table
        return corpus

    @property
    def path(self) -> Path:
        """Directory of a local corpus."""
        assert isinstance(self.folder, LocalStore), f"{self.folder} is not a local directory"
        return Path(self.folder.name)

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return self.info.num_documents

    @property
    def fingerprint(self) -> str:
        """Hash that identifies the corpus's content."""
        return self.info.fingerprint

    @cached_property
    def lengths(self) -> NDArray[np.uint32]:
        """Number of tokens in each document, including end tokens; uint32 [documents], read-only."""
        with self._reading(DOCUMENTS_FILE) as name:
            lengths = self._retry.call(name, self._read_lengths)
        lengths.setflags(write=False)
        return lengths

    def _read_lengths(self) -> NDArray[np.uint32]:
        info = self.info
        # Reading in batches takes four bytes per document; loading the complete column would take three times as much.
        lengths = np.empty(info.num_documents, dtype=np.uint32)
        longest = min(_MAX_LENGTH, max((shard.num_tokens for shard in info.shards), default=0))
        crc32, num_tokens, place = 0, 0, 0
        for batch in self._batches("length"):
            part: NDArray[np.int64] = batch.to_numpy()
            crc32 = zlib.crc32(part.astype("<i8", copy=False).tobytes(), crc32)
            num_tokens += int(part.sum())
            for found in (int(part.min(initial=1)), int(part.max(initial=1))):
                if not 1 <= found <= longest:
                    raise DamagedFileError(f"a document has {found} tokens, but its shards allow only 1 to {longest}")
            lengths[place : place + part.size] = part
            place += part.size
        if (place, num_tokens, crc32) != (info.num_documents, info.num_tokens, info.lengths_crc32):
            raise DamagedFileError("the document lengths do not match corpus.json")
        return lengths

    def _batches(self, column: str) -> Iterator[pa.Array]:
        with pq.ParquetFile(self.folder.for_arrow(DOCUMENTS_FILE), page_checksum_verification=True) as file:
            for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=[column], use_threads=False):
                yield batch.column(0)

    @cached_property
    def spans(self) -> LabelSpans | None:
        """Label spans of all documents, read on first use, or None if every token may be a label."""
        if self._span_table is None:
            return None
        with self._reading(SPANS_FILE):
            return self._span_table.all()

    @cached_property
    def labels(self) -> NDArray[np.int32]:
        """Index of each document's class in ``info.classes``; int32 [documents]. The documents must have classes."""
        assert self.info.classes

        def read() -> NDArray[np.int32]:
            found = np.concatenate([batch.to_numpy() for batch in self._batches("label")]).astype("<i4", copy=False)
            if zlib.crc32(found.tobytes()) != self.info.labels_crc32:
                raise DamagedFileError("the classes of the documents do not match corpus.json")
            return found

        with self._reading(DOCUMENTS_FILE) as name:
            return self._retry.call(name, read)

    @property
    def has_weights(self) -> bool:
        """Whether any token has a loss weight other than 1."""
        return self.info.spans is not None and self.info.spans.weights is not None

    def label_weights(self, document: int, first: int, last: int) -> NDArray[np.float32] | None:
        """Return the loss weight of each label among tokens ``[first, last)`` of a document, or None if all are 1.

        The weight is 0 where a token may not be a label. The label at input position ``j`` is token ``j + 1``. Only the
        row groups that contain the document's spans are read.
        """
        if self._span_table is None:
            return None
        with self._reading(SPANS_FILE):
            return self._span_table.weights(document, first, last)

    @cached_property
    def borders(self) -> NDArray[np.int64]:
        """Number of tokens of each pair's query, or chosen answer with its prompt; int64 [documents]."""
        assert self._span_table is not None and self.info.are_pairs
        with self._reading(SPANS_FILE):
            spans = self._span_table.all()
        return spans.stops[spans.offsets[:-1]]

    @property
    def text_lengths(self) -> NDArray[np.integer]:
        """Number of tokens of each text: a document, or the longer one of a pair; [documents]."""
        if not self.info.are_pairs:
            return self.lengths
        longer: NDArray[np.int64] = np.maximum(self.borders, self.lengths - self.borders)
        return longer

    def read(self, document: int, start: int, length: int) -> NDArray[np.integer]:
        """Return ``length`` tokens of a document, starting at token ``start``, in the shards' dtype."""
        return self._shards.read(self._first(document, start + length) + start, length)

    def _first(self, document: int, length: int) -> int:
        """Return a document's first token position; raise UserError if the document is shorter than ``length``."""
        first, size = self._index.read(2 * document, 2).tolist()
        if length > size or not self._shards.holds(first, size):
            name = self.folder.named(INDEX_FILE)
            raise unreadable(name, f"the entry for document {document} is wrong: {size} tokens at position {first}")
        return int(first)

    def fetch(self, ranges: Sequence[tuple[int, int, int]]) -> None:
        """Fetch token ranges ``(document, start, length)`` concurrently. Does nothing for a local corpus."""
        if isinstance(self.folder, LocalStore):
            return
        self._index.fetch((2 * document, 2) for document, _, _ in ranges)
        self._shards.fetch(
            (self._first(document, start + length) + start, length) for document, start, length in ranges
        )

    def source(self, document: int) -> DocumentSource:
        """Return the origin of a document. Only one row group is read."""
        with self._reading(DOCUMENTS_FILE):
            group, row = self._documents.group_of(document)
            table = self._documents.group(group)
            return DocumentSource(*(table.column(name)[row].as_py() for name in DocumentSource._fields))

    def digests(self) -> NDArray[np.uint64]:
        """Return one digest per document; equal content has equal digests in every corpus. uint64 [documents, 2]."""

        def read() -> NDArray[np.uint64]:
            found = np.empty((self.num_documents, 2), dtype=np.uint64)
            place = 0
            for batch in self._batches("content"):
                found[place : place + len(batch)] = digest_halves(batch)
                place += len(batch)
            return found

        with self._reading(DOCUMENTS_FILE) as name:
            return self._retry.call(name, read)

    def check_files(self) -> None:
        """Check every file's size and the index's and shards' stored block checksums, without reading blocks.

        Raises:
            UserError: A file is missing or truncated, or has been replaced. The error names the first such file.
        """
        self._check_sidecars()
        self._index.check()
        self._shards.check()

    def _check_sidecars(self) -> None:
        sidecars = [(DOCUMENTS_FILE, self.info.documents_bytes)]
        if self.info.spans is not None:
            sidecars.append((SPANS_FILE, self.info.spans.num_bytes))
        for key, num_bytes in sidecars:
            name = self.folder.named(key)
            try:
                found = self._retry.call(name, partial(self.folder.size, key))
            except OSError as error:
                raise unreadable(name, error.strerror) from error
            if found != num_bytes:
                raise unreadable(name, f"the file has {found} bytes, expected {num_bytes}")

    @cached_property
    def _documents(self) -> RowGroupReader:
        with self._reading(DOCUMENTS_FILE) as name:
            source = partial(self.folder.for_arrow, DOCUMENTS_FILE)
            found = RowGroupReader(name, source, DocumentSource._fields, self._retry, max_groups=2)
            schema = LABELED_SCHEMA if self.info.classes else DOCUMENT_SCHEMA
            found.refuse_other("documents", self.num_documents, schema, self.info.lengths_crc32)
            return found

    @cached_property
    def _span_table(self) -> _SpanTable | None:
        if self.info.spans is None:
            return None
        with self._reading(SPANS_FILE):
            return _SpanTable(self.folder, self.info.spans, self.num_documents, self._retry)

    @contextmanager
    def _reading(self, key: str) -> Iterator[str]:
        """Convert read errors, and the ValueError for inconsistent spans, into a UserError that names the file."""
        name = self.folder.named(key)
        try:
            yield name
        except UserError:
            raise
        except (*READ_ERRORS, ValueError) as error:
            raise unreadable(name, error) from error


class _SpanTable:
    """Reader of a corpus's label span table: one row per span, ordered by document, at least one span per document.

    Raises:
        DamagedFileError: The file does not match ``corpus.json``.
        READ_ERRORS: The file can't be read.
    """

    def __init__(self, folder: FileStore, info: SpansInfo, num_documents: int, retry: RetryPolicy) -> None:
        self._name = folder.named(SPANS_FILE)
        self._source = partial(folder.for_arrow, SPANS_FILE)
        self._info = info
        self._num_documents = num_documents
        self._retry = retry
        schema = SPANS_SCHEMA if info.weights is None else WEIGHTED_SPANS_SCHEMA
        self._columns = schema.names
        self._groups = RowGroupReader(self._name, self._source, self._columns, retry, check=self._check_group)
        self._groups.refuse_other("spans", info.num_spans, schema, info.content_crc32)
        self._groups_crc32 = self._groups.groups_crc32
        self._first_documents, self._last_documents = self._groups.bounds("document")

    def weights(self, document: int, first: int, last: int) -> NDArray[np.float32]:
        """Return the loss weight of each token ``[first, last)`` of a document; 0 outside the document's spans."""
        last = max(first, last)
        weights = np.zeros(last - first, dtype=np.float32)
        # The row groups that may contain the document's spans.
        begin = int(np.searchsorted(self._last_documents, document, side="left"))
        end = int(np.searchsorted(self._first_documents, document, side="right"))
        for number in range(begin, end):
            documents, *columns = _columns(self._groups.group(number), self._columns)
            rows = slice(*np.searchsorted(documents, [document, document + 1]))
            starts, stops, *of_spans = (column[rows] for column in columns)
            sizes = np.clip(stops, first, last) - np.clip(starts, first, last)
            mask = span_mask(starts, stops, first, last)
            weights[mask] = np.repeat(of_spans[0], sizes) if of_spans else 1
        return weights

    def _check_group(self, number: int, table: pa.Table) -> None:
        # Page checksums do not detect that the file was replaced after it was opened.
        if table_crc32(table) != self._groups_crc32[number]:
            raise DamagedFileError(f"row group {number} has changed since the file was opened")

    def all(self) -> LabelSpans:
        """Return the label spans of all documents; raise DamagedFileError if the spans do not match ``corpus.json``."""
        table = self._retry.call(self._name, lambda: pq.read_table(self._source(), page_checksum_verification=True))
        documents, starts, stops, *weights = _columns(table, self._columns)
        if spans_crc32((documents, starts, stops, *weights)) != self._info.content_crc32:
            raise DamagedFileError("the spans do not match corpus.json")
        is_within = documents.size == 0 or 0 <= documents[0] <= documents[-1] < self._num_documents
        if not is_within or (np.diff(documents) < 0).any():
            raise DamagedFileError("the spans are not ordered by document")
        offsets = np.zeros(self._num_documents + 1, dtype=np.int64)
        np.cumsum(np.bincount(documents, minlength=self._num_documents), out=offsets[1:])
        for values in (offsets, starts, stops):
            values.setflags(write=False)
        return LabelSpans(offsets=offsets, starts=starts, stops=stops)


def table_crc32(table: pa.Table) -> int:
    """Return the CRC-32 of a label span table."""
    return spans_crc32(_columns(table, table.column_names))


def spans_crc32(columns: Sequence[NDArray[Any]], crc32: int = 0) -> int:
    """Return the CRC-32 of label spans, hashed row by row as little-endian int64.

    Args:
        columns: Documents, starts and stops (int64), and optionally weights (fp32; the bit patterns are hashed).
        crc32: CRC-32 of the preceding rows.
    """
    columns = [column.view(np.int32) if column.dtype == np.float32 else column for column in columns]
    for first in range(0, columns[0].size, _BATCH_ROWS):
        rows = slice(first, first + _BATCH_ROWS)
        block = np.stack([column[rows] for column in columns], axis=1)
        crc32 = zlib.crc32(block.astype("<i8", copy=False).tobytes(), crc32)
    return crc32


def digest_halves(digests: pa.FixedSizeBinaryArray) -> NDArray[np.uint64]:
    """Convert 16-byte digests to uint64 [documents, 2]."""
    halves: NDArray[np.uint64] = np.frombuffer(digests.buffers()[1], dtype=np.uint64).reshape(-1, 2)
    return halves[digests.offset : digests.offset + len(digests)]


def _columns(table: pa.Table, names: Sequence[str]) -> list[NDArray[Any]]:
    if any(column.null_count for column in table.columns):
        raise DamagedFileError("a value is missing")
    return [table.column(name).to_numpy() for name in names]


def corpus_exists(location: Path | str, *, is_complete: bool = False) -> bool:
    """Return whether a file or folder exists at a corpus location, or whether it holds a complete corpus.

    Raises:
        UserError: The location can't be used.
        StorageAwayError: The storage did not respond in time.
    """
    folder = open_folder(location)
    try:
        return RETRY.call(folder, lambda: _has(folder, CORPUS_FILE) if is_complete else folder.exists())
    except OSError as error:
        raise unreadable(folder, error.strerror) from error


def _has(folder: FileStore, key: str) -> bool:
    try:
        folder.size(key)
    except FileNotFoundError:
        return False
    return True


def _read_info(folder: FileStore) -> CorpusInfo:
    if not folder.exists():
        raise UserError(f"data.path={folder}: does not exist; create it with `ray-ulysses prepare`")
    name = folder.named(CORPUS_FILE)
    try:
        fields = read_json(adapter(dict[str, Any]), folder.read_whole(CORPUS_FILE))
        if "format_version" not in fields:
            raise ContentError("format_version is missing")
        version = fields["format_version"]
        if version != FORMAT_VERSION:
            raise UserError(
                f"data.path={folder}: the corpus has format version {shown(version)}, but this version of ray-ulysses "
                f"reads version {FORMAT_VERSION}; prepare the corpus again in another directory"
            )
        return CorpusInfo.from_json(fields)
    except FileNotFoundError:
        problem = f"is not a prepared corpus (no {CORPUS_FILE}); create one with `ray-ulysses prepare`"
        if _has(folder, PREPARATION_FILE):
            problem = "the preparation is not finished; run the same `ray-ulysses prepare` again to continue it"
        raise UserError(f"data.path={folder}: {problem}") from None
    except (OSError, ContentError) as error:
        if is_transient(error):
            raise
        raise unreadable(name, error) from error


def unreadable(name: object, reason: object) -> UserError:
    """Return the error for a corpus file that can't be read."""
    return UserError(
        f"data.path: {name} can't be used ({reason}); restore the file, "
        "or prepare the corpus again in another directory"
    )


def read_shards(folder: FileStore, shards: Sequence[ShardInfo], dtype: np.dtype[Any], retry: RetryPolicy) -> FlatFiles:
    """Return a reader that exposes the tokens of all shards, in shard order, as one array."""

    def unreadable_shard(name: str, reason: object) -> UserError:
        return UserError(
            f"data.path: the shard {name} can't be read ({reason}); restore the file, "
            "or prepare the corpus again in another directory"
        )

    keys = [f"{SHARDS_DIRECTORY}/{shard.name}" for shard in shards]
    infos = [shard.tokens for shard in shards]
    # A row of short documents may need thousands of shards, and opening one in an object store takes two requests.
    max_open = MAX_OPEN_FILES if isinstance(folder, LocalStore) else MAX_OPEN_OBJECTS
    return FlatFiles(folder, keys, infos, dtype, unreadable=unreadable_shard, retry=retry, max_open=max_open)


def first_of_same_content(groups: Sequence[NDArray[np.uint64]]) -> list[NDArray[np.int64]]:
    """Return, for each document, the index of the first document with equal content, or -1 if none is earlier.

    Args:
        groups: Digests from `Corpus.digests`. Documents are numbered consecutively across the groups.
    """
    if not groups:
        return []
    bases = np.cumsum([0, *map(len, groups)])
    repeated = np.full(bases[-1], -1, dtype=np.int64)
    # Part by part, because there may be a billion documents. Documents with equal content are in the same part.
    parts = [group[:, 0].astype(np.uint8) % _NUM_PARTS for group in groups]
    for part in range(_NUM_PARTS):
        rows = [np.flatnonzero(of_group == part) for of_group in parts]
        documents = np.concatenate([base + found for base, found in zip(bases[:-1], rows, strict=True)])
        halves = np.concatenate([group[found] for group, found in zip(groups, rows, strict=True)])
        # Candidates share the first 8 bytes of a digest; nearly all of them are true repeats.
        heads = np.sort(halves[:, 0])
        is_candidate = np.isin(halves[:, 0], heads[1:][heads[1:] == heads[:-1]])
        documents, halves = documents[is_candidate], halves[is_candidate]
        order = np.lexsort((halves[:, 1], halves[:, 0]))
        documents, halves = documents[order], halves[order]
        is_first = np.ones(documents.size, dtype=np.bool_)
        is_first[1:] = (halves[1:] != halves[:-1]).any(axis=1)
        firsts = documents[np.maximum.accumulate(np.where(is_first, np.arange(documents.size), 0))]
        repeated[documents] = np.where(is_first, -1, firsts)
    return list(np.split(repeated, bases[1:-1]))


def refuse_repeats(corpora: Sequence[Corpus], num_known: int = 1, *, are_validation: bool = False) -> None:
    """Refuse corpora that repeat documents which a run trains on.

    Args:
        corpora: The corpora of a run, in order.
        num_known: Number of leading corpora that are not checked.
        are_validation: Whether the other corpora are for validation, and may share documents with each other.

    Raises:
        UserError: A corpus repeats documents, or can't be read. The error names both corpora and one document.
    """
    if len(corpora) <= num_known:
        return
    repeated = first_of_same_content([corpus.digests() for corpus in corpora])
    bases = np.cumsum([0, *(corpus.num_documents for corpus in corpora)])
    for number in range(num_known, len(corpora)):
        end = bases[num_known if are_validation else number]
        elsewhere = np.flatnonzero((repeated[number] >= 0) & (repeated[number] < end))
        if elsewhere.size:
            first = int(repeated[number][elsewhere[0]])
            other = corpora[int(np.searchsorted(bases, first, side="right")) - 1]
            source = corpora[number].source(int(elsewhere[0]))
            place = source.source + (f" at {source.offset}" if source.offset else "")
            path, before = corpora[number].folder, other.folder
            setting, others, why = "data.sources", "earlier corpora", "a run would train on them twice"
            if are_validation:
                setting, others, why = "data.validation", "training corpora", "its loss would not measure unseen text"
            raise UserError(
                f"{setting}: {path} repeats {elsewhere.size} documents of {others} (the first: {place}, "
                f"also in {before}), so {why}; prepare {path} again in another "
                f"directory with `--without {before}`, which omits them"
            )
