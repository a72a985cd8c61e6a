"""Replaces the strings of a conversation by placeholders, to find the characters that they add to a rendered text.

A placeholder has a private character for each character of its string, so that a template which copies, cuts or joins
strings writes a text of the same length. The characters in which the two texts differ are the conversation's.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ray_ulysses.data.sources.messages import WEIGHT
from ray_ulysses.data.sources.row_values import strings
from ray_ulysses.data.tokenize.chat_template import Messages, Tools
from ray_ulysses.data.tokenize.turns import REASONING

# Moves the planes 0 and 1 of Unicode to its private planes 15 and 16.
_SHIFT, _NUM_MOVED, _NUM_CODES = 0xF0000, 0x20000, 0x110000
# Some templates write any role between "<|" and "|>". These roles may become a special token so, others may not.
_ROLES = frozenset(
    (
        *("system", "developer", "user", "assistant", "model", "tool", "function", "observation", "ipython"),
        *("environment", "tool_call", "tool_response"),
    )
)
# Transformers copies the reasoning to its other names before it renders.
_FIELDS = frozenset(("role", "content", WEIGHT, *REASONING))
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

    Attributes:
        kept_inside: What may stay inside of strings, from nothing to all of the template's own strings, such as the
            ``</think>`` at which it cuts a content.
    """

    def __init__(self, names: Collection[str], literals: Collection[str], special: Collection[str]) -> None:
        words = {literal for literal in literals if _WORD.fullmatch(literal)}
        self._keys = words.union(names)
        # Templates change the case of the words that they compare, as Gemma's does with "string".
        self._words = {word.lower() for word in words} | _TYPES
        lowered = "\n".join(special).lower()
        self._parts = {word for word in self._words.union(name.lower() for name in self._keys) if word in lowered}
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

        def of_value(text: str) -> str:
            if text.lower() in self._words:
                return text
            parts = [text] if kept is None else kept.split(text)
            parts[::2] = [_translated(part, _tables()[0]) for part in parts[::2]]
            return "".join(parts)

        def of_key(key: str) -> str:
            return key if key in self._keys else of_value(key)

        return _replaced(messages, tools, of_value, of_key)

    def hide_words(self, messages: Messages, tools: Tools) -> Iterator[tuple[Messages, Tools]]:
        """Yield the conversation once for each of its kept words that is a part of a special token, with it replaced.

        A template that only compares the word writes another text then; one that copies it does not.
        """
        others = [{key: value for key, value in message.items() if not _is_role(key, value)} for message in messages]
        for word in sorted(self._parts.intersection(text.lower() for text in strings([*others, *tools]))):

            def hidden(text: str, word: str = word) -> str:
                return _translated(text, _tables()[0]) if text.lower() == word else text

            yield _replaced(messages, tools, hidden, hidden)


def _is_role(key: str, value: Any) -> bool:
    return key == "role" and value.lower() in _ROLES


def _replaced(
    messages: Messages, tools: Tools, of_value: Callable[[str], str], of_key: Callable[[str], str]
) -> tuple[Messages, Tools]:
    """Return a conversation and its tools with other strings, but for known fields and roles of messages."""

    def field(key: str, value: Any) -> tuple[str, Any]:
        kept = value if _is_role(key, value) else _with_strings(value, of_value, of_key)
        return key if key in _FIELDS else of_key(key), kept

    replaced = [dict(field(key, value) for key, value in message.items()) for message in messages]
    return replaced, [_with_strings(tool, of_value, of_key) for tool in tools]


def _with_strings(value: Any, of_value: Callable[[str], str], of_key: Callable[[str], str]) -> Any:
    """Return a JSON value with other strings."""
    if isinstance(value, str):
        return of_value(value)
    if isinstance(value, Mapping):
        return {of_key(key): _with_strings(item, of_value, of_key) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [_with_strings(item, of_value, of_key) for item in value]
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
