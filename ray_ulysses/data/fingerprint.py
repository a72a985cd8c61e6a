"""A stable hash of JSON values, which identifies corpora, plans and sources."""

from __future__ import annotations

import hashlib
import json


def stable_hash(value: object) -> str:
    """Return 32 hexadecimal digits that depend only on the JSON form of ``value``."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:32]
