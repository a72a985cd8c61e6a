"""Encodes events as journal lines, and checks and parses journal lines.

A line is a JSON object whose first member is the CRC-32 of the rest of the line:
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

# Recovery depends on these events, so they must survive a power failure.
_DURABLE = {
    "attempt_started",
    "checkpoint_committed",
    "evaluation",
    "attempt_ended",
    "bad_step",
    "hang",
    "start_failed",
    "run_finished",
    "run_failed",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class DamagedRecord:
    """A damaged journal line, or a journal file that can't be read at all."""

    file: str
    """Name of the journal file."""
    line: int | None
    """Line number, starting at 1; 0 for the entire file, None if the file's lines were not counted."""
    reason: str
    """Description of the damage."""

    def __str__(self) -> str:
        line = ", near an end of the file" if self.line is None else f", line {self.line}" if self.line else ""
        return f"journal/{self.file}{line}: {self.reason}; ignored"


def encode_record(fields: Mapping[str, Any]) -> tuple[Event, bytes]:
    """Return an event, given its fields and optional extra ones, as readers will parse it, and its complete line."""
    line = encode_event(fields)
    try:
        found = read_json(event_adapter(), line)
    except ContentError as error:
        raise AssertionError(f"journal event {fields!r} can't be read back: {error}") from error
    return found, with_checksum(line) + b"\n"


def is_durable(event: Event) -> bool:
    """Return whether an event must be synced to disk as soon as it is recorded."""
    return event.event in _DURABLE


def encode_event(fields: Mapping[str, Any]) -> bytes:
    """Encode an event as a JSON object, with non-finite numbers as strings ("nan", "inf")."""
    return json.dumps(_writable(fields), allow_nan=False).encode()


def _writable(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, str):
        # Readers reject lone surrogates, which come from undecodable file names in error messages.
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, Mapping):
        return {key: _writable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_writable(item) for item in value]
    return value


def with_checksum(line: bytes) -> bytes:
    """Insert a checksum as the first member of a JSON object, which must not be empty."""
    return _head(line[1:]) + line[1:]


def has_checksum(line: bytes) -> bool:
    """Return whether a line, without its newline, begins with the correct checksum."""
    return line[:_HEAD_BYTES] == _head(line[_HEAD_BYTES:])


def _head(rest: bytes) -> bytes:
    return b'{"crc32": "%08x", ' % zlib.crc32(rest)


def parse_line(line: bytes, attempt: int) -> Event | None:
    """Parse a line; return None for an event kind that this version does not know.

    Args:
        line: The line, without its newline.
        attempt: The attempt that the journal file belongs to.

    Raises:
        ContentError: The line is damaged. The message describes the damage.
    """
    if not has_checksum(line):
        raise ContentError("the checksum is wrong")
    try:
        event = event_adapter().validate_json(line)
    except ValidationError as error:
        if error.errors(include_url=False)[0]["type"] == "union_tag_invalid":
            return None
        raise ContentError(faults_text(error)) from None
    if event.attempt != attempt:
        raise ContentError(f"attempt is {event.attempt}, but the journal file belongs to attempt {attempt}")
    return event
