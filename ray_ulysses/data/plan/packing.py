"""Packs pieces into rows, block after block, in constant memory.

``best_fit`` is windowed online best-fit: each piece is put, as it arrives, into the open row that it leaves fullest. If
it fits into none, a new row is opened, and beyond 64 open rows the fullest is closed. ``wide_fit`` does so with 1,024
open rows: documents of about half a row find a partner among them, which 64 often lack. ``concat`` splits the stream of
documents wherever a row is full. ``none`` gives each piece a row of its own.

Rows are numbered in the order in which they close. Each block yields the rows that closed in it; the pieces of rows
that are still open are carried over to the next block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ray_ulysses.data.plan.columns import Columns
from ray_ulysses.data.plan.compiled import compiled, inlined
from ray_ulysses.data.plan.wide_fit import OpenRows

Int64Array = NDArray[np.int64]
Packing = Literal["best_fit", "wide_fit", "concat", "none"]
NUM_OPEN_ROWS = 64
_NEVER = np.int64(1 << 62)
_INDEX_BITS = 6
assert 1 << _INDEX_BITS == NUM_OPEN_ROWS


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Pieces(Columns):
    """Parts of documents, one per entry.

    Attributes:
        document: int64, the document's number.
        start: int64, the first token in the document.
        length: int64, tokens.
        has_next: bool, whether the document continues, so that the last token has a label.
    """

    MEMORY = np.dtype([("document", "i8"), ("start", "i8"), ("length", "i8"), ("has_next", "?")])
    STORED = np.dtype([("document", "<u4"), ("start", "<i8"), ("length", "<i4"), ("has_next", "?")])
    document: Int64Array
    start: Int64Array
    length: Int64Array
    has_next: NDArray[np.bool_]


class Packer:
    """Takes pieces block after block and returns whole rows."""

    def __init__(self, packing: Packing, capacity: int) -> None:
        """Start with no open row.

        Args:
            packing: How rows are filled; ``concat`` takes whole documents, the others pieces of at most ``capacity``.
            capacity: Tokens a row holds.
        """
        self._packing = packing
        self._capacity = capacity
        self._wide = OpenRows() if packing == "wide_fit" else None
        self._free = self._wide.free if self._wide else np.full(NUM_OPEN_ROWS, -1, dtype=np.int64)
        self._open_rows = self._wide.rows if self._wide else np.full(NUM_OPEN_ROWS, -1, dtype=np.int64)
        self._used = 0
        self._waiting = Pieces.empty()
        self._waiting_rows = np.empty(0, dtype=np.int64)

    def add(self, pieces: Pieces, *, is_last: bool) -> tuple[Pieces, Int64Array]:
        """Pack a block.

        Args:
            pieces: The next pieces, in their order.
            is_last: Whether this is the last block, so that all rows close.

        Returns:
            The pieces of the rows that closed, row by row, and the number of pieces of each of these rows.
        """
        if self._packing == "none":
            return pieces, np.ones(pieces.size, dtype=np.int64)
        if self._packing == "concat":
            return self._concatenate(pieces, is_last)
        if not is_last and not pieces.size:
            return Pieces.empty(), np.empty(0, dtype=np.int64)
        return self._best_fit(pieces, is_last)

    def _best_fit(self, pieces: Pieces, is_last: bool) -> tuple[Pieces, Int64Array]:
        joined = Pieces.join([self._waiting, pieces])
        rows = np.empty(joined.size, dtype=np.int64)
        rows[: self._waiting.size] = self._waiting_rows
        num_open = int((self._free >= 0).sum())
        closed = np.full(num_open + pieces.size, -1, dtype=np.int64)
        new = rows[self._waiting.size :]
        if self._wide is not None:
            num_closed = self._wide.fit(pieces.length, self._capacity, new, closed, is_last=is_last)
        else:
            num_closed = _fit_all(
                pieces.length, self._capacity, self._free, self._open_rows, num_open, new, closed, is_last
            )
        order, sizes, waiting = _group(rows, closed, num_closed)
        # Rows that stay open are renumbered from 0, since a block's arrays are only as long as the block.
        renumbered = np.full(closed.size, -1, dtype=np.int64)
        still_open = np.flatnonzero(self._free >= 0)
        renumbered[self._open_rows[still_open]] = np.arange(still_open.size)
        self._open_rows[still_open] = np.arange(still_open.size)
        self._waiting = joined.take(waiting)
        self._waiting_rows = renumbered[rows[waiting]]
        return joined.take(order), sizes

    def _concatenate(self, documents: Pieces, is_last: bool) -> tuple[Pieces, Int64Array]:
        room = documents.size + (int(documents.length.sum()) + self._used) // self._capacity + 1
        split = Pieces.empty(room)
        ends = np.empty(room, dtype=np.int64)
        count, num_rows, self._used = _split_all(*documents.columns, self._capacity, self._used, *split.columns, ends)
        joined = Pieces.join([self._waiting, split.take(slice(0, count))])
        borders = ends[:num_rows] + self._waiting.size
        if is_last and self._used:
            borders = np.append(borders, joined.size)
            self._used = 0
        whole = int(borders[-1]) if borders.size else 0
        self._waiting = joined.take(slice(whole, None))
        return joined.take(slice(0, whole)), np.diff(borders, prepend=0)


@inlined
def _fullest_that_takes(free, length):  # type: ignore[no-untyped-def]
    """Return ``free << bits | index`` of the open row with the least room that is enough, or ``_NEVER``."""
    best = _NEVER
    for index in range(NUM_OPEN_ROWS):
        room = free[index]
        key = (room << _INDEX_BITS) | index
        best = min(best, key if room >= length else _NEVER)
    return best


@compiled
def _fit_all(lengths, capacity, free, open_rows, num_open, rows, closed, is_last):  # type: ignore[no-untyped-def]
    """Assign a row to each piece; ``closed[row]`` becomes the row's number by closing, -1 while it is open."""
    num_rows = num_open
    num_closed = 0
    for at in range(lengths.size):
        length = lengths[at]
        left = capacity - length
        best = _fullest_that_takes(free, length) if left > 0 else _NEVER
        if best != _NEVER:
            index = best & (NUM_OPEN_ROWS - 1)
            row = open_rows[index]
            left = free[index] - length
            free[index] = left
            if left == 0:
                free[index] = -1
                num_open -= 1
        else:
            row = num_rows
            num_rows += 1
            if left > 0:
                if num_open == NUM_OPEN_ROWS:
                    index = _fullest_that_takes(free, 0) & (NUM_OPEN_ROWS - 1)
                    closed[open_rows[index]] = num_closed
                    num_closed += 1
                else:
                    index = 0
                    while free[index] >= 0:
                        index += 1
                    num_open += 1
                free[index] = left
                open_rows[index] = row
        rows[at] = row
        if left == 0:
            closed[row] = num_closed
            num_closed += 1
    if is_last:
        for index in range(NUM_OPEN_ROWS):
            if free[index] >= 0:
                closed[open_rows[index]] = num_closed
                num_closed += 1
                free[index] = -1
    return num_closed


