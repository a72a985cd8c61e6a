"""The lines of a journal file: how an event is written, and how a line is checked and read.

A line is a JSON object whose first member is the CRC-32 of everything that follows it:
``{"crc32": "1c291ca3", "time": 1700000000.0, ...}``.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from ray_ulysses.tracking.events import Event, event_adapter
from ray_ulysses.validation import ContentError, faults_text, read_json

_HEAD_BYTES = len('{"crc32": "01234567", ')

# Recovery reads these, so they must survive a power failure.
_DURABLE = {
    "attempt_started",
    "checkpoint_committed",
    "attempt_ended",
    "bad_step",
    "hang",
    "start_failed",
    "run_finished",
    "run_failed",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class DamagedRecord:
    """A line of a journal that is not what was written, or a whole journal file that can't be read."""

    file: str
    """Name of the journal file."""
    line: int | None
    """Number of the line, from 1; 0 for the whole file, None for a line of a file whose lines were not counted."""
    reason: str
    """What is wrong with it."""

    def __str__(self) -> str:
        line = ", near an end of it" if self.line is None else f", line {self.line}" if self.line else ""
        return f"journal/{self.file}{line}: {self.reason}; it was left out"


def encode_record(fields: Mapping[str, Any]) -> tuple[Event, bytes]:
    """Return an event as it will be read back, and its line in a journal file, with checksum and line end.

    Args:
        fields: The event's fields, and more.
    """
    line = encode_event(fields)
    try:
        found = read_json(event_adapter(), line)
    except ContentError as error:
        raise AssertionError(f"journal event {fields!r} can't be read back: {error}") from error
    return found, with_checksum(line) + b"\n"


def is_durable(event: Event) -> bool:
    """Return whether an event must survive a power failure as soon as it is recorded."""
    return event.event in _DURABLE


def encode_event(fields: Mapping[str, Any]) -> bytes:
    """Return an event as a JSON object; numbers that JSON does not have become their names ("nan", "inf")."""
    return json.dumps(_writable(fields), allow_nan=False).encode()


def _writable(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, str):
        # Lone surrogates, as in undecodable file names in the texts of errors, are rejected by readers.
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, Mapping):
        return {key: _writable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_writable(item) for item in value]
    return value


def with_checksum(line: bytes) -> bytes:
    """Return a line, which is a JSON object with members, with its checksum in front of them."""
    return _head(line[1:]) + line[1:]


def has_checksum(line: bytes) -> bool:
    """Return whether a line, without its line end, begins with the checksum of its rest."""
    return line[:_HEAD_BYTES] == _head(line[_HEAD_BYTES:])


def _head(rest: bytes) -> bytes:
    return b'{"crc32": "%08x", ' % zlib.crc32(rest)


def parse_line(line: bytes, attempt: int) -> Event | None:
    """Return the event of a line; None if a later version has written one of a kind unknown to this version.

    Args:
        line: The line, without its line end.
        attempt: The attempt that the journal file belongs to.

    Raises:
        ContentError: The line is damaged; the text explains how.
    """
    if not has_checksum(line):
        raise ContentError("its checksum is wrong")
    try:
        event = event_adapter().validate_json(line)
    except ValidationError as error:
        if error.errors(include_url=False)[0]["type"] == "union_tag_invalid":
            return None
        raise ContentError(faults_text(error)) from None
    if event.attempt != attempt:
        raise ContentError(f"attempt is {event.attempt}, but the journal file is that of attempt {attempt}")
    return event
