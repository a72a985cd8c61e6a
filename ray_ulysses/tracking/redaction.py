"""Texts for people, without the password that a tracking URI may hold."""

from __future__ import annotations

import re

_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+@")


def without_secret(text: str) -> str:
    """Return a text in which ``user:password@`` of every URI is stars."""
    return _CREDENTIALS.sub("***@", text)
