"""Reads the table of documents and the label spans of a corpus, one row group at a time."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ray_ulysses.data.corpus.flat_file import DamagedFileError
from ray_ulysses.data.corpus.format import (
    DOCUMENT_SCHEMA,
    DOCUMENTS_FILE,
    SPANS_FILE,
    SPANS_SCHEMA,
    WEIGHTED_SPANS_SCHEMA,
    CorpusInfo,
    SpansInfo,
)
from ray_ulysses.data.corpus.row_groups import RowGroupReader
from ray_ulysses.data.tokenize.spans import LabelSpans, span_mask
from ray_ulysses.storage.patience import Patience
from ray_ulysses.storage.place import FileStore

_CRC_ROWS = 1 << 18
_MAX_LENGTH = 2**32 - 1
_SOURCE_COLUMNS = ("source", "offset", "id")


class DocumentSource(NamedTuple):
    """The origin of a document.

    Attributes:
        source: File or data set.
        offset: Line or row in it, from 1; 0 for a whole file.
        id: The row's own id; empty if it has none.
    """

    source: str
    offset: int
    id: str


class DocumentTable:
    """One row per document; a row group is read when one of its documents is needed.

    Raises:
        DamagedFileError: The file is not the one that ``corpus.json`` describes.
        OSError: It can't be read, like the other ``READ_ERRORS``.
    """

    def __init__(self, folder: FileStore, info: CorpusInfo, patience: Patience) -> None:
        self._name = folder.named(DOCUMENTS_FILE)
        self._source = partial(folder.for_arrow, DOCUMENTS_FILE)
        self._info = info
        self._patience = patience
        self._sources = RowGroupReader(self._name, self._source, _SOURCE_COLUMNS, patience, max_groups=2)
        if self._sources.num_rows != info.num_documents:
            raise DamagedFileError(f"{self._sources.num_rows} documents where corpus.json says {info.num_documents}")
        self._sources.refuse_other(DOCUMENT_SCHEMA)
        _check_content(self._sources, info.lengths_crc32)

    def source(self, document: int) -> DocumentSource:
        """Return the origin of a document."""
        group, row = self._sources.group_of(document)
        table = self._sources.group(group)
        return DocumentSource(*(table.column(name)[row].as_py() for name in _SOURCE_COLUMNS))

    def digests(self) -> NDArray[np.uint64]:
        """Return the digest of each document's content; uint64 [documents, 2]."""
        found = np.empty((self._info.num_documents, 2), dtype=np.uint64)
        place = 0
        with pq.ParquetFile(self._source(), page_checksum_verification=True) as file:
            for batch in file.iter_batches(batch_size=_CRC_ROWS, columns=["content"], use_threads=False):
                part = digest_halves(batch.column(0))
                found[place : place + len(part)] = part
                place += len(part)
        return found

    def lengths(self) -> NDArray[np.uint32]:
        """Return the tokens of every document, read-only.

        Raises:
            DamagedFileError: They do not match corpus.json, or no shard holds a document of such a length.
        """
        lengths = self._patience.call(self._name, self._read_lengths)
        lengths.setflags(write=False)
        return lengths

    def _read_lengths(self) -> NDArray[np.uint32]:
        # Read in batches into four bytes per document; the whole column at once would take three times as much.
        lengths = np.empty(self._info.num_documents, dtype=np.uint32)
        longest = min(_MAX_LENGTH, max((shard.num_tokens for shard in self._info.shards), default=0))
        crc32, num_tokens, place = 0, 0, 0
        with pq.ParquetFile(self._source(), page_checksum_verification=True) as file:
            for batch in file.iter_batches(batch_size=_CRC_ROWS, columns=["length"], use_threads=False):
                part: NDArray[np.int64] = batch.column(0).to_numpy()
                crc32 = zlib.crc32(part.astype("<i8", copy=False).tobytes(), crc32)
                num_tokens += int(part.sum())
                for found in (int(part.min(initial=1)), int(part.max(initial=1))):
                    if not 1 <= found <= longest:
                        raise DamagedFileError(f"a document has {found} tokens; its shard allows 1 to {longest}")
                lengths[place : place + part.size] = part
                place += part.size
        info = self._info
        if (place, num_tokens, crc32) != (info.num_documents, info.num_tokens, info.lengths_crc32):
            raise DamagedFileError("its lengths do not add up to corpus.json")
        return lengths


