"""Encodes an event of a journal as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


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
