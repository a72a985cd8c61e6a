"""A text that attacks a terminal, and what it has done to what a command printed."""

from __future__ import annotations

import re

FORGED = "error: forged"
ATTACK = (
    "a\x1b]52;c;ZXZpbA==\x07\x1b[2J\x1b[31m\x1b]8;;http://evil\x1b\\b\x9b31m\x90q\x9c\x7f\x08\x00\rerror: forged"
    "\u202ecod\u2066x\u200e\u200b\ufeff\xad\U000e0041\u2028error: forged\u2029\x85error: forged\x0b\x0c"
    f"[red]é中[/red][link=http://evil]\n{FORGED}\r\n{FORGED}\n"
)
"""Escapes of a terminal, control characters of both sets, marks of direction, invisible letters, markup, and lines."""

_RAW = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\U000e0001-\U000e007f]"
)


def faults_of(said: bytes) -> list[str]:
    """Return what reached the terminal as it is: each control or invisible character, and each forged line."""
    text = said.decode(errors="surrogateescape")
    return [*map(repr, sorted(set(_RAW.findall(text)))), *re.findall(rf"^\W?{FORGED}.*", text, re.MULTILINE)]
