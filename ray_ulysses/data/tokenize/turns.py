"""Finds the assistant's turns, and their tool calls, in a rendered chat.

Many templates change earlier turns: they drop a turn's reasoning once the user has replied, or render a different end
after the last turn. At inference, a model generates each turn as the last turn of the conversation. A turn is therefore
learned in a text that begins exactly like the rendering in which the turn is last: in the complete conversation if it
begins like that, otherwise in a separate text. Turns whose renderings are prefixes of the same text share the text,
since a causal model then sees the same context.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ray_ulysses.data.sources.rows import ASSISTANT, RowError, refuse_deep, refuse_surrogates
from ray_ulysses.data.tokenize.chat_template import Messages

# A character that no template contains.
_PROBE = "\u2588"
_THINK, _THOUGHT = "<think>", "</think>"
# Number of trailing characters that identify a turn in another text.
_NUM_LAST = 8
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names of the fields that may contain an assistant message's reasoning."""


Render = Callable[..., str]
"""Renders a conversation's messages, with its tools; ``asks=True`` appends the generation prompt."""
RenderMarked = Callable[[Messages], tuple[str, list[tuple[int, int]]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenChat:
    """A text rendered by the template."""

    text: str
    pieces: tuple[tuple[int, bool, int], ...]
    """Pieces that form the text, each given by the number of messages to render, whether a generation prompt follows,
    and the index of the first character to use."""
    ranges: list[tuple[int, int]] = field(default_factory=list)
    """Character range of each supervised turn."""
    closing: str = ""
    """End of the text after the pieces: a special token that begins the next message, optionally after white space."""
    whole_turns: bool = True
    """Whether each range is a complete turn. A template may mark a turn in several parts."""

    def with_others(self, messages: Messages, render: Render) -> str:
        """Return the text of the same pieces, rendered from other messages."""
        return "".join(render(messages[:stop], asks=asks)[first:] for stop, asks, first in self.pieces) + self.closing


def written_turns(
    messages: Messages, learned: Sequence[int], render: Render, *, special: Sequence[str], must_be_whole: bool
) -> list[WrittenChat]:
    """Return texts that supervise the turns at indices ``learned`` (ascending), each turn in exactly one text.

    ``special`` lists the special tokens' texts. If ``must_be_whole`` is set, no turn may require a separate text.

    Raises:
        RowError: The template refuses the conversation, or omits a part of it.
    """
    whole = render(messages)
    _refuse_unwritten(messages, whole, render)
    texts = [WrittenChat(text=whole, pieces=((len(messages), False, 0),))]
    # Start with the last turn, because a later text is longer and may begin with an earlier one.
    for number in reversed(learned):
        turn = _turn(messages, number, render)
        begin, end = turn.ranges[0]
        _refuse_unwritten_turn(messages[: number + 1], number, turn.text[begin:end], render)
        for one in texts:
            if (stop := _kept(turn.text, one.text, special)) is not None:
                one.ranges.insert(0, (begin, stop))
                break
        else:
            if must_be_whole:
                raise RowError(
                    f"the chat template renders message {number} differently when it is the last message; "
                    "train on it as a separate text (--turns split), or use a template that marks its turns with "
                    "{% generation %}"
                )
            texts.append(_closed(turn, messages, number, render, special))
    return [one for one in reversed(texts) if one.ranges]


def marked_turns(
    messages: Messages,
    learned: Sequence[int],
    render: Render,
    marked: RenderMarked,
    special: Sequence[str],
) -> WrittenChat:
    """Return the complete conversation with the character ranges that the template marks in supervised turns.

    See ``written_turns``. ``marked`` renders the conversation and returns the text and the marked ranges.

    Raises:
        RowError: The template refuses the conversation, omits or does not mark a part of it, or the marks of different
            turns can't be distinguished.
    """
    text, ranges = marked(messages)
    answers = assistant_turns(messages)
    whole = WrittenChat(
        text=text, pieces=((len(messages), False, 0),), ranges=ranges, whole_turns=len(ranges) == len(answers)
    )
    _refuse_unwritten(messages, text, render)
    for number in learned:
        _refuse_unwritten_turn(messages, number, text, render)
    _refuse_unmarked(messages, learned, marked)
    if list(learned) == answers:
        return whole
    chosen: list[tuple[int, int]] = []
    for number in learned:
        borders = [_kept(render(messages[:end]), text, special) if end else 0 for end in (number, number + 1)]
        if borders[0] is None or borders[1] is None:
            raise RowError(
                f"the chat template renders message {number} differently when it is the last message, so its marks "
                "can't be distinguished from other turns' marks; find the turns by rendering (--turns split)"
            )
        # Marks after the last message belong to the last message.
        last = len(text) if number == len(messages) - 1 else borders[1]
        chosen += [(begin, end) for begin, end in ranges if borders[0] <= begin < last]
    return replace(whole, ranges=chosen)


def assistant_turns(messages: Messages) -> list[int]:
    """Return the indices of the assistant messages."""
    return [number for number, message in enumerate(messages) if message["role"] == ASSISTANT]


def _kept(answered: str, text: str, special: Sequence[str]) -> int | None:
    """Return the length of ``answered``, a shorter conversation's text, if ``text`` starts with it; else None.

    A special token after the end token of the last turn (Phi-3's ``<|endoftext|>``) may be missing in ``text``.
    """
    if text.startswith(answered):
        return len(answered)
    for end in special:
        closed = answered.removesuffix(end)
        if closed != answered and closed.rstrip().endswith(tuple(special)) and text.startswith(closed):
            return len(closed)
    return None


def _turn(messages: Messages, number: int, render: Render) -> WrittenChat:
    """Render the conversation up to and including a turn. The turn's range begins after the generation prompt."""
    try:
        asked = render(messages[:number], asks=True)
    except RowError as error:
        if number:
            raise
        raise RowError(
            "the chat template has no generation prompt before message 0, which is from the assistant; put another "
            "message first, or use a template that marks its turns with {% generation %}"
        ) from error
    answered = render(messages[: number + 1])
    whole = (number + 1, False, 0)
    if answered.startswith(asked):
        return WrittenChat(text=answered, pieces=(whole,), ranges=[(len(asked), len(answered))])
    before = render(messages[:number])
    # Render a different answer too, so that characters shared by the prompt and this answer do not count as prompt.
    other = render([*messages[:number], {"role": ASSISTANT, "content": _PROBE}])
    begin = min(_num_common(asked, answered), _num_common(asked, other))
    if begin >= _num_common(asked, before):
        # The generation prompt writes more than the complete turn does, such as the beginning of reasoning.
        return WrittenChat(text=answered, pieces=(whole,), ranges=[(begin, len(answered))])
    prompt = asked.removeprefix(before)
    content = _num_common(answered, other)
    at = answered.rfind(prompt, 0, content)
    if prompt != asked and prompt and at >= 0:
        if at + len(prompt) <= begin:
            # The generation prompt is not written again: the answer continues the previous turn.
            return WrittenChat(text=answered, pieces=(whole,), ranges=[(content, len(answered))])
        # The answer changes the text before it: gpt-oss, for example, drops the reasoning before tool calls. The model
        # answers before that change.
        said = answered[at + len(prompt) :]
        pieces = ((number, True, 0), (number + 1, False, at + len(prompt)))
        return WrittenChat(text=asked + said, pieces=pieces, ranges=[(len(asked), len(asked) + len(said))])
    raise RowError(f"the chat template renders earlier messages differently once message {number} is added")


def _closed(turn: WrittenChat, messages: Messages, number: int, render: Render, special: Sequence[str]) -> WrittenChat:
    """Append the special token that begins the next message, if no other special token ends the turn."""
    said = turn.text[turn.ranges[0][0] :]
    if number + 1 == len(messages) or not said or said.rstrip().endswith(tuple(special)):
        return turn
    try:
        longer = render([*messages[: number + 1], {"role": messages[number + 1]["role"], "content": _PROBE}])
    except RowError:
        return turn
    end = said[-_NUM_LAST:]
    _, is_written, header = longer[: longer.rfind(_PROBE)].rpartition(end)
    bare = header.lstrip()
    token = max((token for token in special if bare.startswith(token)), key=len, default="")
    closing = header[: len(header) - len(bare)] + token if token else ""
    return replace(turn, text=turn.text + closing, closing=closing) if is_written else turn


def _num_common(one: str, other: str) -> int:
    equal = (place for place, (left, right) in enumerate(zip(one, other, strict=False)) if left != right)
    return next(equal, min(len(one), len(other)))


def _refuse_unwritten(messages: Messages, text: str, render: Render) -> None:
    """Refuse a conversation if the template omits a system, user or tool message."""
    contents = _PROBE.join(message.get("content") or "" for message in messages)
    for number, message in enumerate(messages):
        content = message.get("content") or ""
        said = content.strip()
        # Compare the number of occurrences, because a short content may be part of another message.
        if message["role"] == ASSISTANT or not said or text.count(said) >= contents.count(said):
            continue
        # The content may be written in another form, such as JSON.
        if render(_changed(messages, number, content=f"{content}{_PROBE}")) == text:
            raise RowError(f"the chat template omits message {number} ({message['role']})")


def _refuse_unwritten_turn(messages: Messages, number: int, said: str, render: Render) -> None:
    """Refuse a supervised turn if the template omits its content, one of its tool calls, or its reasoning."""
    message = messages[number]
    text: str | None = None

    def is_written(**fields: Any) -> bool:
        nonlocal text
        text = render(messages) if text is None else text
        try:
            return render(_changed(messages, number, **fields)) != text
        except RowError:
            # A template that refuses a value has read the value.
            return True

    calls = _calls(message)
    names = [_function(call).get("name") for call in calls]
    # Reasoning that is stored twice counts once, even if the content also begins with that reasoning.
    reasoning = {value.strip() for name in REASONING if isinstance(value := message.get(name), str)}
    others = [*names, *reasoning, *(_as_json(_function(call).get("arguments")) for call in calls)]
    content = message.get("content")
    answer = content.rpartition(_THOUGHT)[2] if isinstance(content, str) else None

    def is_there(value: str, content: object) -> bool:
        return said.count(value) >= sum(part.count(value) for part in (content, *others) if isinstance(part, str))

    for place, (call, name) in enumerate(zip(calls, names, strict=True)):
        if isinstance(name, str) and not is_there(name, content):
            other = [*calls[:place], _with_function(call, name=f"{name}{_PROBE}"), *calls[place + 1 :]]
            if not is_written(tool_calls=other):
                raise RowError(f"the chat template omits tool call {place} of message {number}")
    for field_name, beside in (("content", content), *((name, answer) for name in REASONING)):
        value = message.get(field_name)
        if not isinstance(value, str) or not value.strip() or is_there(value.strip(), beside):
            continue
        inside = _THINK in value
        changed = value.replace(_THINK, _THINK + _PROBE) if inside else value + _PROBE
        if not is_written(**{field_name: changed}):
            part = "reasoning in the content" if inside else field_name
            raise RowError(f"the chat template omits the {part} of message {number}")


def _refuse_unmarked(messages: Messages, learned: Sequence[int], marked: RenderMarked) -> None:
    """Refuse supervised turns whose content, tool calls or reasoning the template renders outside the marks."""
    parts: dict[str, str] = {}
    changed = list(messages)
    for number in learned:
        changed[number] = _with_probes(messages[number], number, parts)
    text, ranges = marked(changed)
    said = "".join(text[begin:end] for begin, end in ranges)
    for probe, part in parts.items():
        if probe not in said:
            raise RowError(
                f"the chat template does not mark {part} as part of the assistant's turn; find the turns by rendering "
                "(--turns split)"
            )


def _with_probes(message: Mapping[str, Any], number: int, parts: dict[str, str]) -> Mapping[str, Any]:
    """Append a unique probe to each part of a message, and record in ``parts`` the part that each probe identifies."""
    own: dict[str, str] = {}

    def probe(part: str, value: str) -> str:
        # Fields with equal values, such as reasoning that is stored twice, share a probe.
        if value not in own:
            own[value] = f"{_PROBE}{number}.{len(own)}{_PROBE}"
            parts[own[value]] = f"{part} of message {number}"
        return own[value]

    fields: dict[str, Any] = {}
    for name in ("content", *REASONING):
        value = message.get(name)
        if isinstance(value, str) and value.strip():
            fields[name] = value + probe(f"the {name}", value)
            if _THINK in value:
                fields[name] = fields[name].replace(_THINK, _THINK + probe("the reasoning in the content", _THINK), 1)
    calls = _calls(message)
    for place, call in enumerate(calls):
        if isinstance(called := _function(call).get("name"), str):
            calls[place] = _with_function(call, name=called + probe(f"tool call {place}", f"{_PROBE}{place}"))
    return {**message, **fields, **({"tool_calls": calls} if calls else {})}


def _changed(messages: Messages, number: int, **fields: Any) -> list[Mapping[str, Any]]:
    return [{**message, **fields} if place == number else message for place, message in enumerate(messages)]


def _function(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a tool call's ``function`` object, or the call itself if it has none."""
    function = call.get("function")
    return function if isinstance(function, Mapping) else call


def _with_function(call: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    changed = {**_function(call), **fields}
    return {**call, "function": changed} if isinstance(call.get("function"), Mapping) else changed


def _calls(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    calls = message.get("tool_calls")
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        return []
    return [call for call in calls if isinstance(call, Mapping)]


def other_arguments(messages: Messages) -> list[list[Mapping[str, Any]]]:
    """Return copies of the messages with all tool-call arguments as objects and as JSON, omitting unchanged copies.

    Some templates expect an object, some expect JSON, and some accept both.
    """
    forms = ([_with_arguments(message, form) for message in messages] for form in (_parsed, _as_json))
    return [form for form in forms if form != list(messages)]


def has_quoted_arguments(messages: Messages, text: str) -> bool:
    """Return whether JSON arguments appear in a text as a quoted JSON string, with the inner quotes escaped."""
    for message in messages:
        for arguments in (_function(call).get("arguments") for call in _calls(message)):
            if (
                isinstance(arguments, str)
                and arguments not in text
                and json.dumps(arguments, ensure_ascii=False) in text
            ):
                return True
    return False


def _with_arguments(message: Mapping[str, Any], form: Callable[[Any], Any]) -> Mapping[str, Any]:
    calls = [
        _with_function(call, arguments=form(_function(call)["arguments"])) if "arguments" in _function(call) else call
        for call in _calls(message)
    ]
    return {**message, "tool_calls": calls} if calls else message


def _parsed(arguments: Any) -> Any:
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else None
        refuse_deep(parsed, "arguments")
        # JSON may contain an escaped lone surrogate.
        refuse_surrogates(parsed)
    except (ValueError, RecursionError, RowError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def _as_json(arguments: Any) -> Any:
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, Mapping) else arguments
