"""Divides a file of lines into byte ranges that split no line, and numbers the lines as in the whole file.

A line belongs to the range that it begins in, and is read to its end even beyond the range. Within a range lines are
counted from 1; only the merge knows the number of lines before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import BinaryIO

from ray_ulysses.data.sources.file_listing import path_text
from ray_ulysses.data.sources.row_values import MOST_BYTES
from ray_ulysses.errors import UserError

_SKIP_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class LineCounts:
    """The lines of one file, or of one range of it.

    Attributes:
        source: The file.
        num_lines: Lines that begin there, including blank ones.
        num_filled: Lines that are not blank.
        num_broken: Filled lines that are not a JSON object.
        num_before: Lines of the file before the range; 0 until set by ``number_lines``.
    """

    source: str
    num_lines: int
    num_filled: int
    num_broken: int
    num_before: int = 0


def byte_ranges(num_bytes: int, unit_bytes: int) -> list[tuple[int, int]]:
    """Return ``[first, last)`` of the fewest equal ranges of at most ``unit_bytes`` (at least 1) that cover a file."""
    count = max(1, -(-num_bytes // max(1, unit_bytes)))
    borders = [number * num_bytes // count for number in range(count + 1)]
    return list(pairwise(borders))


def range_lines(path: str | Path, first: int, last: int) -> Iterator[bytes]:
    """Yield the lines of a file that begin in the bytes ``[first, last)``, whole and with their line feeds.

    A line ends with a line feed, or with the file. Only one line is held in memory, as `bounded_lines` does.

    Raises:
        OSError: The file can't be read.
    """
    with open(path, "rb") as file:
        at = _first_line(file, first, last)
        while at < last and (line := file.readline(MOST_BYTES + 1)):
            at += len(line) + _skip_rest(file, line, last - at)
            yield line


def bounded_lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file; of one that is larger than a document may be, only its first bytes, one too many."""
    while line := file.readline(MOST_BYTES + 1):
        _skip_rest(file, line)
        yield line


def _skip_rest(file: BinaryIO, line: bytes, most: int | None = None) -> int:
    """Go to the end of a line of which only the beginning was read, or past ``most`` bytes; return the bytes."""
    skipped, part = 0, line
    while len(line) > MOST_BYTES and part and not part.endswith(b"\n") and (most is None or skipped < most):
        part = file.readline(_SKIP_BYTES)
        skipped += len(part)
    return skipped


def number_lines(counts: Sequence[LineCounts | None]) -> tuple[LineCounts | None, ...]:
    """Return the counts of all units, in their order, with ``num_before`` set."""
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
    """Refuse files with lines none of which, over all their units, is a JSON object.

    Raises:
        UserError: Names every such file.
    """
    problems = []
    for source, of_file in groupby((one for one in counts if one is not None), key=lambda one: one.source):
        ranges = list(of_file)
        num_filled = sum(one.num_filled for one in ranges)
        if num_filled and num_filled == sum(one.num_broken for one in ranges):
            problems.append(
                f"source={path_text(source)}: none of its {num_filled} lines is a JSON object; is it a JSONL file, in "
                "UTF-8, and compressed only if its name ends with .gz or .zst?"
            )
    if problems:
        raise UserError(*problems)


def _first_line(file: BinaryIO, first: int, last: int) -> int:
    """Seek to the first line that begins at or after ``first``; return ``last`` or more if there is none before it."""
    if first == 0:
        return 0
    # The byte before shows whether a line begins at `first` itself.
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
