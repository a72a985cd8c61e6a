"""Packed rows: which pieces of which documents a row holds, and what a row weighs."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int64Array = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A stretch of one document in a row.

    Attributes:
        document: Number of the document.
        start: Its first token in the document.
        length: Tokens in the row.
        has_next_label: Whether the document goes on, so that the last token has a label.
    """

    document: int
    start: int
    length: int
    has_next_label: bool

    @property
    def supervised(self) -> int:
        """Return the tokens that have a label."""
        return self.length if self.has_next_label else self.length - 1


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RowTable:
    """Rows of one split, in the order of training; the pieces of row r are ``[offsets[r], offsets[r + 1])``.

    Attributes:
        offsets: int64 [num_rows + 1].
        document: int64 [pieces].
        start: int64 [pieces].
        length: int64 [pieces].
        has_next_label: bool [pieces].
        epoch: int32 [num_rows].
        tokens: int64 [num_rows], the padded length of each row.
        supervised: int64 [num_rows], tokens with a label.
        cost: int64 [num_rows], the sum of squared piece lengths, which attention's cost goes with.
    """

    offsets: Int64Array
    document: Int64Array
    start: Int64Array
    length: Int64Array
    has_next_label: NDArray[np.bool_]
    epoch: NDArray[np.int32]
    tokens: Int64Array
    supervised: Int64Array
    cost: Int64Array

    @classmethod
    def build(
        cls,
        *,
        offsets: Int64Array,
        document: Int64Array,
        start: Int64Array,
        length: Int64Array,
        has_next_label: NDArray[np.bool_],
        epoch: NDArray[np.int32],
        pad_multiple: int,
    ) -> RowTable:
        """Return the table with the weights of its rows worked out."""
        used = _sums(length, offsets)
        table = cls(
            offsets=offsets,
            document=document,
            start=start,
            length=length,
            has_next_label=has_next_label,
            epoch=epoch,
            tokens=-(-used // pad_multiple) * pad_multiple,
            supervised=_sums(length - ~has_next_label, offsets),
            cost=_sums(length * length, offsets),
        )
        for name in cls.__slots__:
            getattr(table, name).setflags(write=False)
        return table

    @classmethod
    def concatenate(cls, tables: Sequence[RowTable], pad_multiple: int) -> RowTable:
        """Return the rows of all tables, one table after another."""
        shifts = np.cumsum([0, *(table.document.size for table in tables)])
        ends = [table.offsets[1:] + shift for table, shift in zip(tables, shifts[:-1], strict=True)]
        return cls.build(
            offsets=np.concatenate([np.zeros(1, dtype=np.int64), *ends]),
            document=np.concatenate([table.document for table in tables]),
            start=np.concatenate([table.start for table in tables]),
            length=np.concatenate([table.length for table in tables]),
            has_next_label=np.concatenate([table.has_next_label for table in tables]),
            epoch=np.concatenate([table.epoch for table in tables]),
            pad_multiple=pad_multiple,
        )

    @property
    def num_rows(self) -> int:
        """Return the number of rows."""
        return self.offsets.size - 1

    @property
    def num_pieces(self) -> int:
        """Return the number of pieces in all rows."""
        return self.document.size

    @property
    def num_tokens(self) -> int:
        """Return the tokens of all pieces, padding left out."""
        return int(self.length.sum())

    @property
    def padding_tokens(self) -> int:
        """Return the tokens that only fill rows up to the pad multiple."""
        return int(self.tokens.sum()) - self.num_tokens

    def pieces(self, row: int) -> tuple[Piece, ...]:
        """Return the pieces of a row in their order."""
        if not 0 <= row < self.num_rows:
            raise IndexError(f"row {row} is not in [0, {self.num_rows})")
        return tuple(
            Piece(
                document=int(self.document[at]),
                start=int(self.start[at]),
                length=int(self.length[at]),
                has_next_label=bool(self.has_next_label[at]),
            )
            for at in range(int(self.offsets[row]), int(self.offsets[row + 1]))
        )

    def content_digest(self) -> str:
        """Return a hash of which pieces the rows hold, independent of machine and file format."""
        digest = hashlib.blake2b(digest_size=16)
        for array in (self.offsets, self.document, self.start, self.length):
            digest.update(np.ascontiguousarray(array, dtype="<i8").data)
        digest.update(np.ascontiguousarray(self.has_next_label, dtype=np.uint8).data)
        digest.update(np.ascontiguousarray(self.epoch, dtype="<i4").data)
        return digest.hexdigest()


def empty_rows(pad_multiple: int) -> RowTable:
    """Return a table without rows."""
    nothing = np.empty(0, dtype=np.int64)
    return RowTable.build(
        offsets=np.zeros(1, dtype=np.int64),
        document=nothing,
        start=nothing.copy(),
        length=nothing.copy(),
        has_next_label=np.empty(0, dtype=bool),
        epoch=np.empty(0, dtype=np.int32),
        pad_multiple=pad_multiple,
    )


def _sums(values: Int64Array, offsets: Int64Array) -> Int64Array:
    """Return the sum of ``values`` over each row; no row is empty."""
    if values.size == 0:
        return np.zeros(offsets.size - 1, dtype=np.int64)
    return np.add.reduceat(values, offsets[:-1]).astype(np.int64)
