"""Rows on disk: two Parquet files from which any row is read in about a millisecond.

``rows`` holds the token counts of each row in training order; ``pieces`` holds the pieces, row after row in the order
in which rows closed. Both have row groups of 65,536 entries, so the group of an entry is known without an index. Each
group that is read is compared with its checksum in ``plan.json``.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import pyarrow as pa

from ray_ulysses.data.corpus.row_groups import GROUP_ROWS, RowGroupReader, RowGroupWriter
from ray_ulysses.data.plan.columns import Columns
from ray_ulysses.data.plan.packing import Pieces
from ray_ulysses.data.plan.row_checksums import is_group
from ray_ulysses.data.plan.rows import Rows, RowStats
from ray_ulysses.errors import UserError
from ray_ulysses.logging import get_logger
from ray_ulysses.storage.patience import PATIENCE, READ_ERRORS, Patience
from ray_ulysses.storage.place import Place
from ray_ulysses.storage.regular import open_regular
from ray_ulysses.validation import KNOWN_FIELDS_ONLY, Whole

Table = TypeVar("Table", bound=Columns)
_MOSTLY_EQUAL = ("start", "has_next")
_TAIL_BYTES = 8
log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class FileFacts:
    """A file's entry in ``plan.json``.

    Attributes:
        num_bytes: Size of the file.
        footer_crc32: CRC-32 of its footer, which locates everything else in the file.
        checksums: Checksums of its groups.
    """

    __pydantic_config__ = KNOWN_FIELDS_ONLY

    num_bytes: Whole
    footer_crc32: Whole
    checksums: str


class ColumnsWriter:
    """Writes entries as they come."""

    def __init__(self, path: Path, kind: type[Columns]) -> None:
        self._schema = _schema(kind)
        # Numbers in random order hardly shrink, and compressing them would take as long as planning.
        compression = {name: "lz4" if name in _MOSTLY_EQUAL else "none" for name in self._schema.names}
        self._writer = RowGroupWriter(path, self._schema, compression=compression, use_dictionary=False)

    def add(self, entries: Columns) -> None:
        """Append entries."""
        columns = [pa.array(column) for column in entries.stored()]
        self._writer.add(pa.Table.from_arrays(columns, schema=self._schema))

    def close(self, checksums: str) -> None:
        """Write what is pending, and the footer, which differs whenever the checksums differ."""
        self._writer.close(zlib.crc32(checksums.encode()))


def write_stats(path: Path, rows: Rows, checksums: str) -> None:
    """Write the token counts of rows, in training order."""
    writer = ColumnsWriter(path, RowStats)
    for first in range(0, rows.num_rows, GROUP_ROWS):
        writer.add(rows.stats(first, first + GROUP_ROWS))
    writer.close(checksums)


class FileRows(Rows):
    """Rows that are read from their files on demand; the row groups used last are cached."""

    def __init__(
        self,
        rows_path: Path,
        pieces_path: Path,
        rows: FileFacts,
        pieces: FileFacts,
        patience: Patience = PATIENCE,
        renew: Callable[[], object] | None = None,
    ) -> None:
        """Open both files and read their footers only.

        Args:
            rows_path: The file of rows.
            pieces_path: The file of pieces.
            rows: What the first is.
            pieces: What the second is.
            patience: How long to wait for a storage that does not answer.
            renew: Copies the files anew to where they are, if they are copies.

        Raises:
            UserError: A file is missing, or is not the one that the facts describe.
        """
        self._rows = _GroupFile(rows_path, rows, RowStats, patience, renew)
        self._pieces = _GroupFile(pieces_path, pieces, Pieces, patience, renew)

    @property
    def num_rows(self) -> int:
        """Return the number of rows."""
        return self._rows.size

    def stats(self, first: int, stop: int) -> RowStats:
        """Return the token counts of the rows ``[first, stop)``; UserError if the file can't be read."""
        return self._rows.read(first, stop)

    def closed_pieces(self, first: int, stop: int) -> Pieces:
        """Return the pieces ``[first, stop)`` in the order of the file; UserError if it can't be read."""
        return self._pieces.read(first, stop)