@compiled
def _group(rows, closed, num_closed):  # type: ignore[no-untyped-def]
    """Return the places of the pieces of closed rows, row by row; how many each has; the places of the others."""
    sizes = np.zeros(num_closed, dtype=np.int64)
    num_waiting = 0
    for at in range(rows.size):
        number = closed[rows[at]]
        if number >= 0:
            sizes[number] += 1
        else:
            num_waiting += 1
    nexts = np.empty(num_closed, dtype=np.int64)
    place = 0
    for number in range(num_closed):
        nexts[number] = place
        place += sizes[number]
    order = np.empty(place, dtype=np.int64)
    waiting = np.empty(num_waiting, dtype=np.int64)
    num_waiting = 0
    for at in range(rows.size):
        number = closed[rows[at]]
        if number >= 0:
            order[nexts[number]] = at
            nexts[number] += 1
        else:
            waiting[num_waiting] = at
            num_waiting += 1
    return order, sizes, waiting


@compiled
def _split_all(  # type: ignore[no-untyped-def]
    document, start, length, has_next, capacity, used, out_document, out_start, out_length, out_next, ends
):
    """Split documents where rows end; ``ends`` receives the number of pieces up to the end of each full row."""
    count = 0
    num_rows = 0
    for at in range(document.size):
        first = start[at]
        left = length[at]
        # A remainder without a target of its own makes no piece: its token is already a label.
        while left - 1 + has_next[at] > 0:
            size = min(capacity - used, left)
            out_document[count] = document[at]
            out_start[count] = first
            out_length[count] = size
            out_next[count] = size < left or has_next[at]
            count += 1
            first += size
            left -= size
            used += size
            if used == capacity:
                ends[num_rows] = count
                num_rows += 1
                used = 0
    return count, num_rows, used
