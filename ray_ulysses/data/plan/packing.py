"""Packs pieces into rows, block by block, in constant memory.

``best_fit`` is windowed online best-fit: it puts each piece into the open row that will have the least space left.
If the piece fits into no open row, a new row is opened. If 64 rows are open already, the fullest row is closed first.
``wide_fit`` is the same with 1,024 open rows, since 64 open rows often have no fit for a document of about half a row.
``concat`` splits the stream of documents wherever a row is full. ``none`` puts each piece into a separate row.

Rows are numbered in closing order. Each block yields the rows that were closed while packing the block; the pieces of
rows that are still open are carried over to the next block.

All compiled functions are in this file because Numba's cache is keyed by the file of the outermost function only: a
function with code inlined from another file would keep running the old code after that other file changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from ray_ulysses.data.plan.rows import Int64Array, Pieces
from ray_ulysses.data.plan.segment import Packing

NUM_OPEN_ROWS = 64
_NEVER = np.int64(1 << 62)
_INDEX_BITS = 6
assert 1 << _INDEX_BITS == NUM_OPEN_ROWS

WIDE_OPEN_ROWS = 1024
NUM_CLASSES = 4096
_BITS = 64
_SHIFT = 6
_ONE = np.uint64(1)
_ALL = np.uint64(0xFFFFFFFFFFFFFFFF)
assert NUM_CLASSES == _BITS * _BITS


def compiled(function: Callable[..., Any]) -> Any:
    """Compile a function of integers and arrays on its first call, and cache the machine code on disk.

    Without a writable cache directory, every process compiles the function again.
    """
    return _compile(function, inline="never")


def inlined(function: Callable[..., Any]) -> Any:
    """Compile a function for inlining into the innermost loops of other compiled functions."""
    return _compile(function, inline="always")


def _compile(function: Callable[..., Any], inline: str) -> Any:
    options: dict[str, Any] = {"nogil": True, "inline": inline}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:
        # Numba found no writable cache directory.
        return numba.njit(**options)(function)


class Packer:
    """Packs pieces into rows, block by block."""

    def __init__(self, packing: Packing, capacity: int) -> None:
        """Start without open rows. ``concat`` packs complete documents; other modes pack pieces up to ``capacity``."""
        self._packing = packing
        self._capacity = capacity
        num_open = WIDE_OPEN_ROWS if packing == "wide_fit" else NUM_OPEN_ROWS
        # For each open row, the number of tokens that still fit (-1 for an unused index), and the row's number.
        self._free, self._open_rows = np.full((2, num_open), -1, dtype=np.int64)
        self._classes = _no_classes(num_open) if packing == "wide_fit" else None
        self._used = 0
        self._waiting = Pieces.empty()
        self._waiting_rows = np.empty(0, dtype=np.int64)

    def add(self, pieces: Pieces, *, is_last: bool) -> tuple[Pieces, Int64Array]:
        """Pack a block of pieces.

        Args:
            pieces: The next pieces, in order.
            is_last: Whether this is the last block; if so, all rows are closed.

        Returns:
            The pieces of the rows that were closed, row by row, and the number of pieces in each of these rows.
        """
        if self._packing == "none":
            return pieces, np.ones(pieces.size, dtype=np.int64)
        return (self._concatenate if self._packing == "concat" else self._best_fit)(pieces, is_last)

    def _best_fit(self, pieces: Pieces, is_last: bool) -> tuple[Pieces, Int64Array]:
        joined = Pieces.join([self._waiting, pieces])
        rows = np.empty(joined.size, dtype=np.int64)
        rows[: self._waiting.size] = self._waiting_rows
        num_open = int((self._free >= 0).sum())
        closed = np.full(num_open + pieces.size, -1, dtype=np.int64)
        new = rows[self._waiting.size :]
        state = (self._free, self._open_rows)
        if self._classes is not None:
            num_closed = _fit_wide(
                pieces.length, self._capacity, (*state, *self._classes), num_open, new, closed, is_last
            )
        else:
            num_closed = _fit_all(pieces.length, self._capacity, *state, num_open, new, closed, is_last)
        order, sizes, waiting = _group(rows, closed, num_closed)
        # Open rows are renumbered from 0, since a block's arrays are only as long as the block.
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
    """Return ``free << bits | index`` of the fullest open row with space for ``length``, or ``_NEVER`` if none fits."""
    best = _NEVER
    for index in range(NUM_OPEN_ROWS):
        room = free[index]
        key = (room << _INDEX_BITS) | index
        best = min(best, key if room >= length else _NEVER)
    return best


@compiled
def _fit_all(lengths, capacity, free, open_rows, num_open, rows, closed, is_last):  # type: ignore[no-untyped-def]
    """Assign a row to each piece. ``closed[row]`` receives the row's number in closing order, or -1 if still open."""
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
    """Return the indices of pieces in closed rows (row by row), the piece count per row, and the remaining indices."""
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
    """Split documents at row ends. ``ends`` receives the number of pieces up to the end of each full row."""
    count = 0
    num_rows = 0
    for at in range(document.size):
        first = start[at]
        left = length[at]
        # A remainder without a target makes no piece: its only token is already a label.
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


