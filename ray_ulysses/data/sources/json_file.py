"""Reads JSON files: a list one value at a time, holding little more than the value; and a file of one object."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from pydantic_core import from_json

from ray_ulysses.data.sources.quarantine import RowError
from ray_ulysses.data.sources.row_values import MOST_BYTES, too_large

_READ_BYTES = 1 << 20
_FIRST_LINE_BYTES = 1 << 16
# The errors of `from_json` for text that `json` reads.
_IS_JSON = re.compile("hex escape|recursion")
_SPACE = " \t\n\r"
_AFTER_VALUE = frozenset(_SPACE + ",]")


def array_values(path: str | Path) -> Iterator[Any]:
    """Yield the values of a file that holds a JSON list, as ``json`` parses them.

    Raises:
        ValueError: The file holds anything else, which may show only after some values; also UnicodeDecodeError.
        RowError: A value takes too much memory.
        RecursionError: A value is nested too deeply.
        OSError: The file can't be read.
    """
    with open(path, "rb") as file:
        text = _Text(file)
        if text.next_character() != "[":
            raise ValueError("no JSON list")
        text.place += 1
        if text.next_character() == "]":
            text.place += 1
        else:
            yield text.value()
            while (separator := text.next_character()) == ",":
                text.place += 1
                text.next_character()
                yield text.value()
            if separator != "]":
                raise ValueError("no comma between two values" if separator else "its list has no end")
            text.place += 1
        if text.next_character():
            raise ValueError("something follows the JSON list")


def is_list(path: str | Path) -> bool:
    """Return whether a file begins as a JSON list, other than lines of which the first is a list without objects.

    Raises:
        OSError: The file can't be read.
    """
    with open(path, "rb") as file:
        line = file.readline(_FIRST_LINE_BYTES).removeprefix(codecs.BOM_UTF8)
        while line.isspace():
            line = file.readline(_FIRST_LINE_BYTES)
    if not line.lstrip().startswith(b"["):
        return False
    try:
        return any(isinstance(value, dict) for value in json.loads(line))
    except (ValueError, RecursionError):
        return True


def whole_object(path: str | Path) -> dict[str, Any] | None:
    """Return the JSON object that fills a file of several lines; None if the file holds anything else.

    Reading ends at the first error, so that little of JSON Lines with a broken first line is held.

    Raises:
        OSError: The file can't be read.
        EOFError: It ends within the object.
        RowError: It takes too much memory.
    """
    held, found, is_torn = b"", None, False
    with open(path, "rb") as file:
        # Whole lines, since only containers go on after a line feed: a torn object differs from a broken one.
        while part := file.read(max(_READ_BYTES, len(held))) + file.readline():
            held = (held + part).removeprefix(codecs.BOM_UTF8)
            is_torn = False
            _refuse_large(held)
            try:
                found = from_json(held)
            except ValueError as error:
                if _IS_JSON.search(str(error)):
                    return _loaded_object(held + file.read(MOST_BYTES))
                if not str(error).startswith("EOF while parsing"):
                    return None
                is_torn = True
    if is_torn:
        raise EOFError("the object has no end")
    return found if isinstance(found, dict) else None


def _refuse_large(data: bytes | str, start: int = 0) -> None:
    if (reason := too_large(data, start)) is not None:
        raise RowError(reason)


def _loaded_object(data: bytes) -> dict[str, Any] | None:
    _refuse_large(data)
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


class _Text:
    """The text of a file from a place on, of which as much is held as was needed.

    Attributes:
        place: The place, in what is held.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._json = json.JSONDecoder()
        self._held, self.place = "", 0
        self._is_whole = False

    def next_character(self) -> str:
        """Go to the next character that is no white space, and return it; empty at the end."""
        while True:
            rest = self._held[self.place :].lstrip(_SPACE) if self._is_space() else None
            if rest is None:
                return self._held[self.place]
            self._held, self.place = rest, 0
            if not rest and not self._more(_READ_BYTES):
                return ""

    def value(self) -> Any:
        """Return the value at the place, and go past it."""
        # What is held is doubled for a long value, so that it is parsed a few times and not once per megabyte.
        while True:
            _refuse_large(self._held, self.place)
            try:
                found, end = self._json.raw_decode(self._held, self.place)
            except json.JSONDecodeError as error:
                if not self._more(max(_READ_BYTES, len(self._held))):
                    # Its place is that in what is held.
                    raise ValueError(f"a value of its list is torn or not JSON: {error.msg}") from error
                continue
            # A number may go on in what is not held yet.
            if self._held[end : end + 1] in _AFTER_VALUE or not self._more(_READ_BYTES):
                self.place = end
                return found

    def _is_space(self) -> bool:
        return self.place >= len(self._held) or self._held[self.place] in _SPACE

    def _more(self, size: int) -> bool:
        """Hold more of the file; return whether there was any."""
        if self._is_whole:
            return False
        data = self._file.read(size)
        self._is_whole = not data
        self._held = self._held[self.place :] + self._decoder.decode(data, final=self._is_whole)
        self.place = 0
        return not self._is_whole
