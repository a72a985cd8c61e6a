"""Replaces the strings of a conversation by placeholders, to find out which characters of a rendered text are theirs.

A placeholder has a private character for each character of its string, so that a template which copies, cuts or joins
strings writes a text of the same length. The characters in which the two texts differ are the conversation's.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ray_ulysses.data.tokenize.chat_template import Messages, Tools

# Moves the planes 0 and 1 of Unicode to its private planes 15 and 16.
_SHIFT, _NUM_MOVED, _NUM_CODES = 0xF0000, 0x20000, 0x110000
# Templates name most roles that they know. Some write a role between "<|" and "|>" without a comparison.
_ROLES = frozenset(("system", "developer", "user", "assistant", "tool", "function", "observation"))
_WORD = re.compile(r"[\w.-]+")


class Placeholders:
    """Makes placeholders for the strings of conversations.

    A string that a template compares others with is kept: the names of keys and a word that is all of a string, such
    as the ``string`` of a JSON schema's type.

    Args:
        names: The names in the template's expressions.
        literals: The strings in them.
        special: The texts of the tokens that no string may become a part of.
    """

    def __init__(self, names: Collection[str], literals: Collection[str], special: Collection[str]) -> None:
        words = {literal for literal in literals if _WORD.fullmatch(literal)}
        self._keys, self._words, self._roles = words.union(names), words, words | _ROLES
        # A part of a special token is never kept inside a string, since strings may be joined.
        inside = {one for one in literals if one.strip() and not any(one.strip() in token for token in special)}
        alternatives = "|".join(map(re.escape, sorted(inside, key=len, reverse=True)))
        self._inside = re.compile(f"({alternatives})") if inside else None

    def hide(self, messages: Messages, tools: Tools, *, keep_inside: bool) -> tuple[Messages, Tools]:
        """Return a conversation and its tools with placeholders.

        Args:
            messages: The conversation.
            tools: Its tools.
            keep_inside: Keep the template's strings inside of others as well, such as ``</think>`` in a content.
        """
        pattern = self._inside if keep_inside else None
        hidden = [
            {
                key: value if key == "role" and value in self._roles else self._hidden(value, pattern)
                for key, value in message.items()
            }
            for message in messages
        ]
        return hidden, [self._hidden(tool, pattern) for tool in tools]

    def _hidden(self, value: Any, pattern: re.Pattern[str] | None) -> Any:
        if isinstance(value, str):
            if value in self._words:
                return value
            parts = [value] if pattern is None else pattern.split(value)
            parts[::2] = [_translated(part, _tables()[0]) for part in parts[::2]]
            return "".join(parts)
        if isinstance(value, Mapping):
            return {
                key if key in self._keys else self._hidden(key, pattern): self._hidden(item, pattern)
                for key, item in value.items()
            }
        if isinstance(value, Sequence) and not isinstance(value, bytes):
            return [self._hidden(item, pattern) for item in value]
        return value


def shown(text: str) -> str:
    """Return a text with the characters in place of their placeholders."""
    return _translated(text, _tables()[1])


def _translated(text: str, table: NDArray[np.uint32]) -> str:
    translated: NDArray[np.uint32] = table[np.frombuffer(text.encode("utf-32-le"), "<u4")]
    return translated.tobytes().decode("utf-32-le")


@functools.cache
def _tables() -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """Return for each character its placeholder, and for each placeholder its character."""
    hidden, back = np.arange(_NUM_CODES, dtype="<u4"), np.arange(_NUM_CODES, dtype="<u4")
    hidden[:_NUM_MOVED] += _SHIFT
    # A template may strip white space, and JSON escapes control characters, quotes and backslashes.
    for code in range(_NUM_MOVED):
        if code < ord(" ") or chr(code).isspace() or chr(code) in '"\\':
            hidden[code] = code
    back[_SHIFT:] -= _SHIFT
    return hidden, back