# Best-fit over 1,024 open rows takes two searches of 64 bits per piece, however many rows are open. Open rows are
# grouped by free space into 4,096 classes, each a stack. The class of the piece's own length is tried first: its top
# row is used if the piece fits, which is common with documents of half a row. Otherwise, two levels of bit words find
# the fullest class in which every row fits the piece. This wastes at most 1/4,096 of a row per piece.


def _no_classes(num_open: int) -> tuple[Int64Array, Int64Array, NDArray[np.uint64], Int64Array]:
    """Return the state of ``wide_fit`` with all classes of rows empty, as arrays that other functions modify in place.

    The arrays are, in order: for each open-row index, the next index in the same stack, or -1; for each class, the top
    index of the stack, or -1; one bit per class for nonempty classes, plus a last word with one bit per nonempty word;
    and the unused indices, of which only the first ``num_open - number of open rows`` are valid.
    """
    return (
        np.full(num_open, -1, dtype=np.int64),
        np.full(NUM_CLASSES, -1, dtype=np.int64),
        np.zeros(_BITS + 1, dtype=np.uint64),
        np.arange(num_open, dtype=np.int64)[::-1].copy(),
    )


@inlined
def _lowest_bit(word):  # type: ignore[no-untyped-def]
    number = 0
    for step in (32, 16, 8, 4, 2, 1):
        if word & ((_ONE << np.uint64(step)) - _ONE) == 0:
            word >>= np.uint64(step)
            number += step
    return number


@inlined
def _fullest_from(words, first):  # type: ignore[no-untyped-def]
    """Return the first nonempty class at or after ``first``, or -1."""
    if first >= NUM_CLASSES:
        return -1
    at = first >> _SHIFT
    word = words[at] & (_ALL << np.uint64(first & (_BITS - 1)))
    if word == 0:
        # Two shifts, since a shift by 64 is undefined.
        others = words[_BITS] & ((_ALL << np.uint64(at)) << _ONE)
        if others == 0:
            return -1
        at = _lowest_bit(others)
        word = words[at]
    return (at << _SHIFT) + _lowest_bit(word)


@inlined
def _take(state, number):  # type: ignore[no-untyped-def]
    _, _, below, tops, words, _ = state
    index = tops[number]
    tops[number] = below[index]
    if tops[number] < 0:
        at = number >> _SHIFT
        words[at] &= ~(_ONE << np.uint64(number & (_BITS - 1)))
        if words[at] == 0:
            words[_BITS] &= ~(_ONE << np.uint64(at))
    return index


@inlined
def _put(state, index, number):  # type: ignore[no-untyped-def]
    _, _, below, tops, words, _ = state
    below[index] = tops[number]
    tops[number] = index
    at = number >> _SHIFT
    words[at] |= _ONE << np.uint64(number & (_BITS - 1))
    words[_BITS] |= _ONE << np.uint64(at)


@compiled
def _fit_wide(lengths, capacity, state, num_open, rows, closed, is_last):  # type: ignore[no-untyped-def]
    free, open_rows, _, tops, words, spare = state
    width = capacity // NUM_CLASSES + 1
    num_rows, num_closed = num_open, 0
    for at in range(lengths.size):
        length = lengths[at]
        left = capacity - length
        number = length // width if left > 0 else -1
        if left > 0 and (tops[number] < 0 or free[tops[number]] < length):
            number = _fullest_from(words, number + 1)
        if number >= 0:
            index = _take(state, number)
            row = open_rows[index]
            left = free[index] - length
            if left == 0:
                free[index] = -1
                num_open -= 1
                spare[free.size - num_open - 1] = index
        else:
            row = num_rows
            num_rows += 1
            if left > 0:
                if num_open == free.size:
                    index = _take(state, _fullest_from(words, 0))
                    closed[open_rows[index]] = num_closed
                    num_closed += 1
                else:
                    index = spare[free.size - num_open - 1]
                    num_open += 1
                open_rows[index] = row
        if left > 0:
            free[index] = left
            _put(state, index, left // width)
        rows[at] = row
        if left == 0:
            closed[row] = num_closed
            num_closed += 1
    if is_last:
        for index in range(free.size):
            if free[index] >= 0:
                closed[open_rows[index]] = num_closed
                num_closed += 1
                free[index] = -1
    return num_closed
