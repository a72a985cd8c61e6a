"""Reads records from files: JSON objects, one per line, per element of a JSON list or per file, and those of FASTA.

JSON Lines and FASTA files may be read in byte ranges. A line, or a FASTA record with its header, belongs to the range
that contains its first byte, and is read completely even if it ends beyond the range. Line numbers start at 1 in each
range, because only the final merge knows the number of lines before the range.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import math
import re
import string
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

PACKED_SUFFIXES = (".gz", ".zst", ".zstd")
ONLY_JSONL = (
    "only .jsonl.gz, .jsonl.zst and packed FASTA are read compressed; decompress it, or convert it to JSON Lines"
)
"""Reason for rejecting compressed files in any other format."""
FASTA_SUFFIXES = tuple(
    f"{kind}{packed}" for kind in (".fa", ".fasta", ".fna", ".faa") for packed in ("", *PACKED_SUFFIXES)
)
_PACKING_MARKS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ": "xz"}
_SKIP_BYTES = 1 << 20
_READ_BYTES = 1 << 20
_FIRST_LINE_BYTES = 1 << 16
_ZSTD_BUFFER_BYTES = 1 << 18
# Errors that `from_json` raises for text that `json` accepts.
_IS_JSON = re.compile("hex escape|recursion")
_SPACE = re.compile(r"[ \t\n\r]*")
_AFTER_VALUE = frozenset(" \t\n\r,]")
_UPPER = bytes.maketrans(string.ascii_lowercase.encode(), string.ascii_uppercase.encode())
_ALL_SPACE = string.whitespace.encode()

Record = Mapping[str, Any] | Rejected
"""A JSON object, or a `Rejected` for any other value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LineCounts:
    """Line counts of one file, or of one byte range of a file."""

    source: str
    num_lines: int
    """Number of lines that begin in the range, including blank lines."""
    num_filled: int
    """Number of lines that are not blank."""
    num_broken: int
    """Number of non-blank lines that are not JSON objects."""
    num_before: int = 0
    """Number of the file's lines before the range, or 0 until ``number_lines`` sets the value."""


def number_lines(counts: Sequence[LineCounts | None]) -> tuple[LineCounts | None, ...]:
    """Return the line counts with ``num_before`` set, given the line counts of all units in unit order."""
    seen: Counter[str] = Counter()
    numbered: list[LineCounts | None] = []
    for one in counts:
        numbered.append(None if one is None else replace(one, num_before=seen[one.source]))
        if one is not None:
            seen[one.source] += one.num_lines
    return tuple(numbered)


def refuse_files_without_objects(counts: Sequence[LineCounts | None]) -> None:
    """Refuse files that contain no JSON object on any line, in any of the units that cover the file.

    Raises:
        UserError: Some files contain no JSON object. The error lists one problem per file.
    """
    problems = []
    for source, of_file in groupby((one for one in counts if one is not None), key=lambda one: one.source):
        ranges = list(of_file)
        num_filled = sum(one.num_filled for one in ranges)
        if num_filled and num_filled == sum(one.num_broken for one in ranges):
            problems.append(
                f"source={path_text(source)}: none of its {num_filled} lines is a JSON object; make it a JSONL file "
                "encoded in UTF-8, with a name ending in .gz or .zst if and only if it is compressed"
            )
    if problems:
        raise UserError(*problems)


