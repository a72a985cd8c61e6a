"""Reads large Parquet files one row group at a time, and writes them with row groups of equal size."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ray_ulysses.data.corpus.flat_file import DamagedFileError
from ray_ulysses.storage.retry import RetryPolicy
from ray_ulysses.storage.store import StoredFile

GROUP_ROWS = 65_536
_CONTENT_KEY = "ray_ulysses.content_crc32"
_GROUPS_KEY = "ray_ulysses.groups_crc32"


class RowGroupReader:
    """Reads selected columns of a Parquet file by row group, and caches the most recently used row groups.

    ``source`` is called for every read and returns a path or an open file. ``check`` is called with the number and the
    content of every group that is read; it raises OSError if the group is damaged. When ``retry`` is exhausted, read
    errors (``READ_ERRORS``) propagate unchanged.
    """

    def __init__(
        self,
        name: object,
        source: Callable[[], Path | StoredFile],
        columns: Sequence[str],
        retry: RetryPolicy,
        max_groups: int = 32,
        check: Callable[[int, pa.Table], None] | None = None,
    ) -> None:
        self._check, self._source, self._columns = check, source, list(columns)
        self.group: Callable[[int], pa.Table] = functools.lru_cache(max_groups)(
            lambda number: retry.call(name, lambda: self._read(number))
        )
        """Returns a row group; thread-safe, since the prefetch thread and the evaluation may read concurrently."""
        self._metadata = retry.call(name, lambda: pq.read_metadata(source()))
        sizes = [self._metadata.row_group(group).num_rows for group in range(self._metadata.num_row_groups)]
        self._starts = np.cumsum([0, *sizes], dtype=np.int64)
        self.num_rows = int(self._starts[-1])

    @property
    def groups_crc32(self) -> list[int]:
        """Row group checksums from the footer. Raises OSError if the footer contains no checksums."""
        found = [int(noted, 16) for noted in (self._metadata.metadata or {}).get(_GROUPS_KEY.encode(), b"").split()]
        if len(found) != self._metadata.num_row_groups:
            raise OSError("the footer lacks the row group checksums")
        return found

    def refuse_other(self, what: str, num_rows: int, schema: pa.Schema, content_crc32: int) -> None:
        """Raise DamagedFileError unless ``prepare`` wrote this file. ``what`` describes the rows in the error."""
        if self.num_rows != num_rows:
            raise DamagedFileError(f"the file has {self.num_rows} {what}, expected {num_rows}")
        own = self._metadata.schema.to_arrow_schema()
        if [(field.name, field.type) for field in own] != [(field.name, field.type) for field in schema]:
            raise DamagedFileError("the columns do not match the corpus format")
        noted = (self._metadata.metadata or {}).get(_CONTENT_KEY.encode())
        if noted is None or int(noted, 16) != content_crc32:
            raise DamagedFileError("the file was replaced by another file of the same size")

    def group_of(self, row: int) -> tuple[int, int]:
        """Return the index of the group that contains a row, and the row's index within the group."""
        assert 0 <= row < self.num_rows, (row, self.num_rows)
        group = int(np.searchsorted(self._starts, row, side="right")) - 1
        return group, row - int(self._starts[group])

    def bounds(self, column: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the minimum and the maximum of an integer column in each row group, from the footer.

        Raises:
            OSError: The footer lacks column statistics.
        """
        index = self._metadata.schema.to_arrow_schema().get_field_index(column)
        groups = map(self._metadata.row_group, range(self._metadata.num_row_groups))
        found = [group.column(index).statistics for group in groups]
        if not all(statistics is not None and statistics.has_min_max for statistics in found):
            raise OSError("the footer lacks the minimum and maximum values of row groups")
        lowest = np.asarray([statistics.min for statistics in found], dtype=np.int64)
        return lowest, np.asarray([statistics.max for statistics in found], dtype=np.int64)

    def _read(self, number: int) -> pa.Table:
        # Reopened for every read, since a handle can go stale; with the footer in memory, this costs one system call.
        with pq.ParquetFile(self._source(), metadata=self._metadata, page_checksum_verification=True) as file:
            table = file.read_row_group(number, columns=self._columns, use_threads=False).combine_chunks()
        if self._check is not None:
            self._check(number, table)
        return table


class RowGroupWriter:
    """Writes tables of any size as row groups of ``GROUP_ROWS`` rows, buffering about one group in memory.

    The footer stores the ``checksum`` of each row group, if given, and statistics of the columns in ``statistics``.
    """

    def __init__(
        self,
        path: Path,
        schema: pa.Schema,
        *,
        checksum: Callable[[pa.Table], int] | None = None,
        statistics: Sequence[str] = (),
        compression: str | dict[str, str] = "zstd",
        use_dictionary: bool = True,
    ) -> None:
        self._schema = schema
        self._pending: list[pa.Table] = []
        self._num_pending = 0
        self._checksum = checksum
        self._groups_crc32: list[int] = []
        self._writer = pq.ParquetWriter(
            path,
            schema,
            compression=compression,
            use_dictionary=use_dictionary,
            write_page_checksum=True,
            write_statistics=list(statistics) or False,
        )

    def add(self, table: pa.Table) -> None:
        """Append the rows of a table that contains at least the schema's columns."""
        self._pending.append(table.select(self._schema.names).cast(self._schema))
        self._num_pending += table.num_rows
        if self._num_pending >= GROUP_ROWS:
            rows = pa.concat_tables(self._pending)
            whole = rows.num_rows // GROUP_ROWS * GROUP_ROWS
            self._write(rows.slice(0, whole))
            self._pending = [rows.slice(whole)]
            self._num_pending = rows.num_rows - whole

    def close(self, content_crc32: int) -> None:
        """Write the buffered rows and the footer, which includes the content checksum."""
        if self._num_pending:
            self._write(pa.concat_tables(self._pending))
        if self._checksum is not None:
            self._writer.add_key_value_metadata({_GROUPS_KEY: " ".join(f"{one:08x}" for one in self._groups_crc32)})
        self._writer.add_key_value_metadata({_CONTENT_KEY: f"{content_crc32:08x}"})
        self._writer.close()

    def _write(self, rows: pa.Table) -> None:
        self._writer.write_table(rows, row_group_size=GROUP_ROWS)
        if self._checksum is not None:
            groups = (rows.slice(first, GROUP_ROWS) for first in range(0, rows.num_rows, GROUP_ROWS))
            self._groups_crc32 += map(self._checksum, groups)
