"""One file of lines as many units: byte ranges that never cut a line, and line numbers that are those of the file.

A line belongs to the range that it begins in, and is read to its end wherever that is. Within a range lines are
counted from 1; only the merge knows how many the ranges before it hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import BinaryIO

from ray_ulysses.data.sources.file_listing import path_text
from ray_ulysses.errors import UserError

_SKIP_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class LineCounts:
    """The lines of one file, or of one range of it.

    Attributes:
        source: The file.
        num_lines: Lines that begin there, blank ones included.
        num_filled: Those that are not blank.
        num_broken: Those of the filled that are no JSON object.
        num_before: Lines of the file before the range; 0 until ``number_lines`` has seen all ranges.
    """

    source: str
    num_lines: int
    num_filled: int
    num_broken: int
    num_before: int = 0


def cut_bytes(num_bytes: int, unit_bytes: int) -> list[tuple[int, int]]:
    """Return ``[first, last)`` of the fewest equal ranges of at most ``unit_bytes`` (at least 1) that cover a file."""
    count = max(1, -(-num_bytes // max(1, unit_bytes)))
    borders = [number * num_bytes // count for number in range(count + 1)]
    return list(pairwise(borders))


def range_lines(path: str | Path, first: int, last: int) -> Iterator[bytes]:
    """Yield the lines of a file that begin at the bytes ``[first, last)``, each whole and with its line feed.

    A line ends with a line feed, or with the file. No more is held than one line of the range.

    Raises:
        OSError: The file can't be read.
    """
    with open(path, "rb") as file:
        at = _first_line(file, first, last)
        while at < last and (line := file.readline()):
            at += len(line)
            yield line


def number_lines(counts: Sequence[LineCounts | None]) -> tuple[LineCounts | None, ...]:
    """Return the counts of all units, in their order, with the lines of the same file before each."""
    seen: dict[str, int] = {}
    numbered: list[LineCounts | None] = []
    for one in counts:
        if one is None:
            numbered.append(None)
            continue
        before = seen.get(one.source, 0)
        seen[one.source] = before + one.num_lines
        numbered.append(replace(one, num_before=before))
    return tuple(numbered)


def refuse_files_without_objects(counts: Sequence[LineCounts | None]) -> None:
    """Refuse files that have lines, and no JSON object in any of them over all their units.

    Raises:
        UserError: Names every such file.
    """
    problems = []
    for source, of_file in groupby((one for one in counts if one is not None), key=lambda one: one.source):
        ranges = list(of_file)
        num_filled = sum(one.num_filled for one in ranges)
        if num_filled and num_filled == sum(one.num_broken for one in ranges):
            problems.append(
                f"source={path_text(source)}: none of its {num_filled} lines is a JSON object; is it a JSONL file?"
            )
    if problems:
        raise UserError("\n".join(problems))


def _first_line(file: BinaryIO, first: int, last: int) -> int:
    """Go to the first line that begins at or after ``first``; return a place from ``last`` on where none does."""
    if first == 0:
        return 0
    # The byte before tells whether a line begins at `first` itself.
    at = first - 1
    file.seek(at)
    while at < last:
        part = file.readline(_SKIP_BYTES)
        if not part:
            return last
        at += len(part)
        if part.endswith(b"\n"):
            return at
    return last
