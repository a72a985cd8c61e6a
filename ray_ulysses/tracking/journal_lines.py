"""Reads and checks the lines of a journal file, and corrects a single flipped bit in a line by its checksum.

A line is a JSON object whose first member is the CRC-32 of everything that follows it:
``{"crc32": "1c291ca3", "time": 1700000000.0, ...}``.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Literal

from pydantic import ValidationError

from ray_ulysses.tracking.events import Event, event_adapter
from ray_ulysses.validation import ContentError, faults_text

Outcome = Literal["corrected", "recovered", "lost"]

# Enough for flipped bits; a file that is damaged throughout is not worth minutes.
_MAX_CORRECTIONS = 100
_CHECKSUM_KEY = b'{"crc32": "'
_HEAD_BYTES = len(_CHECKSUM_KEY) + len('01234567", ')
_MAX_CORRECTED_BYTES = 11_000


@dataclass(frozen=True, kw_only=True, slots=True)
class DamagedRecord:
    """A line of a journal that is not what was written, or a whole journal file that can't be read.

    Attributes:
        file: Name of the journal file.
        attempt: The attempt that the file belongs to.
        line: Number of the line, from 1; 0 stands for the whole file.
        reason: What is wrong with it.
        outcome: Whether a flipped bit was corrected by the checksum, the step was recovered from the sums of the next
            checkpoint (except its loss and duration), or the record is lost.
    """

    file: str
    attempt: int
    line: int
    reason: str
    outcome: Outcome

    def __str__(self) -> str:
        outcome = {
            "corrected": "its flipped bit was corrected",
            "recovered": "its step was recovered from the next checkpoint's sums, without loss and duration",
            "lost": "it was left out",
        }
        line = f", line {self.line}" if self.line else ""
        return f"journal/{self.file}{line}: {self.reason}; {outcome[self.outcome]}"


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
        num_corrections = 0
        stream.seek(self.offset)
        for line in stream:
            text = line.removesuffix(b"\n")
            found: list[Event | DamagedRecord | None] = []
            if text:
                try:
                    found.append(parse_line(text, self.attempt, must_have_checksum=self.has_checksums))
                    self.has_checksums = self.has_checksums or text.startswith(_CHECKSUM_KEY)
                except ContentError as error:
                    num_corrections += 1
                    event = _corrected_event(line, self.attempt) if num_corrections <= _MAX_CORRECTIONS else None
                    if event is None and text is line:
                        return
                    found = [self._damaged(error, "lost" if event is None else "corrected")]
                    found += [] if event is None else [event]
            self.offset += len(line)
            # Empty lines count: one separates a line whose writer died from the next record.
            self.num_lines += 1
            yield from ((text, one) for one in found)

    def _damaged(self, error: ContentError, outcome: Outcome) -> DamagedRecord:
        line = self.num_lines + 1
        return DamagedRecord(file=self.file, attempt=self.attempt, line=line, reason=str(error), outcome=outcome)


def parse_line(line: bytes, attempt: int, *, must_have_checksum: bool) -> Event | None:
    """Return the event of a line; None if a later version has written one of a kind unknown to this version.

    Args:
        line: The line, without its line end.
        attempt: The attempt that the journal file belongs to.
        must_have_checksum: Whether a line without a checksum is damaged; earlier versions wrote none.

    Raises:
        ContentError: The line is damaged; the text explains how.
    """
    is_checked = line[:_HEAD_BYTES] == _head(line[_HEAD_BYTES:])
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


def _head(rest: bytes) -> bytes:
    return b'%s%08x", ' % (_CHECKSUM_KEY, zlib.crc32(rest))


def _corrected_event(line: bytes, attempt: int) -> Event | None:
    """Return the event of a line in which one bit was flipped, perhaps that of its line end."""
    text = _corrected(line.removesuffix(b"\n")) if line.endswith(b"\n") else line[:-1]
    try:
        return None if text is None else parse_line(text, attempt, must_have_checksum=True)
    except ContentError:
        return None


def _corrected(line: bytes) -> bytes | None:
    """Return a damaged line as it was before one of its bits was flipped; None if it was damaged otherwise.

    Two different single flips never have the same effect on a CRC-32, and two flips never look like one (its Hamming
    distance is 4 up to 11 kB: P. Koopman, https://users.ece.cmu.edu/~koopman/crc/crc32.html). A longer line, such as
    an overwritten range of a disk leaves, is not corrected: the search would take seconds for each.
    """
    if len(line) > _MAX_CORRECTED_BYTES:
        return None
    head, rest = line[:_HEAD_BYTES], line[_HEAD_BYTES:]
    right = _head(rest)
    num_flips = (int.from_bytes(head) ^ int.from_bytes(right)).bit_count()
    if len(head) == len(right) and num_flips == 1:
        return right + rest
    if not head.startswith(_CHECKSUM_KEY):
        return None
    try:
        wanted = zlib.crc32(rest) ^ int(head[len(_CHECKSUM_KEY) :][:8], 16)
    except ValueError:
        return None
    # The checksum is linear: a flip changes the same bits of it regardless of the line's content.
    zero = zlib.crc32(b"\0")
    effects = [zlib.crc32(bytes([1 << bit])) ^ zero for bit in range(8)]
    for offset in reversed(range(len(rest))):
        if wanted in effects:
            byte = rest[offset] ^ (1 << effects.index(wanted))
            return head + rest[:offset] + bytes([byte]) + rest[offset + 1 :]
        # One byte further from the end, one more zero byte has gone through the register since.
        effects = [zlib.crc32(b"\0", effect) ^ zero for effect in effects]
    return None
