"""The calls of tools in messages, whose arguments are an object or, as OpenAI writes them, its JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Messages = Sequence[Mapping[str, Any]]


def call_function(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the name and the arguments of a call: its ``function``, or the call itself."""
    function = call.get("function")
    return function if isinstance(function, Mapping) else call


def with_function(call: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    """Return a call with other fields of its function."""
    changed = {**call_function(call), **fields}
    return {**call, "function": changed} if isinstance(call.get("function"), Mapping) else changed


def tool_calls(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the calls of a message."""
    calls = message.get("tool_calls")
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        return []
    return [call for call in calls if isinstance(call, Mapping)]


def other_arguments(messages: Messages) -> list[Mapping[str, Any]] | None:
    """Return the messages with the arguments of calls in their other form, or None if there are none.

    Templates expect an object, JSON, or take either.
    """
    changed = [_with_other_arguments(message) for message in messages]
    return changed if changed != list(messages) else None


def has_quoted_arguments(messages: Messages, text: str) -> bool:
    """Return whether JSON arguments were written into a text as a JSON string, with all their quotes escaped."""
    for message in messages:
        for arguments in (call_function(call).get("arguments") for call in tool_calls(message)):
            if (
                isinstance(arguments, str)
                and arguments not in text
                and json.dumps(arguments, ensure_ascii=False) in text
            ):
                return True
    return False


def _with_other_arguments(message: Mapping[str, Any]) -> Mapping[str, Any]:
    calls = [_other(call) for call in tool_calls(message)]
    return {**message, "tool_calls": calls} if calls else message


def _other(call: Mapping[str, Any]) -> Mapping[str, Any]:
    arguments = call_function(call).get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            return call
        return with_function(call, arguments=parsed) if isinstance(parsed, dict) else call
    if isinstance(arguments, Mapping):
        return with_function(call, arguments=json.dumps(arguments, ensure_ascii=False))
    return call
