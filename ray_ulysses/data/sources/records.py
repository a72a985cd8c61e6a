"""Reads the JSON values of files: lines, a list one value at a time, or the object that fills a file.

A file of lines may be read in byte ranges that split no line. A line belongs to the range that it begins in, and is
read to its end even beyond the range. Within a range lines are counted from 1; only the merge knows the number of lines
before it.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import math
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, BinaryIO, cast

import pyarrow as pa
from pydantic_core import from_json

from ray_ulysses.data.sources.files import left_out, path_text, unreadable
from ray_ulysses.data.sources.rows import MOST_BYTES, Rejected, RowError, json_problem, too_large
from ray_ulysses.errors import UserError

PACKED_SUFFIXES = (".gz", ".zst")
ONLY_JSONL = "only .jsonl.gz and .jsonl.zst are read compressed; decompress it, or store its documents as JSON Lines"
"""The reason to leave out any other compressed file."""
_PACKING_MARKS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ": "xz"}
_SKIP_BYTES = 1 << 20
_READ_BYTES = 1 << 20
_FIRST_LINE_BYTES = 1 << 16
_ZSTD_BUFFER_BYTES = 1 << 18
# Errors of `from_json` for text that `json` accepts.
_IS_JSON = re.compile("hex escape|recursion")
_SPACE = re.compile(r"[ \t\n\r]*")
_AFTER_VALUE = frozenset(" \t\n\r,]")

Record = Mapping[str, Any] | Rejected
"""A JSON object, or the reason to leave out what stands in its place."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LineCounts:
    """The lines of one file, or of one range of it."""

    source: str
    num_lines: int
    """Lines that begin there, including blank ones."""
    num_filled: int
    """Lines that are not blank."""
    num_broken: int
    """Filled lines that are not a JSON object."""
    num_before: int = 0
    """Lines of the file before the range; 0 until set by ``number_lines``."""


def number_lines(counts: Sequence[LineCounts | None]) -> tuple[LineCounts | None, ...]:
    """Return the counts of all units, in their order, with ``num_before`` set."""
    seen: Counter[str] = Counter()
    numbered: list[LineCounts | None] = []
    for one in counts:
        numbered.append(None if one is None else replace(one, num_before=seen[one.source]))
        if one is not None:
            seen[one.source] += one.num_lines
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


