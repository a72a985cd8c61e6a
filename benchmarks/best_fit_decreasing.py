"""Offline best-fit-decreasing: all pieces are known and sorted before the first is placed.

Rows with the same room left are interchangeable, so a count for each room is all that is kept; the least room that
is enough is found in two levels of bit words. What is returned is exactly what the textbook's method uses.
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

_BITS = 6
_FULL = np.uint64(0xFFFFFFFFFFFFFFFF)


def num_rows(lengths: NDArray[np.integer], capacity: int) -> int:
    """Return the rows that best-fit-decreasing takes.

    Args:
        lengths: Tokens of each piece, at most ``capacity``.
        capacity: Tokens of a row.
    """
    ordered = np.sort(lengths.astype(np.int64))[::-1]
    return int(_place_all(ordered, capacity))


@numba.njit(cache=True)
def _lowest_bit(word):  # type: ignore[no-untyped-def]
    number = 0
    for step in (32, 16, 8, 4, 2, 1):
        mask = (np.uint64(1) << np.uint64(step)) - np.uint64(1)
        if word & mask == 0:
            word >>= np.uint64(step)
            number += step
    return number


@numba.njit(cache=True)
def _next_bit(words, first):  # type: ignore[no-untyped-def]
    """Return the number of the first bit that is set from ``first`` on, or -1."""
    at = first >> _BITS
    if at >= words.size:
        return -1
    word = words[at] & (_FULL << np.uint64(first & 63))
    while word == 0:
        at += 1
        if at == words.size:
            return -1
        word = words[at]
    return (at << _BITS) + _lowest_bit(word)


@numba.njit(cache=True)
def _place_all(ordered, capacity):  # type: ignore[no-untyped-def]
    count = np.zeros(capacity + 1, dtype=np.int64)
    rooms = np.zeros((capacity >> _BITS) + 1, dtype=np.uint64)
    words = np.zeros((rooms.size >> _BITS) + 1, dtype=np.uint64)
    rows = 0
    for length in ordered:
        room = -1
        inside = rooms[length >> _BITS] & (_FULL << np.uint64(length & 63))
        if inside != 0:
            room = (length >> _BITS << _BITS) + _lowest_bit(inside)
        else:
            word = _next_bit(words, (length >> _BITS) + 1)
            if word >= 0:
                room = (word << _BITS) + _lowest_bit(rooms[word])
        if room < 0:
            rows += 1
            room = capacity
        else:
            count[room] -= 1
            if count[room] == 0:
                rooms[room >> _BITS] &= ~(np.uint64(1) << np.uint64(room & 63))
                if rooms[room >> _BITS] == 0:
                    words[room >> _BITS >> _BITS] &= ~(np.uint64(1) << np.uint64((room >> _BITS) & 63))
        left = room - length
        if left > 0:
            count[left] += 1
            rooms[left >> _BITS] |= np.uint64(1) << np.uint64(left & 63)
            words[left >> _BITS >> _BITS] |= np.uint64(1) << np.uint64((left >> _BITS) & 63)
    return rows
