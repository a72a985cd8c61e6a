"""Formats counts, sizes, times, tables and paragraphs as human-readable text."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence

from ray_ulysses.logging import indented, one_line

_COUNT_UNITS = ((1e15, "P"), (1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
_GAP = re.compile(r"\S {2,}")


def count(number: float) -> str:
    """Format a count with three significant digits and a unit: ``950``, ``12.3k``, ``8.03B``."""
    for scale, unit in _COUNT_UNITS:
        # Choose the unit after rounding: "1.00M", not "1000k".
        if abs(number) >= scale * 0.9995:
            value = number / scale
            digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
            return f"{value:.{digits}f}{unit}"
    return f"{number:.0f}"


def size(num_bytes: float) -> str:
    """Format a size with three significant digits, in GiB or, below 0.1 GiB, in MiB."""
    value, unit = num_bytes / 2**30, "GiB"
    if value < 0.0995:
        value, unit = value * 1024, "MiB"
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f} {unit}"


def duration(seconds: float) -> str:
    """Format a duration in its two largest units: ``45s``, ``4m12s``, ``3h05m``, ``2d04h``."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours}h{minutes:02d}m"
    days, hours = divmod(hours, 24)
    return f"{days}d{hours:02d}h"


def minutes(seconds: float) -> str:
    """Format an elapsed time in minutes and seconds: ``1:05``."""
    whole = round(seconds)
    return f"{whole // 60}:{whole % 60:02d}"


def percent(share: float) -> str:
    """Format a fraction as a percentage with two decimals."""
    return f"{100 * share:.2f}%"


def as_text(lines: Iterable[str]) -> str:
    """Join lines. Line breaks within a line are marked, so that untrusted text can't start a new line."""
    return "\n".join(map(indented, lines))


def facts(rows: Sequence[tuple[str, str]], indent: str = "  ") -> list[str]:
    """Return a line for each (name, value), with aligned values."""
    width = max((len(name) for name, _ in rows), default=0)
    return [f"{indent}{name:<{width}}  {one_line(value)}".rstrip() for name, value in rows]


def table(header: Sequence[str], rows: Sequence[Sequence[str]], indent: str = "  ") -> list[str]:
    """Return a table's lines. The last column is left-aligned; all other columns are right-aligned."""
    lines = [list(header), *[[one_line(cell) for cell in row] for row in rows]]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    last = len(header) - 1
    return [
        indent
        + "  ".join(cell if column == last else cell.rjust(widths[column]) for column, cell in enumerate(line)).rstrip()
        for line in lines
    ]


def folded(text: str, width: int | None) -> str:
    """Break lines that are longer than ``width`` characters, between words. None changes nothing.

    A continuation line starts below the line's last column, or is indented if that column leaves too little room. A
    word that is longer than a line, such as a path, gets a line of its own and can still be copied.
    """
    return text if width is None else "\n".join(_folded(line, width) for line in text.split("\n"))


def _folded(line: str, width: int) -> str:
    if len(line) <= width:
        return line
    column = max((gap.end() for gap in _GAP.finditer(line) if gap.end() <= width // 2), default=0)
    longest = max(map(len, line[column:].split()))
    indent = column if column and column + longest <= width else len(line) - len(line.lstrip()) + 2
    return textwrap.fill(line, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)
