"""Checksums of what a plan holds, in groups of entries: ``plan.json`` has them, and each group that is read is checked.

They are of the values, not of a file's bytes, so that a plan has the same ones whatever library wrote it, and before
it is written at all.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ray_ulysses.data.corpus.row_groups import GROUP_ROWS
from ray_ulysses.data.plan.drawing import Fragments
from ray_ulysses.data.plan.packing import Pieces
from ray_ulysses.data.plan.rows import MemoryRows, Rows, RowWeights

Columns = Sequence[NDArray[Any]]
_DIGITS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Checksums:
    """Checksums of what a segment's files hold, group by group, eight hexadecimal digits for each group.

    Attributes:
        rows: Of what the rows of training weigh.
        pieces: Of their pieces.
        evaluation_rows: Of what the rows of evaluation weigh.
        evaluation_pieces: Of their pieces.
        fragments: Of the fragments, those that wait included.
    """

    rows: str
    pieces: str
    evaluation_rows: str
    evaluation_pieces: str
    fragments: str


class GroupChecksums:
    """Adds up entries that come in blocks of any size, in groups of ``GROUP_ROWS``."""

    def __init__(self) -> None:
        self._closed: list[str] = []
        self._crcs: list[int] = []
        self._size = 0

    def add(self, columns: Columns) -> None:
        """Take the next entries, whose columns are as they are stored."""
        at, stop = 0, columns[0].size
        while at < stop:
            part = slice(at, min(stop, at + GROUP_ROWS - self._size))
            crcs = self._crcs or [0] * len(columns)
            self._crcs = [
                zlib.crc32(np.ascontiguousarray(column[part]).data, crc)
                for column, crc in zip(columns, crcs, strict=True)
            ]
            self._size += part.stop - at
            at = part.stop
            if self._size == GROUP_ROWS:
                self._close()

    def text(self) -> str:
        """Return the checksums, eight hexadecimal digits for each group, the last of which may be short."""
        if self._size:
            self._close()
        return "".join(self._closed)

    def _close(self) -> None:
        joined = zlib.crc32(np.asarray(self._crcs, dtype="<u4").tobytes())
        self._closed.append(f"{joined:0{_DIGITS}x}")
        self._crcs, self._size = [], 0


def is_group(number: int, columns: Columns, text: str) -> bool:
    """Return whether a group's entries are those that the checksums are of."""
    found = GroupChecksums()
    found.add(columns)
    return found.text() == text[number * _DIGITS : (number + 1) * _DIGITS]


def piece_columns(pieces: Pieces) -> Columns:
    """Return pieces as they are stored."""
    return (
        pieces.document.astype("<u4"),
        pieces.start.astype("<i8", copy=False),
        pieces.length.astype("<i4"),
        pieces.has_next,
    )


def weight_columns(weights: RowWeights) -> Columns:
    """Return what rows weigh as it is stored."""
    return (
        weights.first_piece.astype("<i8", copy=False),
        weights.num_pieces.astype("<i4", copy=False),
        weights.document_tokens.astype("<i4", copy=False),
        weights.supervised.astype("<i4", copy=False),
        weights.sum_squares.astype("<i8", copy=False),
    )


def fragment_columns(fragments: Fragments, waiting: Fragments) -> Columns:
    """Return fragments as they are stored: those that a segment takes up, those that wait, and which is which."""
    columns = [
        np.concatenate([getattr(one, name) for one in (fragments, waiting)]) for name in ("document", "start", "length")
    ]
    return (*columns, np.arange(fragments.size + waiting.size) >= fragments.size)


def segment_checksums(
    train: Rows, pieces: GroupChecksums, evaluation: MemoryRows, fragments: Fragments, waiting: Fragments
) -> Checksums:
    """Return the checksums of a segment, of which the pieces of training are added up already."""
    return Checksums(
        rows=_rows_checksums(train),
        pieces=pieces.text(),
        evaluation_rows=_rows_checksums(evaluation),
        evaluation_pieces=checksums_of(piece_columns(evaluation.all_pieces)),
        fragments=checksums_of(fragment_columns(fragments, waiting)),
    )


def _rows_checksums(rows: Rows) -> str:
    """Return the checksums of what rows weigh, in the order of training."""
    found = GroupChecksums()
    for first in range(0, rows.num_rows, GROUP_ROWS):
        found.add(weight_columns(rows.weights(first, first + GROUP_ROWS)))
    return found.text()


def checksums_of(columns: Columns) -> str:
    """Return the checksums of entries that are there at once."""
    found = GroupChecksums()
    found.add(columns)
    return found.text()
