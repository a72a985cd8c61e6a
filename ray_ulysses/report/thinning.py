"""Reduces a curve of a million points to what a picture can show, without losing an extreme (pure)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

COLUMNS = 480
"""Columns of a picture: a curve keeps at most four points in each."""


def thin(x: Floats, y: Floats, columns: int = COLUMNS) -> tuple[Floats, Floats]:
    """Return the first, lowest, highest and last point of each column of a picture, in their order.

    A line through them covers the same pixels as one through all points, so that no spike is lost. Points whose value
    is not finite are left out; `not_finite` returns them.

    Args:
        x: Ascending.
        y: The values, one for each of ``x``.
        columns: Columns of equal width between the lowest and the highest ``x``.
    """
    finite = np.isfinite(x) & np.isfinite(y)
    x, y = x[finite], y[finite]
    if len(x) <= 4 * columns:
        return x, y
    width = (x[-1] - x[0]) or 1.0
    column = np.minimum(((x - x[0]) / width * columns).astype(np.int64), columns - 1)
    starts = np.flatnonzero(np.append(True, np.diff(column) > 0))
    ends = np.append(starts[1:], len(x)) - 1
    # By column and then by value: the lowest of a column comes first, and the highest last.
    order = np.lexsort((y, column))
    keep = np.unique(np.concatenate((starts, ends, order[starts], order[ends])))
    return x[keep], y[keep]


def not_finite(x: Floats, y: Floats, columns: int = COLUMNS) -> Floats:
    """Return where a value is infinite or not a number, at most once for each column of a picture."""
    found = x[np.isfinite(x) & ~np.isfinite(y)]
    if len(found) <= columns:
        return found
    width = (found[-1] - found[0]) or 1.0
    column = np.minimum(((found - found[0]) / width * columns).astype(np.int64), columns - 1)
    return found[np.flatnonzero(np.append(True, np.diff(column) > 0))]
