"""Rows as a rank receives them: its slice of tokens, labels shifted inside documents, and positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from ray_ulysses.data.plan import Plan
from ray_ulysses.data.rows import Piece, RowTable

IGNORE_INDEX = -100
FILLER_ROW = -1
PADDING_TOKEN = 0
Split = Literal["train", "evaluation"]


class TokenStore(Protocol):
    """Where tokens come from; a ``Corpus`` is one."""

    @property
    def fingerprint(self) -> str:
        """Return the identity of the content."""
        ...

    def read(self, document: int, start: int, length: int) -> NDArray[np.int64]:
        """Return ``length`` tokens of a document from ``start`` on."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RowSlice:
    """One rank's contiguous slice of one row.

    Attributes:
        row: Global number of the row; -1 for a zero-weight filler.
        sp_rank: Which slice of the row it is.
        sp_size: Slices of the row.
        row_tokens: Length of the whole row, padding included.
        document_lengths: Lengths of the whole row's pieces, in order, padding left out.
        input_ids: int64 [row_tokens // sp_size]; padding is token 0.
        labels: int64, the same shape: the next token of the same document, -100 where there is none.
        position_ids: int64, the same shape: from 0 in each piece, and from 0 in the padding.
    """

    row: int
    sp_rank: int
    sp_size: int
    row_tokens: int
    document_lengths: tuple[int, ...]
    input_ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    position_ids: NDArray[np.int64]

    @property
    def is_filler(self) -> bool:
        """Return whether the row only keeps ranks in step."""
        return self.row == FILLER_ROW

    @property
    def num_supervised(self) -> int:
        """Return the labels in this slice."""
        return int((self.labels != IGNORE_INDEX).sum())


def slice_row(
    store: TokenStore, row: int, row_tokens: int, pieces: Sequence[Piece], sp_rank: int, sp_size: int
) -> RowSlice:
    """Read the slice ``sp_rank`` of ``sp_size`` of a row, and no token that it does not need.

    Args:
        store: Where the tokens are.
        row: Number that the slice carries.
        row_tokens: Padded length of the row, a multiple of ``sp_size``.
        pieces: The row's pieces in order.
        sp_rank: Which slice.
        sp_size: How many slices.
    """
    if row_tokens % sp_size:
        raise ValueError(f"parallel.sp_size={sp_size} does not divide the {row_tokens} tokens of row {row}")
    size = row_tokens // sp_size
    first, last = sp_rank * size, (sp_rank + 1) * size
    input_ids = np.full(size, PADDING_TOKEN, dtype=np.int64)
    labels = np.full(size, IGNORE_INDEX, dtype=np.int64)
    position_ids = np.empty(size, dtype=np.int64)
    begin = 0
    for piece in pieces:
        low, high = max(first, begin), min(last, begin + piece.length)
        if low < high:
            inside, count = low - begin, high - low
            num_labels = min(count, piece.supervised - inside)
            # One token more than the inputs, where there is one: the label of the last of them.
            tokens = store.read(piece.document, piece.start + inside, max(count, num_labels + 1))
            target = slice(low - first, high - first)
            input_ids[target] = tokens[:count]
            labels[low - first : low - first + num_labels] = tokens[1 : num_labels + 1]
            position_ids[target] = np.arange(inside, inside + count)
        begin += piece.length
    assert begin <= row_tokens, f"row {row} holds {begin} tokens, more than its {row_tokens}"
    padding = max(first, begin)
    if padding < last:
        position_ids[padding - first :] = np.arange(padding - begin, last - begin)
    return RowSlice(
        row=row,
        sp_rank=sp_rank,
        sp_size=sp_size,
        row_tokens=row_tokens,
        document_lengths=tuple(piece.length for piece in pieces),
        input_ids=input_ids,
        labels=labels,
        position_ids=position_ids,
    )


def filler_slice(store: TokenStore, pad_multiple: int, sp_rank: int, sp_size: int) -> RowSlice:
    """Return a slice of the shortest row, all padding, which weighs nothing in any sum."""
    return slice_row(store, FILLER_ROW, pad_multiple, (), sp_rank, sp_size)


class RowReader:
    """Reads any slice of any row of a plan, in any order."""

    def __init__(self, store: TokenStore, plan: Plan) -> None:
        """Bind a plan to its corpus.

        Raises:
            UserError: The corpus is not the one planned with.
        """
        plan.check_corpus(store.fingerprint)
        self._store = store
        self._plan = plan

    def read(self, split: Split, row: int, sp_rank: int, sp_size: int) -> RowSlice:
        """Return one slice of one row.

        Raises:
            UserError: A shard can't be read.
        """
        table: RowTable = self._plan.train if split == "train" else self._plan.evaluation
        pieces = table.pieces(row)
        return slice_row(self._store, row, int(table.tokens[row]), pieces, sp_rank, sp_size)

    def filler(self, sp_rank: int, sp_size: int) -> RowSlice:
        """Return a slice of the zero-weight row that stands in where no row is left in a micro-step."""
        return filler_slice(self._store, self._plan.settings.pad_multiple, sp_rank, sp_size)
