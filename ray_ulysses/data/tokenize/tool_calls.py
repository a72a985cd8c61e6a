"""The calls of tools in messages, whose arguments are an object or, as OpenAI writes them, its JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ray_ulysses.data.sources.quarantine import RowError
from ray_ulysses.data.sources.row_values import refuse_deep, strings, utf8_text

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


def other_arguments(messages: Messages) -> list[list[Mapping[str, Any]]]:
    """Return the messages with the arguments of all calls as objects, and as JSON, where that changes them.

    Templates expect an object, JSON, or take either.
    """
    forms = ([_with_arguments(message, form) for message in messages] for form in (_parsed, _as_json))
    return [form for form in forms if form != list(messages)]


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


def _with_arguments(message: Mapping[str, Any], form: Callable[[Any], Any]) -> Mapping[str, Any]:
    calls = [
        with_function(call, arguments=form(call_function(call)["arguments"]))
        if "arguments" in call_function(call)
        else call
        for call in tool_calls(message)
    ]
    return {**message, "tool_calls": calls} if calls else message


def _parsed(arguments: Any) -> Any:
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else None
        refuse_deep(parsed, "arguments")
        for text in strings(parsed):
            # JSON may escape half of a surrogate pair.
            utf8_text(text)
    except (ValueError, RecursionError, RowError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def _as_json(arguments: Any) -> Any:
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, Mapping) else arguments