def byte_ranges(num_bytes: int, unit_bytes: int) -> list[tuple[int, int]]:
    """Split a file into the fewest equal ranges ``[first, last)`` of at most ``unit_bytes`` bytes (at least 1)."""
    count = max(1, -(-num_bytes // max(1, unit_bytes)))
    return list(pairwise(number * num_bytes // count for number in range(count + 1)))


def is_packed(path: str) -> bool:
    """Return whether the file name has a compression suffix."""
    return path.lower().endswith(PACKED_SUFFIXES)


def opened(path: str | Path) -> AbstractContextManager[BinaryIO]:
    """Open a file for reading, and unpack it if its name has a compression suffix."""
    name = str(path).lower()
    if name.endswith((".zst", ".zstd")):
        # pyarrow reports a truncated file; zstandard 0.25 does not.
        return io.BufferedReader(pa.CompressedInputStream(open(path, "rb"), "zstd"), _ZSTD_BUFFER_BYTES)
    return cast("BinaryIO", gzip.open(path, "rb")) if name.endswith(".gz") else open(path, "rb")


def range_lines(path: str | Path, first: int = 0, last: float = math.inf) -> Iterator[bytes]:
    """Yield the complete lines, including line feeds, whose first byte is in the byte range ``[first, last)``.

    A line ends at a line feed or at the end of the file. Only one line is in memory at a time. A line longer
    than ``MOST_BYTES`` is truncated to one byte more than that limit.

    Raises:
        OSError: The file can't be read.
        EOFError: The compressed file is truncated.
        zlib.error: The compressed file is damaged.
    """
    with opened(path) as file:
        at = 0
        if first:
            # The byte before `first` shows whether a line begins at `first`.
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
    """Yield each line's number in the byte range, from 1, with its record, or with None if the line is blank.

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
    """Yield the number and the record of each nonblank line."""
    return ((number, record) for number, record in line_records(path) if record is not None)


def _record(line: bytes, path: str, number: int, *, begins_file: bool) -> Record:
    if (reason := too_large(line)) is not None:
        return left_out(path, reason, number)
    try:
        # from_json copies neither the line nor the text between two escapes.
        return _object(from_json(line), path, number)
    except ValueError:
        # Fall back to `json`, which accepts lone surrogates and gives a precise reason for a refusal.
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
    """Decode a file's bytes as UTF-8, or return a `Rejected` if the bytes are not valid UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        packing = next((name for mark, name in _PACKING_MARKS.items() if data.startswith(mark)), None)
        reason = not_utf8(error) if packing is None or not begins_file else f"compressed with {packing}: {ONLY_JSONL}"
        return left_out(path, reason, offset)


def not_utf8(error: UnicodeDecodeError) -> str:
    """Return the reason for rejecting bytes that are not valid UTF-8."""
    return f"not UTF-8: byte 0x{error.object[error.start]:02x} at offset {error.start}"


def json_records(path: str) -> Iterator[tuple[int, Record]]:
    """Yield a JSON file's values, numbered from 1: the list's elements, the single object, or one value per line.

    Raises:
        UserError: The file can't be read, or begins as a list but is truncated or damaged.
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
        yield number + 1, left_out(path, f"{error}; the rest of the list is skipped with it", number + 1)
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, RecursionError) as error:
        raise unreadable(path, error, "JSON") from error


def _is_list(path: str) -> bool:
    """Return whether the file is one JSON list, rather than JSON Lines whose first line is a list without objects."""
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
    """Return the single JSON object of a multiline file, or None if the file has any other content.

    Parsing stops at the first error, so a JSON Lines file with a broken first line is not loaded completely.
    """
    held, found, is_torn = b"", None, False
    with open(path, "rb") as file:
        # Read up to a line feed. JSON strings and numbers do not continue after one, so an EOF error means a truncated
        # object.
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
        return left_out(path, "not JSON: the object is not closed", 1)
    return found if isinstance(found, dict) else None


def _refuse_large(data: bytes | str, start: int = 0) -> None:
    if (reason := too_large(data, start)) is not None:
        raise RowError(reason)


def array_values(path: str | Path) -> Iterator[Any]:
    """Yield the elements of a file that is one JSON list, parsed with ``json``, holding about one element in memory.

    Raises:
        ValueError: The file is not one JSON list. The error may come after some elements.
        RowError: An element is too large.
        RecursionError: An element is nested too deeply.
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
                raise ValueError("no comma between two values" if separator else "the list has no end")
            text.place += 1
        if text.next_character():
            raise ValueError("there is content after the JSON list")


class _Text:
    """A text buffer over a file, filled on demand."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._json = json.JSONDecoder()
        self._held, self._is_whole = "", False
        self.place = 0

    def next_character(self) -> str:
        """Advance past white space and return the next character, or an empty string at the end of the file."""
        while True:
            found = _SPACE.match(self._held, self.place)
            assert found is not None, "the pattern matches the empty string"
            self.place = found.end()
            if self.place < len(self._held):
                return self._held[self.place]
            if not self._more(_READ_BYTES):
                return ""

    def value(self) -> Any:
        """Parse the JSON value at the current index and advance past it."""
        # The buffer doubles for a long value, so the value is parsed a few times rather than once per megabyte.
        while True:
            _refuse_large(self._held, self.place)
            try:
                found, end = self._json.raw_decode(self._held, self.place)
            except json.JSONDecodeError as error:
                if not self._more(max(_READ_BYTES, len(self._held) - self.place)):
                    # The error's own message gives an index in the buffer, not in the file.
                    raise ValueError(f"a list element is truncated or not JSON: {error.msg}") from error
                continue
            # A number may continue beyond the buffer.
            if self._held[end : end + 1] in _AFTER_VALUE or not self._more(_READ_BYTES):
                self.place = end
                return found

    def _more(self, size: int) -> bool:
        """Read more of the file into the buffer, and return whether any text was left to read."""
        if self._is_whole:
            return False
        data = self._file.read(size)
        self._is_whole = not data
        self._held = self._held[self.place :] + self._decoder.decode(data, final=self._is_whole)
        self.place = 0
        return not self._is_whole


def fasta_records(path: str, first: int = 0, last: float = math.inf) -> Iterator[tuple[str, bytearray]]:
    """Yield the id and the sequence of each record whose header begins in the byte range ``[first, last)``.

    The id is the header up to the first white space. Letters are in upper case, since lower case marks repeats (soft
    masking). Only one record is in memory at a time. A sequence of more than ``MOST_BYTES`` bytes is truncated to a
    few bytes more than that limit.

    Raises:
        UserError: The file can't be read, or has a sequence before the first header.
    """
    name: str | None = None
    sequence = bytearray()
    is_header, begins_line, at = False, first == 0, first
    try:
        with opened(path) as file:
            if first:
                # The byte before `first` shows whether a line begins at `first`.
                at -= 1
                file.seek(at)
            while part := file.readline(_READ_BYTES):
                is_header = part.startswith(b">") if begins_line else is_header
                if is_header and begins_line:
                    if name is not None:
                        yield name, sequence
                    if at >= last:
                        return
                    name, sequence = (part[1:].split() or [b""])[0].decode("utf-8", "replace"), bytearray()
                elif name is None and at >= last:
                    return
                elif name is not None and not is_header and len(sequence) <= MOST_BYTES:
                    sequence += part.translate(_UPPER, _ALL_SPACE)
                elif first == 0 and name is None and not part.isspace():
                    raise UserError(
                        f"source={path_text(path)}: begins with a sequence, not with a header (>); correct the FASTA "
                        "file, or set --kind=text to read it as text"
                    )
                begins_line = part.endswith(b"\n")
                at += len(part)
            if name is not None:
                yield name, sequence
    except (OSError, EOFError, zlib.error) as error:
        raise unreadable(path, error, "FASTA" if is_packed(path) else "") from error