class SpanTable:
    """One row per span, in the order of the documents, each of which has at least one.

    Raises:
        DamagedFileError: The file is not the one that ``corpus.json`` describes.
        OSError: It can't be read, like the other ``READ_ERRORS``.
    """

    def __init__(self, folder: FileStore, info: SpansInfo, num_documents: int, patience: Patience) -> None:
        self._name = folder.named(SPANS_FILE)
        self._source = partial(folder.for_arrow, SPANS_FILE)
        self._info = info
        self._num_documents = num_documents
        self._patience = patience
        self._columns = ("document", "start", "stop", *(() if info.weights is None else ("weight",)))
        self._groups = RowGroupReader(self._name, self._source, self._columns, patience, check=self._check_group)
        if self._groups.num_rows != info.num_spans:
            raise DamagedFileError(f"{self._groups.num_rows} spans where corpus.json says {info.num_spans}")
        self._groups.refuse_other(SPANS_SCHEMA if info.weights is None else WEIGHTED_SPANS_SCHEMA)
        _check_content(self._groups, info.content_crc32)
        self._groups_crc32 = self._groups.groups_crc32
        self._first_documents, self._last_documents = self._groups.bounds("document")

    def mask(self, document: int, first: int, last: int) -> NDArray[np.bool_]:
        """Return for each token ``[first, last)`` of a document whether it may be a label; bool [last - first]."""
        mask = np.zeros(max(0, last - first), dtype=np.bool_)
        for starts, stops, *_ in self._spans_of(document):
            mask |= span_mask(starts, stops, first, last)
        return mask

    def weights(self, document: int, first: int, last: int) -> NDArray[np.float32]:
        """Return the loss weight of each token ``[first, last)`` of a document, 1 outside its spans."""
        weights = np.ones(max(0, last - first), dtype=np.float32)
        for starts, stops, of_spans in self._spans_of(document):
            low, high = (np.clip(places, first, max(first, last)) - first for places in (starts, stops))
            for start, stop, weight in zip(low.tolist(), high.tolist(), of_spans.tolist(), strict=True):
                weights[start:stop] = weight
        return weights

    def _spans_of(self, document: int) -> Iterator[list[NDArray[Any]]]:
        """Yield the columns of a document's spans but the first, which may continue in the next row group."""
        begin = int(np.searchsorted(self._last_documents, document, side="left"))
        end = int(np.searchsorted(self._first_documents, document, side="right"))
        for number in range(begin, end):
            documents, *columns = _columns(self._groups.group(number), self._columns)
            rows = slice(*np.searchsorted(documents, [document, document + 1]))
            yield [column[rows] for column in columns]

    def _check_group(self, number: int, table: pa.Table) -> None:
        # A page's own checksum says nothing of a file that was replaced since it was opened.
        if table_crc32(table) != self._groups_crc32[number]:
            raise DamagedFileError(f"row group {number} holds other spans than when it was opened")

    def all(self) -> LabelSpans:
        """Return the spans of every document; raises DamagedFileError if they do not match corpus.json."""
        table = self._patience.call(self._name, lambda: pq.read_table(self._source(), page_checksum_verification=True))
        documents, starts, stops, *weights = _columns(table, self._columns)
        crc32 = 0
        if documents.size == self._info.num_spans:
            crc32 = spans_crc32((documents, starts, stops, *weights))
        if crc32 != self._info.content_crc32:
            raise DamagedFileError("its spans are not those of corpus.json")
        is_within = documents.size == 0 or 0 <= documents[0] <= documents[-1] < self._num_documents
        if not is_within or (np.diff(documents) < 0).any():
            raise DamagedFileError("its spans are not in the order of the documents")
        offsets = np.zeros(self._num_documents + 1, dtype=np.int64)
        np.cumsum(np.bincount(documents, minlength=self._num_documents), out=offsets[1:])
        for values in (offsets, starts, stops):
            values.setflags(write=False)
        return LabelSpans(offsets=offsets, starts=starts, stops=stops)


def table_crc32(table: pa.Table) -> int:
    """Return the CRC-32 of a table of spans."""
    return spans_crc32(_columns(table, table.column_names))


def spans_crc32(columns: Sequence[NDArray[Any]], crc32: int = 0) -> int:
    """Return the CRC-32 of spans as rows of little-endian int64; ``crc32`` is that of the rows before.

    Args:
        columns: Documents, starts and stops, int64, and weights, fp32, if there are any: they count by their bits.
        crc32: The checksum to continue.
    """
    columns = [column.view(np.int32) if column.dtype == np.float32 else column for column in columns]
    for first in range(0, columns[0].size, _CRC_ROWS):
        rows = slice(first, first + _CRC_ROWS)
        block = np.stack([column[rows] for column in columns], axis=1)
        crc32 = zlib.crc32(block.astype("<i8", copy=False).tobytes(), crc32)
    return crc32


def digest_halves(digests: pa.FixedSizeBinaryArray) -> NDArray[np.uint64]:
    """Return digests of 16 bytes as uint64 [documents, 2]."""
    halves: NDArray[np.uint64] = np.frombuffer(digests.buffers()[1], dtype=np.uint64).reshape(-1, 2)
    return halves[digests.offset : digests.offset + len(digests)]


def _check_content(reader: RowGroupReader, crc32: int) -> None:
    if reader.content_crc32 != crc32:
        raise DamagedFileError("it was replaced by another file of the same size")


def _columns(table: pa.Table, names: Sequence[str]) -> list[NDArray[Any]]:
    if any(column.null_count for column in table.columns):
        raise DamagedFileError("a value is missing")
    return [table.column(name).to_numpy() for name in names]