class _GroupFile(Generic[Table]):
    """A file of entries, each group of which is checked when it is read."""

    def __init__(
        self,
        path: Path,
        facts: FileFacts,
        kind: type[Table],
        patience: Patience,
        renew: Callable[[], object] | None,
    ) -> None:
        self._path = path
        self._renew = renew
        self._checksums = facts.checksums
        self._kind = kind
        self._schema = _schema(kind)
        try:
            patience.call(path, lambda: check_file(path, facts))
            self._reader = RowGroupReader(path, lambda: path, self._schema.names, patience, check=self._check)
        except READ_ERRORS as error:
            raise unreadable_plan(path, error) from error
        self.size = self._reader.num_rows

    def _check(self, number: int, table: pa.Table) -> None:
        is_whole = table.schema.equals(self._schema) and not any(column.null_count for column in table.columns)
        if not is_whole or not is_group(number, [column.to_numpy() for column in table.columns], self._checksums):
            raise OSError(f"row group {number} is not what was planned")

    def read(self, first: int, stop: int) -> Table:
        """Return the entries ``[first, stop)``, of which those past the end are left out."""
        parts: list[Table] = []
        stop = min(stop, self.size)
        try:
            while first < stop:
                number, at = self._reader.group_of(first)
                columns = [column.to_numpy() for column in self._group(number).columns]
                parts.append(self._kind.make(columns).take(slice(at, at + stop - first)))
                first += parts[-1].size
        except READ_ERRORS as error:
            raise unreadable_plan(self._path, error) from error
        return self._kind.join(parts)

    def _group(self, number: int) -> pa.Table:
        try:
            return self._reader.group(number)
        except READ_ERRORS as error:
            if self._renew is None:
                raise
            log.warning("%s: this node's copy is made anew (%s)", self._path, error)
        self._renew()
        try:
            return self._reader.group(number)
        except READ_ERRORS as error:
            raise OSError(f"{error}, also after it was copied anew") from error


def file_facts(path: Path, checksums: str) -> FileFacts:
    """Return the entry in ``plan.json`` of a file that was written."""
    return FileFacts(num_bytes=path.stat().st_size, footer_crc32=_footer_crc32(path), checksums=checksums)


def check_file(path: Path, facts: FileFacts) -> None:
    """Refuse a file that is not the one that was written; reads its footer only.

    Raises:
        OSError: It is another file, or can't be read.
    """
    with open_regular(path, path.parents[2]) as file:
        found = os.fstat(file.fileno()).st_size
    if found != facts.num_bytes:
        raise OSError(f"{found} bytes where {facts.num_bytes} were written")
    if _footer_crc32(path) != facts.footer_crc32:
        raise OSError("its footer is not the one that was written")


class UnreadablePlanError(UserError):
    """A file of a plan can't be read."""


def unreadable_plan(path: Place, reason: object) -> UnreadablePlanError:
    """Return the error for a plan's file that can't be read."""
    return UnreadablePlanError(
        f"{path}: the plan can't be read ({reason}); restore the file, or start a new run under another run.name"
    )


def _footer_crc32(path: Path) -> int:
    """Return the CRC-32 of a Parquet file's footer, its length and the format's magic number."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL_BYTES))
        length = int.from_bytes(file.read(4), "little")
        file.seek(max(0, size - _TAIL_BYTES - length))
        return zlib.crc32(file.read())


def _schema(kind: type[Columns]) -> pa.Schema:
    types = ((name, pa.from_numpy_dtype(kind.STORED[name])) for name in kind.STORED.names or ())
    return pa.schema([pa.field(name, type_, nullable=False) for name, type_ in types])
