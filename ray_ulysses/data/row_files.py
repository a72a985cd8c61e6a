"""Rows on disk: two Parquet files, of which any row is read in about a millisecond.

``rows`` holds what each row weighs, in the order of training; ``pieces`` holds the pieces, row after row in the order
in which rows closed. Both have row groups of 65,536 entries, so that the group of an entry is known without an index.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import pyarrow as pa

from ray_ulysses.data.packing import NO_PIECES, Pieces
from ray_ulysses.data.patience import READ_ERRORS, Patience
from ray_ulysses.data.row_groups import GROUP_ROWS, RowGroupReader, RowGroupWriter
from ray_ulysses.data.rows import NO_ROWS, Piece, Rows, RowWeights, piece_tuple
from ray_ulysses.errors import UserError

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
_PLAN_KEY = b"ray_ulysses.plan_id"


class PieceWriter:
    """Writes pieces as they come; a sink of the planner."""

    def __init__(self, path: Path, plan_id: str) -> None:
        self._writer = _writer(path, PIECE_SCHEMA, plan_id)

    def add(self, pieces: Pieces) -> None:
        """Take the next pieces."""
        columns = [pieces.document.astype(np.uint32), pieces.start, pieces.length.astype(np.int32), pieces.has_next]
        self._writer.add(pa.Table.from_arrays([pa.array(column) for column in columns], schema=PIECE_SCHEMA))

    def close(self) -> None:
        """Write what is pending, and the footer."""
        self._writer.close()


def write_weights(path: Path, rows: Rows, plan_id: str) -> None:
    """Write what rows weigh, in the order of training."""
    writer = _writer(path, ROW_SCHEMA, plan_id)
    for first in range(0, rows.num_rows, GROUP_ROWS):
        part = rows.weights(first, first + GROUP_ROWS)
        arrays = [pa.array(getattr(part, name)) for name in ROW_SCHEMA.names]
        writer.add(pa.Table.from_arrays(arrays, schema=ROW_SCHEMA))
    writer.close()


class FileRows:
    """Rows that are read from their files when they are asked for; a few row groups are kept."""

    def __init__(self, rows_path: Path, pieces_path: Path, plan_id: str, patience: Patience | None = None) -> None:
        """Open both files; reads their footers alone.

        Raises:
            UserError: A file is missing, unreadable, or of another plan.
        """
        patience = patience or Patience()
        self._rows = _GroupFile(rows_path, plan_id, ROW_SCHEMA, _weights_of, patience)
        self._pieces = _GroupFile(pieces_path, plan_id, PIECE_SCHEMA, _pieces_of, patience)

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
        self, path: Path, plan_id: str, schema: pa.Schema, convert: Callable[[pa.Table], Value], patience: Patience
    ) -> None:
        self._path = path
        self._convert = convert
        try:
            self._reader = RowGroupReader(path, schema.names, patience)
        except READ_ERRORS as error:
            raise unreadable_plan(path, error) from error
        found = self._reader.key_values.get(_PLAN_KEY)
        if found != plan_id.encode():
            raise unreadable_plan(path, f"it is of plan {found.decode() if found else 'unknown'}, not {plan_id}")
        self.size = self._reader.num_rows

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


def unreadable_plan(path: Path, reason: object) -> UserError:
    """Return the error for a plan's file that can't be read."""
    return UserError(
        f"{path}: the plan can't be read ({reason}); restore the file, or start a new run under another run.name"
    )


def _writer(path: Path, schema: pa.Schema, plan_id: str) -> RowGroupWriter:
    tagged = schema.with_metadata({_PLAN_KEY: plan_id.encode()})
    # Numbers in a random order hardly shrink, and compressing them would take as long as planning.
    compression = {name: "lz4" if name in _MOSTLY_EQUAL else "none" for name in schema.names}
    return RowGroupWriter(path, tagged, compression=compression, use_dictionary=False)


def _columns(table: pa.Table) -> dict[str, Any]:
    return {name: table.column(name).to_numpy() for name in table.column_names}


def _weights_of(table: pa.Table) -> RowWeights:
    return RowWeights(**_columns(table)) if table.num_rows else NO_ROWS


def _pieces_of(table: pa.Table) -> Pieces:
    columns = _columns(table)
    columns["document"] = columns["document"].astype(np.int64)
    columns["length"] = columns["length"].astype(np.int64)
    return Pieces(**columns)
