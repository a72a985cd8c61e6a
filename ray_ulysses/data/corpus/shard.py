"""Shards: token chunks in Parquet, written as a stream and read in random order."""

from __future__ import annotations

import threading
import zlib
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ray_ulysses.data.corpus.format import CHUNK_TOKENS, ShardInfo, shard_footer, shard_schema
from ray_ulysses.errors import UserError
from ray_ulysses.storage.atomic import file_crc32
from ray_ulysses.storage.patience import PATIENCE, READ_ERRORS, Patience


class ShardWriter:
    """Appends documents to one Parquet file, holding one row group in memory."""

    def __init__(self, path: Path, dtype: np.dtype[Any], chunk_tokens: int = CHUNK_TOKENS) -> None:
        self._dtype = dtype
        self._chunk_tokens = chunk_tokens
        self._schema = shard_schema(dtype)
        # Dictionaries only cost time on tokens; with page checksums a reader notices a flipped bit.
        self._writer = pq.ParquetWriter(
            path, self._schema, compression="zstd", use_dictionary=False, write_page_checksum=True
        )
        self._chunks: list[NDArray[Any]] = []
        self._owners: list[int] = []
        self._pending_tokens = 0
        self._tokens_crc32 = 0
        self._rows_crc32 = 0
        self.num_rows = 0
        self.num_documents = 0
        self.num_tokens = 0

    def add(self, ids: NDArray[np.integer[Any]]) -> int:
        """Append one document and return its first row."""
        tokens = ids.astype(self._dtype)
        self._tokens_crc32 = zlib.crc32(tokens.astype(tokens.dtype.newbyteorder("<")).tobytes(), self._tokens_crc32)
        self._rows_crc32 = zlib.crc32(np.array([tokens.size], dtype="<i8").tobytes(), self._rows_crc32)
        first_row = self.num_rows
        for start in range(0, tokens.size, self._chunk_tokens):
            chunk = tokens[start : start + self._chunk_tokens]
            if self._pending_tokens + chunk.size > self._chunk_tokens:
                self._flush()
            self._chunks.append(chunk)
            self._owners.append(self.num_documents)
            self._pending_tokens += chunk.size
            self.num_rows += 1
        self.num_documents += 1
        self.num_tokens += tokens.size
        return first_row

    def close(self) -> None:
        """Write what is pending and the footer with the checksums of the content."""
        self._flush()
        self._writer.add_key_value_metadata(shard_footer(self._tokens_crc32, self._rows_crc32))
        self._writer.close()

    def abandon(self) -> None:
        """Close the file without writing what is pending; errors are ignored, since the file is discarded."""
        with suppress(*READ_ERRORS):
            self._writer.close()

    def info(self, path: Path) -> ShardInfo:
        """Describe the closed file, which may have been renamed to ``path``."""
        return ShardInfo(
            name=path.name,
            num_rows=self.num_rows,
            num_documents=self.num_documents,
            num_tokens=self.num_tokens,
            num_bytes=path.stat().st_size,
            crc32=file_crc32(path),
            tokens_crc32=self._tokens_crc32,
            rows_crc32=self._rows_crc32,
        )

    def _flush(self) -> None:
        if not self._chunks:
            return
        offsets = np.cumsum([0, *(chunk.size for chunk in self._chunks)], dtype=np.int32)
        tokens = pa.ListArray.from_arrays(
            pa.array(offsets), pa.array(np.concatenate(self._chunks)), type=self._schema.field("tokens").type
        )
        table = pa.Table.from_arrays([pa.array(self._owners, pa.int64()), tokens], schema=self._schema)
        self._writer.write_table(table, row_group_size=table.num_rows)
        self._chunks.clear()
        self._owners.clear()
        self._pending_tokens = 0


class _OpenShard:
    """An open shard and the first row of each of its row groups."""

    def __init__(self, path: Path, info: ShardInfo, dtype: np.dtype[Any]) -> None:
        self.file = pq.ParquetFile(path, page_checksum_verification=True)
        metadata = self.file.metadata
        try:
            _check_footer(metadata, path, info, dtype)
        except UserError:
            self.file.close()
            raise
        sizes = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        self.group_starts = np.cumsum([0, *sizes], dtype=np.int64)

    def rows(self, first: int, last: int) -> pa.ListArray:
        """Return the chunk rows ``[first, last)``."""
        groups = np.searchsorted(self.group_starts, [first, last - 1], side="right") - 1
        table = self.file.read_row_groups(list(range(groups[0], groups[1] + 1)), columns=["tokens"], use_threads=False)
        column = table.column(0).slice(first - int(self.group_starts[groups[0]]), last - first)
        return column.combine_chunks()


