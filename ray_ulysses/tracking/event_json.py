"""Encodes an event of a journal as JSON, and as the line that a journal file holds."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from ray_ulysses.tracking.events import Event, event_adapter
from ray_ulysses.tracking.journal_lines import with_checksum
from ray_ulysses.validation import ContentError, read_json

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
