"""Packed rows: which pieces of which documents a row holds, and what a row weighs."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ray_ulysses.data.plan.packing import NO_PIECES, Pieces

Int64Array = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
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
    def num_labels(self) -> int:
        """Return the tokens that have a next one in the document."""
        return self.length if self.has_next_label else self.length - 1


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RowWeights:
    """What rows weigh, one entry a row.

    Attributes:
        first_piece: int64, place of the row's first piece among all pieces.
        num_pieces: int32, its pieces.
        document_tokens: int32, tokens of its pieces, padding left out.
        supervised: int32, tokens with a label.
        sum_squares: int64, sum of the squared lengths of its pieces.
    """

    first_piece: Int64Array
    num_pieces: NDArray[np.int32]
    document_tokens: NDArray[np.int32]
    supervised: NDArray[np.int32]
    sum_squares: Int64Array

    @property
    def num_rows(self) -> int:
        """Return the number of rows."""
        return int(self.first_piece.size)

    def take(self, rows: Int64Array | slice) -> RowWeights:
        """Return the weights of some rows."""
        return RowWeights(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})

    def padded_tokens(self, pad_multiple: int) -> Int64Array:
        """Return each row's length: its documents' tokens, padded to a multiple."""
        return -(-self.document_tokens.astype(np.int64) // pad_multiple) * pad_multiple

    def cost(self, token_cost: int) -> Int64Array:
        """Return what each row costs: attention's squares, and ``token_cost`` of them for each token."""
        return self.sum_squares + token_cost * self.document_tokens.astype(np.int64)

    @classmethod
    def join(cls, parts: list[RowWeights]) -> RowWeights:
        """Return the rows of all parts, one after another."""
        if not parts:
            return NO_ROWS
        if len(parts) == 1:
            return parts[0]
        return cls(
            **{field.name: np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(cls)}
        )


NO_ROWS = RowWeights(
    first_piece=np.empty(0, dtype=np.int64),
    num_pieces=np.empty(0, dtype=np.int32),
    document_tokens=np.empty(0, dtype=np.int32),
    supervised=np.empty(0, dtype=np.int32),
    sum_squares=np.empty(0, dtype=np.int64),
)


class Rows(Protocol):
    """The rows of one split, in the order of training, from 0 on."""

    @property
    def num_rows(self) -> int:
        """Return how many there are."""
        ...

    def weights(self, first: int, stop: int) -> RowWeights:
        """Return the weights of the rows ``[first, stop)``."""
        ...

    def pieces(self, row: int) -> tuple[Piece, ...]:
        """Return the pieces of a row in their order."""
        ...


class MemoryRows:
    """Rows in memory, with their pieces or, where only their weights are asked for, without."""

    def __init__(self, weights: RowWeights, pieces: Pieces | None, order: Int64Array | None = None) -> None:
        """Take rows as they closed, and their order in training; None where it is the same."""
        self._weights = weights
        self._pieces = pieces
        self._order = order

    @property
    def num_rows(self) -> int:
        """Return how many there are."""
        return self._weights.num_rows

    def weights(self, first: int, stop: int) -> RowWeights:
        """Return the weights of the rows ``[first, stop)``."""
        return self._weights.take(slice(first, stop) if self._order is None else self._order[first:stop])

    @property
    def all_pieces(self) -> Pieces:
        """Return the pieces of all rows, in the order in which rows closed."""
        return NO_PIECES if self._pieces is None else self._pieces

    def pieces(self, row: int) -> tuple[Piece, ...]:
        """Return the pieces of a row in their order."""
        assert self._pieces is not None, "this plan was made without pieces"
        weights = self.weights(row, row + 1)
        return piece_tuple(self._pieces, int(weights.first_piece[0]), int(weights.num_pieces[0]))


def piece_tuple(pieces: Pieces, first: int, count: int) -> tuple[Piece, ...]:
    """Return some of the pieces as values."""
    return tuple(
        Piece(
            document=int(pieces.document[at]),
            start=int(pieces.start[at]),
            length=int(pieces.length[at]),
            has_next_label=bool(pieces.has_next[at]),
        )
        for at in range(first, first + count)
    )