class ShardReader:
    """Reads parts of documents from the shards of one directory, keeping a few files open."""

    def __init__(
        self,
        directory: Path,
        dtype: np.dtype[Any],
        *,
        patience: Patience = PATIENCE,
        max_open: int = 32,
        chunk_tokens: int = CHUNK_TOKENS,
    ) -> None:
        self._directory = directory
        self._dtype = dtype
        self._patience = patience
        self._max_open = max_open
        self._chunk_tokens = chunk_tokens
        self._open: OrderedDict[str, _OpenShard] = OrderedDict()
        # A Parquet file has one position, and the prefetch thread and the evaluation may read concurrently.
        self._lock = threading.Lock()

    def read(self, shard: ShardInfo, first_row: int, start: int, length: int) -> NDArray[np.int64]:
        """Return ``length`` tokens from ``start`` on, of the document whose first chunk is ``first_row``.

        Raises:
            UserError: The file is missing, truncated, not the one that was prepared, or fails a page's checksum.
            StorageAwayError: The storage did not answer in time.
        """
        if length == 0:
            return np.empty(0, dtype=np.int64)
        path = self._directory / shard.name
        skipped, inside = divmod(start, self._chunk_tokens)
        num_rows = -(-(inside + length) // self._chunk_tokens)
        first = first_row + skipped
        try:
            rows = self._patience.call(path, lambda: self._rows(shard, first, first + num_rows))
            tokens = rows.flatten().to_numpy(zero_copy_only=False)
        except (*READ_ERRORS, IndexError) as error:
            raise unreadable_shard(path, error) from error
        piece: NDArray[np.int64] = tokens[inside : inside + length].astype(np.int64)
        if piece.size != length:
            raise unreadable_shard(path, f"holds {piece.size} of {length} tokens at row {first}")
        return piece

    def _rows(self, shard: ShardInfo, first: int, last: int) -> pa.ListArray:
        """Read once; after a failure the file is closed, since a stale handle stays stale."""
        with self._lock:
            try:
                return self._shard(shard).rows(first, last)
            except READ_ERRORS:
                self._open.pop(shard.name, None)
                raise

    def _shard(self, info: ShardInfo) -> _OpenShard:
        opened = self._open.pop(info.name, None)
        if opened is None:
            opened = _OpenShard(self._directory / info.name, info, self._dtype)
        self._open[info.name] = opened
        if len(self._open) > self._max_open:
            _, oldest = self._open.popitem(last=False)
            oldest.file.close()
        return opened


def check_shard(path: Path, info: ShardInfo, dtype: np.dtype[Any]) -> None:
    """Read a shard's footer and compare it with what ``corpus.json`` says.

    Raises:
        UserError: It is not the file that was prepared.
        OSError: It can't be read, like the other ``READ_ERRORS``.
    """
    _check_footer(pq.read_metadata(path), path, info, dtype)


def _check_footer(metadata: pq.FileMetaData, path: Path, info: ShardInfo, dtype: np.dtype[Any]) -> None:
    if metadata.num_rows != info.num_rows:
        raise unreadable_shard(path, f"{metadata.num_rows} rows where corpus.json says {info.num_rows}")
    schema = metadata.schema.to_arrow_schema()
    expected = shard_schema(dtype)
    if not schema.equals(expected):
        found = schema.field("tokens").type if "tokens" in schema.names else f"no tokens, but {', '.join(schema.names)}"
        raise unreadable_shard(path, f"it holds {found} where corpus.json says tokens of {dtype.name}")
    notes = {key.decode(): value.decode("utf-8", "replace") for key, value in (metadata.metadata or {}).items()}
    if any(notes.get(key) != value for key, value in info.footer.items()):
        raise unreadable_shard(path, "it was replaced by another shard of the same size")


def unreadable_shard(path: Path, reason: object) -> UserError:
    """Return the error for a shard that can't be read."""
    return UserError(
        f"data.path: the shard {path} can't be read ({reason}); restore the file, "
        "or prepare the corpus again into another directory"
    )
