"""Makes conversations of the values of rows, in the forms of OpenAI, of ShareGPT, and of TRL's prompts of messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ray_ulysses.data.sources.quarantine import RowError
from ray_ulysses.data.sources.row_values import describe_type, parse_json, refuse_deep, strings, utf8_text

ASSISTANT = "assistant"
WEIGHT = "weight"
"""Of a message: 0 if it is not learned."""
_SYSTEM = "system"
_FUNCTION_CALL = "function_call"
_SENDERS = {
    "human": "user",
    "user": "user",
    "gpt": ASSISTANT,
    "assistant": ASSISTANT,
    _SYSTEM: _SYSTEM,
    "observation": "tool",
    "tool": "tool",
    _FUNCTION_CALL: ASSISTANT,
}
"""The role of each sender of ShareGPT's messages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatRow:
    """A conversation.

    Attributes:
        messages: Each with ``role``, ``content`` (a string) and other fields for the chat template; a ``weight`` of 0
            marks a message of the assistant that is not to be learned.
        tools: The definitions of the tools that the assistant may call, for the chat template.
    """

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()


def conversation(messages: object, tools: object = None, prompt: object = None, system: object = None) -> ChatRow:
    """Return the conversation of a row.

    Args:
        messages: A list of messages, or its JSON: each ``{role, content}``, or ``{from, value}`` as ShareGPT has them.
        tools: The definitions of the tools: a list, or its JSON; None for none.
        prompt: Messages that come first and are not learned; None for none.
        system: The text of a system message before all others; None or empty for none.

    Raises:
        RowError: The values make no conversation.
    """
    first = (
        [] if prompt is None else [_unlearned(message) for message in _messages(prompt, "messages of the prompt", 0)]
    )
    said = (*first, *_messages(messages, "messages", len(first)))
    return ChatRow(messages=(*_system(system, said), *said), tools=_tools(tools))


def _messages(value: object, name: str, first_number: int) -> list[Mapping[str, Any]]:
    if isinstance(value, str):
        value = parse_json(value, name)
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise RowError(f"the {name} are {describe_type(value)}, not a list")
    if not value:
        raise RowError("empty")
    refuse_deep(value, name)
    return [_message(message, number) for number, message in enumerate(value, first_number)]


def _system(value: object, said: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    if value is None or value == "":
        return []
    if not isinstance(value, str):
        raise RowError(f"the system message is {describe_type(value)}, not a string")
    if said[0]["role"] == _SYSTEM:
        raise RowError("it has a system message beside the one of its own column")
    return [{"role": _SYSTEM, "content": utf8_text(value)}]


def _unlearned(message: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**message, WEIGHT: 0} if message["role"] == ASSISTANT else message


def _message(message: object, number: int) -> Mapping[str, Any]:
    """Return a message without null fields, since in Parquet every message has the fields of all."""
    if not isinstance(message, Mapping):
        raise RowError(f"message {number} is {describe_type(message)}, not an object with role and content")
    kept = {key: value for key, value in message.items() if value is not None}
    if "role" not in kept and "from" in kept:
        kept = _from_sharegpt(kept, number)
    role = kept.get("role")
    if not isinstance(role, str) or not role:
        raise RowError(f"message {number} has no role")
    if isinstance(kept.get("content"), list):
        kept["content"] = _joined(kept["content"], f"message {number} ({role})")
    if not isinstance(kept.get("content"), str) and not ("content" not in kept and kept.get("tool_calls")):
        raise RowError(f"message {number} ({role}): the content is {describe_type(kept.get('content'))}, not a string")
    for text in strings(kept):
        utf8_text(text)
    # As in the formats of fine-tuning services, 0 excludes a message of the assistant from the loss.
    weight = kept.pop(WEIGHT, 1)
    if role == ASSISTANT and weight not in (0, 1):
        raise RowError(f"message {number} ({role}): the weight is {weight!r:.40}, neither 0 nor 1")
    return {**kept, WEIGHT: 0} if role == ASSISTANT and weight == 0 else kept


def _from_sharegpt(message: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return a message ``{from, value}`` as one with role and content, or with the call that its value is.

    The names are those of ShareGPT and of LLaMA-Factory (``src/llamafactory/data/converter.py``).
    """
    sender, value = message["from"], message.get("value")
    role = _SENDERS.get(sender) if isinstance(sender, str) else None
    if role is None:
        raise RowError(f"message {number} is from {sender!r:.40}, which is none of {', '.join(_SENDERS)}")
    rest = {key: field for key, field in message.items() if key not in ("from", "value")}
    if sender != _FUNCTION_CALL:
        return {**rest, "role": role, "content": value}
    calls = parse_json(value, f"calls of message {number}") if isinstance(value, str) else value
    refuse_deep(calls, f"calls of message {number}")
    calls = calls if isinstance(calls, list) else [calls]
    for call in calls:
        if not isinstance(call, Mapping) or not isinstance(call.get("name"), str) or "arguments" not in call:
            raise RowError(f"message {number} ({_FUNCTION_CALL}): a call has no name or no arguments")
    functions = [{"name": call["name"], "arguments": call["arguments"]} for call in calls]
    return {**rest, "role": role, "tool_calls": [{"type": "function", "function": one} for one in functions]}


def _joined(parts: Sequence[object], where: str) -> str:
    """Return the text of a content in parts, which must all be text.

    Parts are joined by a space, as Transformers does when it serves a model (5.x, ``cli/serving/utils.py``), so that
    training and serving see the same text.
    """
    texts = []
    for number, part in enumerate(parts):
        if not isinstance(part, Mapping):
            raise RowError(f"{where}: part {number} of the content is {describe_type(part)}, not an object with a type")
        if part.get("type") != "text":
            raise RowError(
                f"{where}: part {number} of the content is {json.dumps(part.get('type'), default=str)}, not text"
            )
        if not isinstance(part.get("text"), str):
            raise RowError(f"{where}: the text of part {number} is {describe_type(part.get('text'))}, not a string")
        texts.append(part["text"])
    return " ".join(texts)


def _tools(value: object) -> tuple[Mapping[str, Any], ...]:
    """Return the definitions of tools: a list of objects, or its JSON; none if it is null or empty."""
    if isinstance(value, str):
        value = parse_json(value, "tools") if value else None
    if value is None:
        return ()
    if not isinstance(value, list):
        raise RowError(f"the tools are {describe_type(value)}, not a list")
    refuse_deep(value, "tools")
    for number, tool in enumerate(value):
        if not isinstance(tool, Mapping):
            raise RowError(f"tool {number} is {describe_type(tool)}, not an object")
    for text in strings(value):
        utf8_text(text)
    return tuple(value)
