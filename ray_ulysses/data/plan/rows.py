"""Packed rows: each row's document pieces and token counts.

Millions of rows are represented as tables of NumPy columns, without a Python object per row.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from ray_ulysses.data.corpus.row_groups import GROUP_ROWS

Int64Array = NDArray[np.int64]
CHECKSUM_DIGITS = 8
Entries = TypeVar("Entries", covariant=True)


class Columns:
    """Base class of frozen dataclasses whose fields are arrays of equal length."""

    __slots__ = ()
    MEMORY: ClassVar[np.dtype[Any]]
    """Structured dtype of the fields in memory."""
    STORED: ClassVar[np.dtype[Any]]
    """Structured dtype of the fields on disk."""

    @classmethod
    def make(cls, columns: Sequence[NDArray[Any]]) -> Self:
        """Return a table with the given columns, converted to their in-memory dtypes."""
        table: Any = cls
        names = cls.MEMORY.names or ()
        return table(  # type: ignore[no-any-return]
            **{name: column.astype(cls.MEMORY[name], copy=False) for name, column in zip(names, columns, strict=True)}
        )

    @classmethod
    def empty(cls, size: int = 0) -> Self:
        """Return a table with ``size`` uninitialized entries."""
        return cls.make([np.empty(size, dtype=cls.MEMORY[name]) for name in cls.MEMORY.names or ()])

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """Return the concatenation of all parts."""
        filled = [part for part in parts if part.size]
        if len(filled) <= 1:
            return filled[0] if filled else cls.empty()
        return cls.make([np.concatenate(column) for column in zip(*(part.columns for part in filled), strict=True)])

    @property
    def columns(self) -> tuple[NDArray[Any], ...]:
        """Arrays in field order."""
        return tuple(getattr(self, name) for name in self.MEMORY.names or ())

    @property
    def size(self) -> int:
        """Number of entries."""
        return int(self.columns[0].size)

    def take(self, places: NDArray[Any] | slice) -> Self:
        """Return the entries at ``places``, given as indices, a mask or a slice. For a slice, return a view."""
        return self.make([column[places] for column in self.columns])

    def stored(self) -> tuple[NDArray[Any], ...]:
        """Return the columns converted to their on-disk dtypes."""
        names = self.STORED.names or ()
        return tuple(
            column.astype(self.STORED[name], copy=False) for name, column in zip(names, self.columns, strict=True)
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Pieces(Columns):
    """Table of parts of documents, one entry per part."""

    MEMORY = np.dtype([("document", "i8"), ("start", "i8"), ("length", "i8"), ("has_next", "?")])
    STORED = np.dtype([("document", "<u4"), ("start", "<i8"), ("length", "<i4"), ("has_next", "?")])
    document: Int64Array
    start: Int64Array
    length: Int64Array
    has_next: NDArray[np.bool_]
    """Whether the document continues after the piece, so that the last token has a label."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Fragments(Columns):
    """Table of document parts that a change of the run's data left untrained. A fragment is drawn like a document.

    If a fragment ends before its document does, the next token of the document is the fragment's last label.
    """

    MEMORY = STORED = np.dtype([("document", "<i8"), ("start", "<i8"), ("length", "<i8")])
    document: Int64Array
    start: Int64Array
    length: Int64Array


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Piece:
    """A part of a document that is packed into a row."""

    document: int
    start: int
    """Index of the piece's first token in the document."""
    length: int
    has_next_label: bool
    """Whether the document continues after the piece, so that the last token has a label."""

    @property
    def num_labels(self) -> int:
        """Number of tokens in the piece that have a next token in the document."""
        return self.length if self.has_next_label else self.length - 1


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RowStats(Columns):
    """Table of token counts, one entry per row."""

    MEMORY = STORED = np.dtype(
        [
            ("first_piece", "<i8"),
            ("num_pieces", "<i4"),
            ("document_tokens", "<i4"),
            ("supervised", "<i4"),
            ("sum_squares", "<i8"),
        ]
    )
    first_piece: Int64Array
    """Index of the row's first piece in the table of all pieces."""
    num_pieces: NDArray[np.int32]
    document_tokens: NDArray[np.int32]
    """Number of tokens in the row's pieces, without padding."""
    supervised: NDArray[np.int32]
    """Number of tokens with a label."""
    sum_squares: Int64Array
    """Sum of the squared lengths of the row's pieces."""

    def padded_tokens(self, pad_multiple: int) -> Int64Array:
        """Return the length of each row: document tokens, padded to a multiple of ``pad_multiple``."""
        return -(-self.document_tokens.astype(np.int64) // pad_multiple) * pad_multiple

    def cost(self, token_cost: int) -> Int64Array:
        """Return the cost of each row in squared tokens: ``sum_squares`` plus ``token_cost`` per token."""
        return self.sum_squares + token_cost * self.document_tokens.astype(np.int64)


class Table(Protocol[Entries]):
    """A table of entries in memory or in a file."""

    @property
    def size(self) -> int:
        """Number of entries."""
        ...

    def take(self, places: slice) -> Entries:
        """Return the entries in a slice, which may extend past the end."""
        ...


class PieceBlocks:
    """A table of pieces in memory, in blocks of their on-disk dtypes, which take a third less memory."""

    def __init__(self) -> None:
        self._blocks: list[tuple[NDArray[Any], ...]] = []
        self._ends = [0]

    def add(self, pieces: Pieces) -> None:
        """Append a block of pieces."""
        self._blocks.append(pieces.stored())
        self._ends.append(self.size + pieces.size)

    @property
    def size(self) -> int:
        """Number of pieces."""
        return self._ends[-1]

    def take(self, places: slice) -> Pieces:
        """Return the pieces in a slice, which may extend past the end."""
        parts: list[Pieces] = []
        first, stop = places.start, min(places.stop, self.size)
        while first < stop:
            number = bisect_right(self._ends, first) - 1
            held = slice(first - self._ends[number], stop - self._ends[number])
            parts.append(Pieces.make([column[held] for column in self._blocks[number]]))
            first += parts[-1].size
        return Pieces.join(parts)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Rows:
    """Rows of one split, numbered from 0."""

    entries: Table[RowStats]
    """Token counts of the rows, in training order."""
    all_pieces: Table[Pieces] | None
    """Pieces of all rows, in the order in which rows were closed during packing; None if the pieces were not stored."""

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return self.entries.size

    def stats(self, first: int, stop: int) -> RowStats:
        """Return the token counts of rows ``[first, stop)``; raise UserError if the file can't be read."""
        return self.entries.take(slice(first, stop))

    def stats_blocks(self) -> Iterator[RowStats]:
        """Yield the token counts of all rows in blocks."""
        for first in range(0, self.num_rows, GROUP_ROWS):
            yield self.stats(first, first + GROUP_ROWS)

    def closed_pieces(self, first: int = 0, stop: int | None = None) -> Pieces:
        """Return pieces ``[first, stop)``, by default all, in the order in which rows were closed."""
        assert self.all_pieces is not None, "this plan was made without pieces"
        return self.all_pieces.take(slice(first, self.all_pieces.size if stop is None else stop))

    def pieces(self, row: int) -> tuple[Piece, ...]:
        """Return the pieces of a row, in order."""
        stats = self.stats(row, row + 1)
        first = int(stats.first_piece[0])
        found = self.closed_pieces(first, first + int(stats.num_pieces[0]))
        return tuple(
            Piece(document=document, start=start, length=length, has_next_label=has_next)
            for document, start, length, has_next in zip(*(column.tolist() for column in found.columns), strict=True)
        )


class GroupChecksums:
    """Computes one checksum per ``GROUP_ROWS`` entries from blocks of any size.

    The checksums cover values instead of file bytes, so they do not depend on the Parquet library, and are available
    before the file is written.
    """

    def __init__(self) -> None:
        self._closed: list[str] = []
        self._crcs: list[int] = []
        self._size = 0

    def add(self, columns: Sequence[NDArray[Any]]) -> None:
        """Append entries, given as columns with their on-disk dtypes."""
        at, stop = 0, columns[0].size
        while at < stop:
            part = slice(at, min(stop, at + GROUP_ROWS - self._size))
            crcs = self._crcs or [0] * len(columns)
            self._crcs = [
                zlib.crc32(np.ascontiguousarray(column[part]).data, crc)
                for column, crc in zip(columns, crcs, strict=True)
            ]
            self._size += part.stop - at
            at = part.stop
            if self._size == GROUP_ROWS:
                self._close()

    def text(self) -> str:
        """Return all checksums, eight hexadecimal digits each. The last group may have fewer entries."""
        if self._size:
            self._close()
        return "".join(self._closed)

    def _close(self) -> None:
        joined = zlib.crc32(np.asarray(self._crcs, dtype="<u4").tobytes())
        self._closed.append(f"{joined:0{CHECKSUM_DIGITS}x}")
        self._crcs, self._size = [], 0


def checksums_of(blocks: Iterable[Sequence[NDArray[Any]]]) -> str:
    """Return the group checksums of entries that are given in blocks."""
    found = GroupChecksums()
    for columns in blocks:
        found.add(columns)
    return found.text()


def fragment_columns(fragments: Fragments, waiting: Fragments) -> tuple[NDArray[Any], ...]:
    """Return the columns to store: fragments, then waiting fragments, with a column that marks the waiting ones."""
    joined = Fragments.join([fragments, waiting])
    return (*joined.columns, np.arange(joined.size) >= fragments.size)
