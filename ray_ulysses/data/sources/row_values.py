"""Checks of the values of rows; each refuses what can't be part of a document with the reason."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ray_ulysses.data.sources.quarantine import RowError

MOST_BYTES = 256 << 20
"""The size of the largest document: a line, a value of a JSON list, a cell, or a file that is one text."""
_TOO_LARGE = "larger than a document may be"
TOO_LARGE = f"{_TOO_LARGE}: more than {MOST_BYTES >> 20} MiB"
# Python takes up to 200 bytes for an object that takes six in a file.
_MOST_CONTAINERS = 1 << 23
# Far more levels than messages and tools have, and far fewer than the limits of Python and of templates.
_MAX_DEPTH = 100


def describe_type(value: object) -> str:
    """Return the description of a value of a wrong type."""
    return "missing" if value is None else f"of type {type(value).__name__}"


def json_problem(error: ValueError | RecursionError) -> str:
    """Return the reason why a text could not be parsed as JSON."""
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def too_large(data: bytes | str, start: int = 0) -> str | None:
    """Return the reason to leave out JSON that takes too much memory, from ``start`` on; None if there is none."""
    size = len(data) - start
    if size > MOST_BYTES:
        return TOO_LARGE
    if size > _MOST_CONTAINERS:
        if isinstance(data, bytes):
            containers = data.count(b"[", start) + data.count(b"{", start)
        else:
            containers = data.count("[", start) + data.count("{", start)
        if containers > _MOST_CONTAINERS:
            return f"{_TOO_LARGE}: more than {_MOST_CONTAINERS:,} lists and objects"
    return None


def parse_json(value: str, name: str) -> Any:
    """Return what a text holds as JSON; RowError if it is none."""
    if (reason := too_large(value)) is not None:
        raise RowError(f"the {name} are {reason}")
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise RowError(f"the {name} are no JSON: {json_problem(error)}") from error


def refuse_deep(value: object, name: str) -> None:
    """Refuse a value too deep for recursive functions, with the same text in every process."""
    level = [value]
    for _ in range(_MAX_DEPTH):
        level = [inner for outer in level for inner in _inner(outer) if not isinstance(inner, str | bytes)]
        if not level:
            return
    raise RowError(f"the {name} are nested more than {_MAX_DEPTH} deep")


def _inner(value: object) -> Iterable[object]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, Sequence) else ()


def utf8_text(text: str) -> str:
    """Return a text; RowError if it holds half of a surrogate pair."""
    if text.isascii():
        return text
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RowError(f"a lone surrogate at character {error.start}") from error
    return text


def strings(value: object) -> list[str]:
    """Return every string in a JSON value, keys included."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for pair in value.items() for item in pair for text in strings(item)]
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [text for item in value for text in strings(item)]
    return []
