"""Rows on disk: two Parquet files, of which any row is read in about a millisecond.

``rows`` holds what each row weighs, in the order of training; ``pieces`` holds the pieces, row after row in the order
in which rows closed. Both have row groups of 65,536 entries, so that the group of an entry is known without an index;
each group that is read is held against its checksum in ``plan.json``.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import pyarrow as pa

from ray_ulysses.data.corpus.row_groups import GROUP_ROWS, RowGroupReader, RowGroupWriter
from ray_ulysses.data.plan.packing import NO_PIECES, Pieces
from ray_ulysses.data.plan.row_checksums import is_group, piece_columns, weight_columns
from ray_ulysses.data.plan.rows import NO_ROWS, Piece, Rows, RowWeights, piece_tuple
from ray_ulysses.errors import UserError
from ray_ulysses.storage.patience import PATIENCE, READ_ERRORS, Patience

Value = TypeVar("Value")
PIECE_SCHEMA = pa.schema(
    [
        pa.field("document", pa.uint32(), nullable=False),
        pa.field("start", pa.int64(), nullable=False),
        pa.field("length", pa.int32(), nullable=False),
        pa.field("has_next", pa.bool_(), nullable=False),
    ]
)
ROW_SCHEMA = pa.schema(
    [
        pa.field("first_piece", pa.int64(), nullable=False),
        pa.field("num_pieces", pa.int32(), nullable=False),
        pa.field("document_tokens", pa.int32(), nullable=False),
        pa.field("supervised", pa.int32(), nullable=False),
        pa.field("sum_squares", pa.int64(), nullable=False),
    ]
)
_MOSTLY_EQUAL = ("start", "has_next")
_TAIL_BYTES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class FileFacts:
    """What ``plan.json`` says of a file.

    Attributes:
        num_bytes: Its size.
        footer_crc32: CRC-32 of its footer, by which everything else of it is found.
        checksums: Checksums of its groups.
    """

    num_bytes: int
    footer_crc32: int
    checksums: str


class PieceWriter:
    """Writes pieces as they come; a sink of the planner."""

    def __init__(self, path: Path) -> None:
        self._writer = _writer(path, PIECE_SCHEMA)

    def add(self, pieces: Pieces) -> None:
        """Take the next pieces."""
        columns = [pa.array(column) for column in piece_columns(pieces)]
        self._writer.add(pa.Table.from_arrays(columns, schema=PIECE_SCHEMA))

    def close(self, checksums: str) -> None:
        """Write what is pending, and the footer, which is another one where the checksums are others."""
        self._writer.close(zlib.crc32(checksums.encode()))


def write_weights(path: Path, rows: Rows, checksums: str) -> None:
    """Write what rows weigh, in the order of training."""
    writer = _writer(path, ROW_SCHEMA)
    for first in range(0, rows.num_rows, GROUP_ROWS):
        part = rows.weights(first, first + GROUP_ROWS)
        columns = [pa.array(column) for column in weight_columns(part)]
        writer.add(pa.Table.from_arrays(columns, schema=ROW_SCHEMA))
    writer.close(zlib.crc32(checksums.encode()))


class FileRows:
    """Rows that are read from their files when they are asked for; a few row groups are kept."""

    def __init__(
        self,
        rows_path: Path,
        pieces_path: Path,
        rows: FileFacts,
        pieces: FileFacts,
        patience: Patience = PATIENCE,
    ) -> None:
        """Open both files; reads their footers alone.

        Raises:
            UserError: A file is missing, or is not the one that the facts describe.
        """
        self._rows = _GroupFile(rows_path, rows, ROW_SCHEMA, _weights_of, patience)
        self._pieces = _GroupFile(pieces_path, pieces, PIECE_SCHEMA, _pieces_of, patience)

    @property
    def num_rows(self) -> int:
        """Return how many there are."""
        return self._rows.size

    @property
    def num_pieces(self) -> int:
        """Return the pieces of all rows."""
        return self._pieces.size

    def weights(self, first: int, stop: int) -> RowWeights:
        """Return the weights of the rows ``[first, stop)``.

        Raises:
            UserError: The file can't be read.
        """
        parts = [
            group.take(slice(max(first - begin, 0), stop - begin)) for begin, group in self._rows.groups(first, stop)
        ]
        return RowWeights.join(parts)

    def pieces(self, row: int) -> tuple[Piece, ...]:
        """Return the pieces of a row in their order.

        Raises:
            UserError: The file can't be read.
        """
        weights = self.weights(row, row + 1)
        first, count = int(weights.first_piece[0]), int(weights.num_pieces[0])
        found: tuple[Piece, ...] = ()
        for begin, group in self._pieces.groups(first, first + count):
            low, high = max(first - begin, 0), min(first + count - begin, group.size)
            found += piece_tuple(group, low, high - low)
        return found

    def all_pieces(self, first: int, stop: int) -> Pieces:
        """Return the pieces ``[first, stop)`` in the order of the file."""
        joined = NO_PIECES
        for begin, group in self._pieces.groups(first, stop):
            joined = Pieces.join(joined, group.take(slice(max(first - begin, 0), stop - begin)))
        return joined


class _GroupFile(Generic[Value]):
    """One file of a plan, read by row groups of one size."""

    def __init__(
        self, path: Path, facts: FileFacts, schema: pa.Schema, convert: Callable[[pa.Table], Value], patience: Patience
    ) -> None:
        self._path = path
        self._facts = facts
        self._schema = schema
        self._convert = convert
        try:
            patience.call(path, lambda: check_file(path, facts))
            self._reader = RowGroupReader(path, schema.names, patience, check=self._check)
        except READ_ERRORS as error:
            raise unreadable_plan(path, error) from error
        self.size = self._reader.num_rows

    def _check(self, number: int, table: pa.Table) -> None:
        check_group(number, table, self._schema, self._facts.checksums)

    def groups(self, first: int, stop: int) -> list[tuple[int, Value]]:
        """Return the groups that hold the entries ``[first, stop)``, each with the number of its first entry."""
        if first >= stop:
            return []
        try:
            return [
                (int(self._reader.group_starts[number]), self._convert(self._reader.group(number)))
                for number in range(self._reader.group_of(first)[0], self._reader.group_of(stop - 1)[0] + 1)
            ]
        except READ_ERRORS as error:
            raise unreadable_plan(self._path, error) from error


def file_facts(path: Path, checksums: str) -> FileFacts:
    """Return what ``plan.json`` is to say of a file that was written."""
    return FileFacts(num_bytes=path.stat().st_size, footer_crc32=_footer_crc32(path), checksums=checksums)


def check_file(path: Path, facts: FileFacts) -> None:
    """Refuse a file that is not the one that was written; reads its footer alone.

    Raises:
        OSError: It is another one, or can't be read.
    """
    if (found := path.stat().st_size) != facts.num_bytes:
        raise OSError(f"{found} bytes where {facts.num_bytes} were written")
    if _footer_crc32(path) != facts.footer_crc32:
        raise OSError("its footer is not the one that was written")


def check_group(number: int, table: pa.Table, schema: pa.Schema, checksums: str) -> None:
    """Refuse a row group that does not hold what was planned.

    Raises:
        OSError: It holds something else.
    """
    is_whole = table.schema.equals(schema) and not any(column.null_count for column in table.columns)
    if not is_whole or not is_group(number, list(_columns(table).values()), checksums):
        raise OSError(f"row group {number} is not what was planned")


def _footer_crc32(path: Path) -> int:
    """Return the CRC-32 of a Parquet file's footer, its length and the format's mark."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL_BYTES))
        length = int.from_bytes(file.read(4), "little")
        file.seek(max(0, size - _TAIL_BYTES - length))
        return zlib.crc32(file.read())


def unreadable_plan(path: Path, reason: object) -> UserError:
    """Return the error for a plan's file that can't be read."""
    return UserError(
        f"{path}: the plan can't be read ({reason}); restore the file, or start a new run under another run.name"
    )


def _writer(path: Path, schema: pa.Schema) -> RowGroupWriter:
    # Numbers in a random order hardly shrink, and compressing them would take as long as planning.
    compression = {name: "lz4" if name in _MOSTLY_EQUAL else "none" for name in schema.names}
    return RowGroupWriter(path, schema, compression=compression, use_dictionary=False)


def _columns(table: pa.Table) -> dict[str, Any]:
    return {name: table.column(name).to_numpy() for name in table.column_names}


def _weights_of(table: pa.Table) -> RowWeights:
    return RowWeights(**_columns(table)) if table.num_rows else NO_ROWS


def _pieces_of(table: pa.Table) -> Pieces:
    columns = _columns(table)
    columns["document"] = columns["document"].astype(np.int64)
    columns["length"] = columns["length"].astype(np.int64)
    return Pieces(**columns)
