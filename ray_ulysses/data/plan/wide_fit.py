"""Best-fit over a thousand open rows, which takes two searches of 64 bits per piece however many rows are open.

Open rows are kept in 4,096 classes of the room that they have left, each a stack. The row that last entered the class
of a piece's own length is taken if it has room enough, as after documents of half a row. Otherwise two levels of bit
words find the fullest class of which every row has room enough, and the row that entered it last is taken. This leaves
at most a 4,096th of a row per piece.

All functions are in this file because Numba's cache is keyed by the file of the outermost function alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ray_ulysses.data.plan.compiled import compiled, inlined

NUM_OPEN_ROWS = 1024
NUM_CLASSES = 4096
_BITS = 64
_SHIFT = 6
_ONE = np.uint64(1)
_ALL = np.uint64(0xFFFFFFFFFFFFFFFF)
assert NUM_CLASSES == _BITS * _BITS

Int64Array = NDArray[np.int64]


def _nothing(size: int) -> Int64Array:
    return np.full(size, -1, dtype=np.int64)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OpenRows:
    """The open rows between two blocks of pieces; the arrays change in place.

    Attributes:
        free: int64 [rows], tokens that fit into the row of an index; -1 for an index without a row.
        rows: int64 [rows], number of each index's row.
        below: int64 [rows], the index that entered the same class before; -1 for none.
        tops: int64 [classes], the index that entered a class last; -1 for none.
        words: uint64 [classes / 64 + 1], a bit per class that has a row, and in the last word a bit per word.
        spare: int64 [rows], indices without a row: the first ``free.size - number of open rows`` of them.
    """

    free: Int64Array = field(default_factory=lambda: _nothing(NUM_OPEN_ROWS))
    rows: Int64Array = field(default_factory=lambda: _nothing(NUM_OPEN_ROWS))
    below: Int64Array = field(default_factory=lambda: _nothing(NUM_OPEN_ROWS))
    tops: Int64Array = field(default_factory=lambda: _nothing(NUM_CLASSES))
    words: NDArray[np.uint64] = field(default_factory=lambda: np.zeros(_BITS + 1, dtype=np.uint64))
    spare: Int64Array = field(default_factory=lambda: np.arange(NUM_OPEN_ROWS, dtype=np.int64)[::-1].copy())

    def fit(self, lengths: Int64Array, capacity: int, rows: Int64Array, closed: Int64Array, *, is_last: bool) -> int:
        """Assign a row to each piece.

        Args:
            lengths: Tokens of each piece, at most ``capacity``.
            capacity: Tokens that a row holds.
            rows: int64 [pieces], receives the number of each piece's row; open rows come first, then new ones.
            closed: int64 [open rows + pieces], receives each row's number by closing; left alone where it stays open.
            is_last: Whether all rows close in the end.

        Returns:
            How many rows closed.
        """
        state = (self.free, self.rows, self.below, self.tops, self.words, self.spare)
        return int(_fit_all(lengths, capacity, state, int((self.free >= 0).sum()), rows, closed, is_last))


@inlined
def _lowest_bit(word):  # type: ignore[no-untyped-def]
    """Return the number of the lowest bit that is set; there is one."""
    number = 0
    for step in (32, 16, 8, 4, 2, 1):
        if word & ((_ONE << np.uint64(step)) - _ONE) == 0:
            word >>= np.uint64(step)
            number += step
    return number


@inlined
def _fullest_from(words, first):  # type: ignore[no-untyped-def]
    """Return the first class from ``first`` on that has a row, or -1."""
    if first >= NUM_CLASSES:
        return -1
    at = first >> _SHIFT
    word = words[at] & (_ALL << np.uint64(first & (_BITS - 1)))
    if word == 0:
        # A shift by 64 is undefined, hence in two.
        others = words[_BITS] & ((_ALL << np.uint64(at)) << _ONE)
        if others == 0:
            return -1
        at = _lowest_bit(others)
        word = words[at]
    return (at << _SHIFT) + _lowest_bit(word)


@inlined
def _take(state, number):  # type: ignore[no-untyped-def]
    """Take the index that entered a class last out of it."""
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
    """Put an index into a class."""
    _, _, below, tops, words, _ = state
    below[index] = tops[number]
    tops[number] = index
    at = number >> _SHIFT
    words[at] |= _ONE << np.uint64(number & (_BITS - 1))
    words[_BITS] |= _ONE << np.uint64(at)


@compiled
def _fit_all(lengths, capacity, state, num_open, rows, closed, is_last):  # type: ignore[no-untyped-def]
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
