"""Packed rows: the pieces of documents that a row holds, and its token counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ray_ulysses.data.plan.columns import Columns
from ray_ulysses.data.plan.packing import Pieces

Int64Array = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Piece:
    """A document's part in a row.

    Attributes:
        document: Number of the document.
        start: Its first token in the document.
        length: Tokens in the row.
        has_next_label: Whether the document continues, so that the last token has a label.
    """

    document: int
    start: int
    length: int
    has_next_label: bool

    @property
    def num_labels(self) -> int:
        """Return the tokens that have a next one in the document."""
        return self.length if self.has_next_label else self.length - 1


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RowStats(Columns):
    """Token counts of rows, one entry per row.

    Attributes:
        first_piece: int64, index of the row's first piece among all pieces.
        num_pieces: int32, its pieces.
        document_tokens: int32, tokens of its pieces, without padding.
        supervised: int32, tokens with a label.
        sum_squares: int64, sum of the squared lengths of its pieces.
    """

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
    num_pieces: NDArray[np.int32]
    document_tokens: NDArray[np.int32]
    supervised: NDArray[np.int32]
    sum_squares: Int64Array

    def padded_tokens(self, pad_multiple: int) -> Int64Array:
        """Return each row's length: its documents' tokens, padded to a multiple."""
        return -(-self.document_tokens.astype(np.int64) // pad_multiple) * pad_multiple

    def cost(self, token_cost: int) -> Int64Array:
        """Return the cost of each row: the squared lengths, and ``token_cost`` of them for each token."""
        return self.sum_squares + token_cost * self.document_tokens.astype(np.int64)


class Rows(Protocol):
    """The rows of one split in training order, numbered from 0."""

    @property
    def num_rows(self) -> int:
        """Return the number of rows."""
        ...

    def stats(self, first: int, stop: int) -> RowStats:
        """Return the token counts of the rows ``[first, stop)``."""
        ...

    def closed_pieces(self, first: int, stop: int) -> Pieces:
        """Return the pieces ``[first, stop)`` of all rows, in the order in which rows closed during packing."""
        ...

    def pieces(self, row: int) -> tuple[Piece, ...]:
        """Return the pieces of a row in their order."""
        stats = self.stats(row, row + 1)
        first = int(stats.first_piece[0])
        found = self.closed_pieces(first, first + int(stats.num_pieces[0]))
        return tuple(
            Piece(document=document, start=start, length=length, has_next_label=has_next)
            for document, start, length, has_next in zip(*(column.tolist() for column in found.columns), strict=True)
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MemoryRows(Rows):
    """Rows in memory.

    Attributes:
        closed: Token counts of the rows, in the order in which they closed.
        all_pieces: The pieces of all rows in that order; None where they were not kept.
        order: Index in ``closed`` of each row in training order; None where the two orders are the same.
    """

    closed: RowStats
    all_pieces: Pieces | None
    order: Int64Array | None = None

    @property
    def num_rows(self) -> int:
        """Return the number of rows."""
        return self.closed.size

    def stats(self, first: int, stop: int) -> RowStats:
        """Return the token counts of the rows ``[first, stop)``."""
        return self.closed.take(slice(first, stop) if self.order is None else self.order[first:stop])

    def closed_pieces(self, first: int, stop: int) -> Pieces:
        """Return the pieces ``[first, stop)`` of all rows, in the order in which rows closed during packing."""
        assert self.all_pieces is not None, "this plan was made without pieces"
        return self.all_pieces.take(slice(first, stop))
