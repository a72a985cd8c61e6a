"""Replaces the strings of a conversation by placeholders, to find out which characters of a rendered text are theirs.

A placeholder has a private character for each character of its string, so that a template which copies, cuts or joins
strings writes a text of the same length. The characters in which the two texts differ are the conversation's.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ray_ulysses.data.tokenize.chat_template import Messages, Tools

# Moves the planes 0 and 1 of Unicode to its private planes 15 and 16.
_SHIFT, _NUM_MOVED, _NUM_CODES = 0xF0000, 0x20000, 0x110000
# Some templates write any role between "<|" and "|>", and a tokenizer may have a token for it.
_ROLES = frozenset(("system", "developer", "user", "assistant", "tool", "function", "observation"))
_TYPES = frozenset(("string", "number", "integer", "boolean", "array", "object", "null"))
_WORD = re.compile(r"[\w.-]+")


class Placeholders:
    """Makes placeholders for the strings of conversations.

    A string that a template compares others with is kept: the names of keys and a word that is all of a string, such
    as the ``string`` of a JSON schema's type.

    Args:
        names: The names in the template's expressions.
        literals: The strings in them.
        special: The texts of the tokens that no string may become a part of.
        written: Those of them that the template's own text holds, or that begin and end texts.

    Attributes:
        kept_inside: What may stay inside of strings, from nothing to all of the template's own strings, such as the
            ``</think>`` at which it cuts a content.
    """

    def __init__(
        self, names: Collection[str], literals: Collection[str], special: Collection[str], written: Collection[str]
    ) -> None:
        words = {literal for literal in literals if _WORD.fullmatch(literal)}
        self._keys, self._written = words.union(names), written
        # Templates change the case of what they compare, as Gemma's does with "string".
        self._words = {word.lower() for word in words} | _TYPES
        visible = [one for one in literals if one.strip() and not any(token in one for token in special)]
        # Strings may be joined, so a part of a special token is kept last, and at one end of strings alone.
        parts = {one for one in visible if any(one.strip() in token for token in special)}
        inside = _any_of(one for one in visible if one not in parts)
        forms = (inside, rf"\A{_any_of(parts)}|{inside}", rf"{_any_of(parts)}\Z|{inside}")
        self.kept_inside = (None, *(re.compile(f"({form})") for form in forms))

    def hide(self, messages: Messages, tools: Tools, kept: re.Pattern[str] | None) -> tuple[Messages, Tools]:
        """Return a conversation and its tools with placeholders.

        Args:
            messages: The conversation.
            tools: Its tools.
            kept: One of ``kept_inside``.
        """
        hidden = [
            {
                key: value if key == "role" and self._is_role(value) else self._hidden(value, kept)
                for key, value in message.items()
            }
            for message in messages
        ]
        return hidden, [self._hidden(tool, kept) for tool in tools]

    def _is_role(self, value: str) -> bool:
        """Return whether a role is kept: one may name a token of its own, but none that ends a turn."""
        if value in _ROLES or value.lower() in self._words:
            return True
        return _WORD.fullmatch(value) is not None and not any(value in token for token in self._written)

    def _hidden(self, value: Any, kept: re.Pattern[str] | None) -> Any:
        if isinstance(value, str):
            if value.lower() in self._words:
                return value
            parts = [value] if kept is None else kept.split(value)
            parts[::2] = [_translated(part, _tables()[0]) for part in parts[::2]]
            return "".join(parts)
        if isinstance(value, Mapping):
            return {
                key if key in self._keys else self._hidden(key, kept): self._hidden(item, kept)
                for key, item in value.items()
            }
        if isinstance(value, Sequence) and not isinstance(value, bytes):
            return [self._hidden(item, kept) for item in value]
        return value


def _any_of(literals: Iterable[str]) -> str:
    """Return a pattern of any of some strings, the longest first; of nothing if there are none."""
    return f"(?:{'|'.join(map(re.escape, sorted(literals, key=len, reverse=True))) or '(?!)'})"


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
