"""Packing pieces into rows: windowed online best-fit, in one pass and constant memory for its state."""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np
from numpy.typing import NDArray

NUM_OPEN_BINS = 64
_ROW_BITS = 40


def best_fit(lengths: NDArray[np.int64], capacity: int, num_open: int = NUM_OPEN_BINS) -> NDArray[np.int64]:
    """Assign each piece, in the order given, to the open row that it leaves fullest.

    Where it fits into none, a new row is opened; beyond ``num_open`` open rows the fullest one is closed.
    Each piece is placed when it is met, so the result depends on the order and the lengths alone. A piece of
    full length never meets an open row.

    Args:
        lengths: int64, each in ``[1, capacity]``.
        capacity: Tokens a row holds.
        num_open: Rows that may be open at once.

    Returns:
        int64, the row of each piece; rows are numbered from 0 in the order in which they were opened.
    """
    if lengths.size == 0:
        return np.empty(0, dtype=np.int64)
    assert int(lengths.min()) >= 1 and int(lengths.max()) <= capacity, "every piece must fit into a row"
    rows = []
    # Open rows as one sorted list of free << _ROW_BITS | row: best fit is a bisection, which on a list this
    # short costs a fraction of what one numpy operation over 64 bins does.
    open_rows: list[int] = []
    num_rows = 0
    mask = (1 << _ROW_BITS) - 1
    for length in lengths.tolist():
        at = bisect_left(open_rows, length << _ROW_BITS)
        if at < len(open_rows):
            key = open_rows.pop(at)
            row, free = key & mask, (key >> _ROW_BITS) - length
        else:
            row, free = num_rows, capacity - length
            num_rows += 1
            if free and len(open_rows) == num_open:
                del open_rows[0]
        if free:
            insort(open_rows, free << _ROW_BITS | row)
        rows.append(row)
    return np.asarray(rows, dtype=np.int64)


def split_documents(
    documents: NDArray[np.int64], lengths: NDArray[np.int64], capacity: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Cut documents into pieces of at most ``capacity`` tokens; every token but the first is a label once.

    A piece whose document goes on takes the next token as its last label, so pieces share no input token and
    lose no target. Where a single token would remain, it has been a label already and has none of its own: it
    is no piece. A document of one token has no target and gives no piece.

    Args:
        documents: int64, numbers of the documents in the wanted order.
        lengths: int64, the length of each of them.
        capacity: Most tokens a piece.

    Returns:
        Document, start, length and whether a next label exists, of each piece in the order of the documents.
    """
    counts = -(-(lengths - 1) // capacity)
    owners = np.repeat(np.arange(documents.size), counts)
    firsts = np.cumsum(counts) - counts
    starts = (np.arange(owners.size) - firsts[owners]) * capacity
    sizes = np.minimum(capacity, lengths[owners] - starts)
    return documents[owners], starts, sizes, starts + sizes < lengths[owners]
