"""Checksums of what a plan holds, by groups of entries: stored in ``plan.json``, and checked when a group is read.

They cover the values and not a file's bytes, so they do not depend on the library that wrote the file, and are known
before it is written.
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
from ray_ulysses.data.plan.rows import MemoryRows, Rows

_DIGITS = 8
_Arrays = Sequence[NDArray[Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Checksums:
    """Checksums of a segment's files, eight hexadecimal digits per group of entries.

    Attributes:
        rows: Of the training rows' token counts.
        pieces: Of their pieces.
        evaluation_rows: Of the evaluation rows' token counts.
        evaluation_pieces: Of their pieces.
        fragments: Of the fragments, including those that wait.
    """

    rows: str
    pieces: str
    evaluation_rows: str
    evaluation_pieces: str
    fragments: str


class GroupChecksums:
    """Accumulates entries, which come in blocks of any size, into checksums of ``GROUP_ROWS`` entries each."""

    def __init__(self) -> None:
        self._closed: list[str] = []
        self._crcs: list[int] = []
        self._size = 0

    def add(self, columns: _Arrays) -> None:
        """Append entries, whose columns have their types on disk."""
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
        """Return the checksums; the last group may be short."""
        if self._size:
            self._close()
        return "".join(self._closed)

    def _close(self) -> None:
        joined = zlib.crc32(np.asarray(self._crcs, dtype="<u4").tobytes())
        self._closed.append(f"{joined:0{_DIGITS}x}")
        self._crcs, self._size = [], 0


def is_group(number: int, columns: _Arrays, text: str) -> bool:
    """Return whether a group's entries match their checksum."""
    return checksums_of(columns) == text[number * _DIGITS : (number + 1) * _DIGITS]


def fragment_columns(fragments: Fragments, waiting: Fragments) -> _Arrays:
    """Return fragments as stored: those that a segment takes up, then those that wait, and a flag for the latter."""
    joined = Fragments.join([fragments, waiting])
    return (*joined.columns, np.arange(joined.size) >= fragments.size)


def segment_checksums(
    train: Rows, train_pieces: GroupChecksums, evaluation: MemoryRows, fragments: Fragments, waiting: Fragments
) -> Checksums:
    """Return the checksums of a segment; those of the training pieces were accumulated during packing."""
    assert evaluation.all_pieces is not None
    return Checksums(
        rows=_rows_checksums(train),
        pieces=train_pieces.text(),
        evaluation_rows=_rows_checksums(evaluation),
        evaluation_pieces=checksums_of(evaluation.all_pieces.stored()),
        fragments=checksums_of(fragment_columns(fragments, waiting)),
    )


def _rows_checksums(rows: Rows) -> str:
    found = GroupChecksums()
    for first in range(0, rows.num_rows, GROUP_ROWS):
        found.add(rows.stats(first, first + GROUP_ROWS).stored())
    return found.text()


def checksums_of(columns: _Arrays) -> str:
    """Return the checksums of entries that are in memory as a whole."""
    found = GroupChecksums()
    found.add(columns)
    return found.text()
