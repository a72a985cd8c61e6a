"""Lines of a journal's segment: each one's checksum and fields are checked, and what is damaged is named."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Literal

from pydantic import ValidationError

from ray_ulysses.tracking.events import Event, event_adapter
from ray_ulysses.tracking.line_checksum import corrected, has_checksum, is_intact
from ray_ulysses.validation import ContentError, faults_text

Outcome = Literal["corrected", "recovered", "lost"]

# Enough for flipped bits; a file that is damaged all over is not worth minutes.
_MOST_TRIES = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class DamagedRecord:
    """A line of a journal that is not what was written, or all of a segment in whose place no file stands.

    Attributes:
        segment: Name of its file.
        attempt: The attempt whose file it is.
        line: Number of its line, from 1; 0 stands for the whole segment.
        reason: What is wrong with it.
        outcome: Whether a flipped bit in it was corrected by its checksum, its step was recovered from the sums of the
            next checkpoint (all but its loss and its duration), or it is lost.
    """

    segment: str
    attempt: int
    line: int
    reason: str
    outcome: Outcome

    def __str__(self) -> str:
        outcome = {
            "corrected": "its flipped bit was corrected",
            "recovered": "its step was recovered from the next checkpoint's sums, without loss and duration",
            "lost": "it was set aside",
        }
        line = f", line {self.line}" if self.line else ""
        return f"journal/{self.segment}{line}: {self.reason}; {outcome[self.outcome]}"


@dataclass(slots=True)
class SegmentLines:
    """Reads a segment's lines from front to back, and goes on where it has stopped when the file has grown.

    Attributes:
        segment: Name of its file.
        attempt: The attempt whose file it is.
        offset: Bytes that have been read.
        num_lines: Lines that have been read.
        has_checksums: Whether a line had a checksum, so that one without is damaged from here on.
    """

    segment: str
    attempt: int
    offset: int = 0
    num_lines: int = 0
    has_checksums: bool = False

    def read(self, stream: BinaryIO) -> Iterator[tuple[bytes, Event | DamagedRecord | None]]:
        """Yield each line with its event, or with what is wrong with it; None for a kind that is unknown here.

        A last line without its end is left out if it is no record, since its writer may still be at it, or has died
        there.

        Args:
            stream: The segment's file.
        """
        num_tries = 0
        stream.seek(self.offset)
        for line in stream:
            text = line.removesuffix(b"\n")
            found: list[Event | DamagedRecord | None] = []
            if text:
                try:
                    found.append(parse_line(text, self.attempt, must_have_checksum=self.has_checksums))
                    self.has_checksums = self.has_checksums or has_checksum(text)
                except ContentError as error:
                    num_tries += 1
                    event = _try_to_correct(line, self.attempt) if num_tries <= _MOST_TRIES else None
                    if event is None and text is line:
                        return
                    found = [self._damaged(error, "lost" if event is None else "corrected")]
                    found += [] if event is None else [event]
            self.offset += len(line)
            # An empty line keeps the rest of a line, whose writer died, from the next record.
            self.num_lines += 1
            yield from ((text, one) for one in found)

    def _damaged(self, error: ContentError, outcome: Outcome) -> DamagedRecord:
        number = self.num_lines + 1
        return DamagedRecord(
            segment=self.segment, attempt=self.attempt, line=number, reason=str(error), outcome=outcome
        )


def parse_line(line: bytes, attempt: int, *, must_have_checksum: bool) -> Event | None:
    """Return the event of a line without its end; None if a later version has written one of a kind unknown here.

    Args:
        line: The line.
        attempt: The attempt whose segment it stands in.
        must_have_checksum: Whether it is damaged without a checksum; versions that wrote none are read too.

    Raises:
        ContentError: It is damaged; the text says how.
    """
    is_checked = is_intact(line)
    if not is_checked and (must_have_checksum or has_checksum(line)):
        raise ContentError("its checksum is wrong")
    try:
        event = event_adapter().validate_json(line)
    except ValidationError as error:
        if is_checked and error.errors(include_url=False)[0]["type"] == "union_tag_invalid":
            return None
        raise ContentError(faults_text(error)) from None
    if event.attempt != attempt:
        raise ContentError(f"attempt is {event.attempt}, but it stands in a segment of attempt {attempt}")
    return event


def _try_to_correct(line: bytes, attempt: int) -> Event | None:
    """Return the event of a line of which one bit was flipped, perhaps in its end."""
    text = corrected(line.removesuffix(b"\n")) if line.endswith(b"\n") else line[:-1]
    try:
        return None if text is None else parse_line(text, attempt, must_have_checksum=True)
    except ContentError:
        return None
