"""Reads and checks the lines of a journal file.

A line is a JSON object whose first member is the CRC-32 of everything that follows it:
``{"crc32": "1c291ca3", "time": 1700000000.0, ...}``.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from pydantic import ValidationError

from ray_ulysses.tracking.events import Event, event_adapter
from ray_ulysses.validation import ContentError, faults_text

_CHECKSUM_KEY = b'{"crc32": "'
_HEAD_BYTES = len(_CHECKSUM_KEY) + len('01234567", ')


@dataclass(frozen=True, kw_only=True, slots=True)
class DamagedRecord:
    """A line of a journal that is not what was written, or a whole journal file that can't be read.

    Attributes:
        file: Name of the journal file.
        attempt: The attempt that the file belongs to.
        line: Number of the line, from 1; 0 stands for the whole file.
        reason: What is wrong with it.
    """

    file: str
    attempt: int
    line: int
    reason: str

    def __str__(self) -> str:
        line = f", line {self.line}" if self.line else ""
        return f"journal/{self.file}{line}: {self.reason}; it was left out"


@dataclass(slots=True)
class JournalLines:
    """Reads the lines of a journal file from front to back, and continues where it stopped when the file has grown.

    Attributes:
        file: Name of the journal file.
        attempt: The attempt that the file belongs to.
        offset: Bytes read.
        num_lines: Lines read.
        has_checksums: Whether a line had a checksum, so that a line without one is damaged from here on.
    """

    file: str
    attempt: int
    offset: int = 0
    num_lines: int = 0
    has_checksums: bool = False

    def read(self, stream: BinaryIO) -> Iterator[tuple[bytes, Event | DamagedRecord | None]]:
        """Yield each line with its event, or with its damage; None for an event of a kind unknown to this version.

        A last line without a line end that is not a whole record is left out: its writer is still writing it, or died.

        Args:
            stream: The journal file.
        """
        stream.seek(self.offset)
        for line in stream:
            text = line.removesuffix(b"\n")
            found: Event | DamagedRecord | None = None
            if text:
                try:
                    found = parse_line(text, self.attempt, must_have_checksum=self.has_checksums)
                    self.has_checksums = self.has_checksums or text.startswith(_CHECKSUM_KEY)
                except ContentError as error:
                    # The line end of a whole record may be damaged; a writer never leaves one byte in its place.
                    if text is line and not _is_checked(text[:-1]):
                        return
                    number = self.num_lines + 1
                    found = DamagedRecord(file=self.file, attempt=self.attempt, line=number, reason=str(error))
            self.offset += len(line)
            # Empty lines count: one separates a line whose writer died from the next record.
            self.num_lines += 1
            if text:
                yield text, found


def parse_line(line: bytes, attempt: int, *, must_have_checksum: bool) -> Event | None:
    """Return the event of a line; None if a later version has written one of a kind unknown to this version.

    Args:
        line: The line, without its line end.
        attempt: The attempt that the journal file belongs to.
        must_have_checksum: Whether a line without a checksum is damaged; earlier versions wrote none.

    Raises:
        ContentError: The line is damaged; the text explains how.
    """
    is_checked = _is_checked(line)
    if not is_checked and (must_have_checksum or line.startswith(_CHECKSUM_KEY)):
        raise ContentError("its checksum is wrong")
    try:
        event = event_adapter().validate_json(line)
    except ValidationError as error:
        if is_checked and error.errors(include_url=False)[0]["type"] == "union_tag_invalid":
            return None
        raise ContentError(faults_text(error)) from None
    if event.attempt != attempt:
        raise ContentError(f"attempt is {event.attempt}, but the journal file is that of attempt {attempt}")
    return event


def with_checksum(line: bytes) -> bytes:
    """Return a line, which is a JSON object with members, with its checksum in front of them."""
    return _head(line[1:]) + line[1:]


def _is_checked(line: bytes) -> bool:
    return line[:_HEAD_BYTES] == _head(line[_HEAD_BYTES:])


def _head(rest: bytes) -> bytes:
    return b'%s%08x", ' % (_CHECKSUM_KEY, zlib.crc32(rest))