def byte_ranges(num_bytes: int, unit_bytes: int) -> list[tuple[int, int]]:
    """Return ``[first, last)`` of the fewest equal ranges of at most ``unit_bytes`` (at least 1) that cover a file."""
    count = max(1, -(-num_bytes // max(1, unit_bytes)))
    return list(pairwise(number * num_bytes // count for number in range(count + 1)))


def is_packed(path: str) -> bool:
    """Return whether a file is compressed, by its name."""
    return path.lower().endswith(PACKED_SUFFIXES)


def _opened(path: str | Path) -> AbstractContextManager[BinaryIO]:
    name = str(path).lower()
    if name.endswith(".zst"):
        # Unlike zstandard 0.25, pyarrow reports a truncated file.
        return io.BufferedReader(pa.CompressedInputStream(open(path, "rb"), "zstd"), _ZSTD_BUFFER_BYTES)
    return cast("BinaryIO", gzip.open(path, "rb")) if name.endswith(".gz") else open(path, "rb")


def range_lines(path: str | Path, first: int = 0, last: float = math.inf) -> Iterator[bytes]:
    """Yield the lines of a file that begin in the bytes ``[first, last)``, whole and with their line feeds.

    A line ends with a line feed, or with the file. Only one line is held in memory; of a line above
    ``MOST_BYTES``, only one byte more than that.

    Raises:
        OSError: The file can't be read; EOFError or zlib.error if it is compressed.
    """
    with _opened(path) as file:
        at = 0
        if first:
            # The byte before shows whether a line begins at `first` itself.
            at, part = first - 1, b""
            file.seek(at)
            while at < last and not part.endswith(b"\n"):
                part = file.readline(_SKIP_BYTES)
                if not part:
                    return
                at += len(part)
        while at < last and (line := file.readline(MOST_BYTES + 1)):
            at, part = at + len(line), line
            while len(line) > MOST_BYTES and part and not part.endswith(b"\n") and at < last:
                part = file.readline(_SKIP_BYTES)
                at += len(part)
            yield line


def line_records(path: str, first: int = 0, last: float = math.inf) -> Iterator[tuple[int, Record | None]]:
    """Yield the number of each line of a range, from 1, and its object; None for a blank line.

    Raises:
        UserError: The file can't be read.
    """
    try:
        for number, line in enumerate(range_lines(path, first, last), start=1):
            begins_file = number == 1 and first == 0
            if begins_file:
                line = line.removeprefix(codecs.BOM_UTF8)
            is_blank = not line or line.isspace()
            yield number, None if is_blank else _record(line, path, number, begins_file=begins_file)
    except (OSError, EOFError, zlib.error) as error:
        raise unreadable(path, error, "JSONL" if is_packed(path) else "") from error


def filled_records(path: str) -> Iterator[tuple[int, Record]]:
    """Yield the number and the object of each line of a file that is not blank."""
    return ((number, record) for number, record in line_records(path) if record is not None)


def _record(line: bytes, path: str, number: int, *, begins_file: bool) -> Record:
    if (reason := too_large(line)) is not None:
        return left_out(path, reason, number)
    try:
        # Without a copy of the line, and without a string for each part between two escapes.
        return _object(from_json(line), path, number)
    except ValueError:
        # Falls back to `json`, which also reads lone surrogates and names the reason of a refusal.
        decoded = decoded_text(line, path, number, begins_file=begins_file)
        if isinstance(decoded, Rejected):
            return decoded
        try:
            return _object(json.loads(decoded), path, number)
        except (ValueError, RecursionError) as error:
            return left_out(path, f"not JSON: {json_problem(error)}", number)


def _object(value: Any, path: str, number: int) -> Record:
    return value if isinstance(value, dict) else left_out(path, "not a JSON object", number)


def decoded_text(data: bytes, path: str, offset: int = 0, *, begins_file: bool = True) -> str | Rejected:
    """Return bytes of a file as text, or the reason to leave them out."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        packing = next((name for mark, name in _PACKING_MARKS.items() if data.startswith(mark)), None)
        reason = not_utf8(error) if packing is None or not begins_file else f"compressed with {packing}: {ONLY_JSONL}"
        return left_out(path, reason, offset)


def not_utf8(error: UnicodeDecodeError) -> str:
    """Return the reason to leave out bytes that are not UTF-8."""
    return f"not UTF-8: byte 0x{error.object[error.start]:02x} at offset {error.start}"


def json_records(path: str) -> Iterator[tuple[int, Record]]:
    """Yield the values of a list, the object that fills a file, or the values of its lines, numbered from 1.

    Raises:
        UserError: The file can't be read, or begins as a list and is truncated or damaged.
    """
    number = 0
    try:
        if _is_list(path):
            for number, value in enumerate(array_values(path), start=1):
                yield number, _object(value, path, number)
            return
        records = filled_records(path)
        first = next(records, None)
        if first is None:
            return
        if isinstance(first[1], Rejected) and (whole := _whole_object(path)) is not None:
            yield 1, whole
            return
        yield first
        yield from records
    except RowError as error:
        yield number + 1, left_out(path, f"{error}; the rest of the list is left out with it", number + 1)
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, RecursionError) as error:
        raise unreadable(path, error, "JSON") from error


def _is_list(path: str) -> bool:
    """Return whether a file begins as a JSON list, and not with a line that is a list without objects."""
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


def _whole_object(path: str) -> Record | None:
    """Return the JSON object that fills a file of several lines; None if the file holds anything else.

    Reading ends at the first error, so that little of JSON Lines with a broken first line is held.
    """
    held, found, is_torn = b"", None, False
    with open(path, "rb") as file:
        # Whole lines: only containers continue after a line feed, so a truncated object differs from a broken one.
        while part := file.read(max(_READ_BYTES, len(held))) + file.readline():
            held, is_torn = (held + part).removeprefix(codecs.BOM_UTF8), False
            try:
                _refuse_large(held)
                try:
                    found = from_json(held)
                except ValueError as error:
                    if _IS_JSON.search(str(error)):
                        held += file.read(MOST_BYTES)
                        _refuse_large(held)
                        found = json.loads(held)
                    elif not (is_torn := str(error).startswith("EOF while parsing")):
                        return None
            except RowError as error:
                return left_out(path, str(error), 1)
            except (ValueError, RecursionError):
                return None
    if is_torn:
        return left_out(path, "not JSON: the object has no end", 1)
    return found if isinstance(found, dict) else None


def _refuse_large(data: bytes | str, start: int = 0) -> None:
    if (reason := too_large(data, start)) is not None:
        raise RowError(reason)


def array_values(path: str | Path) -> Iterator[Any]:
    """Yield the values of a file that holds a JSON list, as ``json`` parses them, holding little more than one.

    Raises:
        ValueError: The file holds anything else, which may show only after some values; also UnicodeDecodeError.
        RowError: A value takes too much memory.
        RecursionError: A value is nested too deeply.
        OSError: The file can't be read.
    """
    with open(path, "rb") as file:
        text = _Text(file)
        if text.next_character() != "[":
            raise ValueError("not a JSON list")
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


class _Text:
    """A buffer over the text of a file, which is read as far as needed."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._json = json.JSONDecoder()
        self._held, self._is_whole = "", False
        self.place = 0

    def next_character(self) -> str:
        """Advance to the next character that is not white space, and return it; empty at the end."""
        while True:
            found = _SPACE.match(self._held, self.place)
            assert found is not None, "it also matches an empty text"
            self.place = found.end()
            if self.place < len(self._held):
                return self._held[self.place]
            if not self._more(_READ_BYTES):
                return ""

    def value(self) -> Any:
        """Return the value at the current place, and advance past it."""
        # The buffer doubles for a long value, which is then parsed a few times and not once per megabyte.
        while True:
            _refuse_large(self._held, self.place)
            try:
                found, end = self._json.raw_decode(self._held, self.place)
            except json.JSONDecodeError as error:
                if not self._more(max(_READ_BYTES, len(self._held) - self.place)):
                    # The error's own text gives a place in the buffer, not in the file.
                    raise ValueError(f"a value of its list is truncated or not JSON: {error.msg}") from error
                continue
            # A number may continue beyond the buffer.
            if self._held[end : end + 1] in _AFTER_VALUE or not self._more(_READ_BYTES):
                self.place = end
                return found

    def _more(self, size: int) -> bool:
        """Read more of the file into the buffer; return whether there was more."""
        if self._is_whole:
            return False
        data = self._file.read(size)
        self._is_whole = not data
        self._held = self._held[self.place :] + self._decoder.decode(data, final=self._is_whole)
        self.place = 0
        return not self._is_whole
