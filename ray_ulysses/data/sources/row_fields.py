"""Makes documents from the fields of rows.

A row of JSONL, Parquet or a data set is one of four kinds: text; tokens with or without labels; a chat; or a prompt
with its completion. The kind follows from the options that name the fields.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from ray_ulysses.errors import NOT_GIVEN, ConfigError, Problem

RowKind = Literal["text", "tokens", "messages", "completion"]
FieldRole = Literal["text", "tokens", "labels", "messages", "tools", "prompt", "completion", "weight", "id"]
DEFAULT_TEXT_FIELD = "text"
ASSISTANT = "assistant"
WEIGHT = "weight"
"""Of a message: 0 if it is not learned."""
# Optional in each row.
OPTIONAL_ROLES: tuple[FieldRole, ...] = ("tools", "weight", "id")
_ALONE = ("text", "tokens", "messages")
# Far more levels than messages and tools have, and far fewer than the limits of Python and of templates.
_MAX_DEPTH = 100
_LARGEST_WEIGHT = 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class RowFields:
    """Names of the keys or columns of a row that are read; None for those that are not.

    Attributes:
        text: The text of a document; ``text`` if no other field is named.
        tokens: Token ids.
        labels: Beside ``tokens``: -100 or the token itself for each token.
        messages: A chat, a list of ``{role, content}``; a content may be a list of ``{type: text, text}``.
        tools: Beside ``messages``: the tools that the assistant may call, for the chat template; a list, or its JSON.
        prompt: The text before the completion; only the completion is supervised.
        completion: The text to be learned.
        weight: The factor on the loss of the document's tokens, 1 if it is missing; beside ``tokens`` it may be a list,
            with one for each token.
        id: The row's own id, which is kept.
    """

    text: str | None = None
    tokens: str | None = None
    labels: str | None = None
    messages: str | None = None
    tools: str | None = None
    prompt: str | None = None
    completion: str | None = None
    weight: str | None = None
    id: str | None = None

    @classmethod
    def from_options(cls, options: Mapping[str, str | None]) -> RowFields:
        """Return the fields named by the options ``text_field`` and so on."""
        return cls(**{name.removesuffix("_field"): value for name, value in options.items()})

    @property
    def kind(self) -> RowKind:
        """Return the kind of document that a row holds."""
        if self.tokens is not None:
            return "tokens"
        if self.messages is not None:
            return "messages"
        return "text" if self.prompt is None else "completion"

    @property
    def is_chat(self) -> bool:
        """Return whether every row is a conversation."""
        return self.kind == "messages"

    @property
    def by_role(self) -> dict[FieldRole, str]:
        """Return the fields that are read, by role."""
        named = asdict(self)
        found: dict[FieldRole, str] = {role: named[role] for role in get_args(FieldRole) if named[role] is not None}
        if self.kind == "text":
            return {"text": DEFAULT_TEXT_FIELD, **found}
        return found

    def check(self, kind: str) -> None:
        """Refuse inconsistent fields.

        Args:
            kind: The value of ``SourceSpec.kind``.

        Raises:
            ConfigError: Names every wrong option at once.
        """
        problems = self._problems(kind)
        if problems:
            raise ConfigError(problems, source="prepare")

    def _problems(self, kind: str) -> list[Problem]:
        given = {role: value for role, value in asdict(self).items() if value is not None}
        found = []

        def refuse(role: str, rule: str, hint: str) -> None:
            found.append(Problem(path=option(role), value=given.get(role, NOT_GIVEN), rule=rule, hint=hint))

        for role, value in given.items():
            if not value:
                refuse(role, "is no name of a field", "name a key or a column")
        chosen = [role for role in (*_ALONE, "prompt") if role in given]
        for other in chosen[1:]:
            refuse(
                other,
                f"a row is one kind of document, and {option(chosen[0])}={given[chosen[0]]!r} chose another",
                "give one of the two, and prepare the other rows into another corpus",
            )
        for role, partner in (("labels", "tokens"), ("tools", "messages")):
            if role in given and partner not in given:
                rule = f"{role} need {partner}, and {option(partner)} is not given"
                refuse(role, rule, "name that field too")
        for role, partner in (("prompt", "completion"), ("completion", "prompt")):
            if role in given and partner not in given:
                refuse(role, f"needs {option(partner)}, which is not given", "name that field too")
        names = [value for role, value in given.items() if role != "id"]
        for name in sorted({name for name in names if name and names.count(name) > 1}):
            roles = [role for role, value in given.items() if value == name]
            refuse(roles[-1], f"is the field of {option(roles[0])} already", "name two fields")
        if kind == "text":
            for role in given:
                refuse(role, "kind=text reads whole files, which have no fields", "leave it out, or set another kind")
        return found


def option(role: str) -> str:
    """Return the name of the option for a field."""
    return f"{role}_field"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenRow:
    """A document that is already tokenized.

    Attributes:
        tokens: int64 ids.
        labels: int64, of the same size, -100 or the token; None if every token is supervised.
    """

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64] | None


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


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionRow:
    """A prompt and the completion to be learned."""

    prompt: str
    completion: str


Content = str | TokenRow | ChatRow | CompletionRow


class RowError(ValueError):
    """The reason why a row can't be a document, written to the quarantine."""


def row_content(row: Mapping[FieldRole, Any], kind: RowKind) -> Content:
    """Return the document of a row.

    Args:
        row: The values by role; None for an absent one.
        kind: The kind of the row.

    Raises:
        RowError: The values make no document.
    """
    if kind == "text":
        return _text(row["text"], "text")
    if kind == "completion":
        completion = _text(row["completion"], "completion")
        prompt = row["prompt"]
        return CompletionRow(prompt="" if prompt == "" else _text(prompt, "prompt"), completion=completion)
    if kind == "tokens":
        return _token_row(row)
    messages = row["messages"]
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise RowError(f"the messages are {describe_type(messages)}, not a list")
    if not messages:
        raise RowError("empty")
    _refuse_deep(messages, "messages")
    return ChatRow(
        messages=tuple(_message(message, number) for number, message in enumerate(messages)),
        tools=_tools(row.get("tools")),
    )


def row_id(value: object) -> str:
    """Return a row's own id as text, empty if it has none; RowError if it is neither text nor a number."""
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise RowError(f"the id is {describe_type(value)}, not a string or an integer")
    return _utf8(str(value))


def row_weight(value: object, content: Content) -> float | NDArray[np.float32]:
    """Return the loss weight of a row, or that of each of its tokens; 1 if it has none.

    Raises:
        RowError: It is no number of at least 0, or not one for each token.
    """
    if value is None:
        return 1.0
    if not isinstance(value, list | np.ndarray):
        return _weight(value, "the weight")
    if not isinstance(content, TokenRow):
        raise RowError("the weight is a list, which only rows of tokens may have")
    if len(value) != content.tokens.size:
        raise RowError(f"{len(value)} weights for {content.tokens.size} tokens")
    return np.array([_weight(one, f"weight {place}") for place, one in enumerate(value)], dtype=np.float32)


def _weight(value: object, name: str) -> float:
    """Return a weight as fp32 holds it."""
    number = value.item() if isinstance(value, np.generic) else value
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise RowError(f"{name} is {describe_type(number)}, not a number")
    if not 0 <= number <= _LARGEST_WEIGHT:
        raise RowError(f"{name} is {number!r:.40}, not a number from 0 to {_LARGEST_WEIGHT:,}")
    return float(np.float32(number))


def describe_type(value: object) -> str:
    """Return the description of a value of a wrong type."""
    return "missing" if value is None else f"of type {type(value).__name__}"


def json_problem(error: ValueError | RecursionError) -> str:
    """Return the reason why a text could not be parsed as JSON."""
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def _refuse_deep(value: object, name: str) -> None:
    """Refuse a value too deep for recursive functions, with the same text in every process."""
    level = [value]
    for _ in range(_MAX_DEPTH):
        level = [inner for outer in level for inner in _inner(outer) if not isinstance(inner, str | bytes)]
        if not level:
            return
    raise RowError(f"the {name} are nested more than {_MAX_DEPTH} deep")


def _inner(value: object) -> Iterable[object]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, Sequence) else ()


def _text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise RowError(f"the {name} is {describe_type(value)}, not a string")
    if not value:
        raise RowError("empty" if name == "text" else f"the {name} is empty")
    return _utf8(value)


def _utf8(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RowError(f"a lone surrogate at character {error.start}") from error
    return text


def _token_row(row: Mapping[FieldRole, Any]) -> TokenRow:
    tokens = _integers(row["tokens"], "tokens")
    if not tokens.size:
        raise RowError("empty")
    if "labels" not in row:
        return TokenRow(tokens=tokens, labels=None)
    labels = _integers(row["labels"], "labels")
    if labels.size != tokens.size:
        raise RowError(f"{labels.size} labels for {tokens.size} tokens")
    return TokenRow(tokens=tokens, labels=labels)


def _integers(value: object, name: str) -> NDArray[np.int64]:
    """Return a list or an array of integers as int64."""
    if isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in "iu":
        if value.dtype == np.uint64 and value.size and value.max() > np.iinfo(np.int64).max:
            raise RowError(f"the {name} do not fit 64 bits")
        return value.astype(np.int64)
    if not isinstance(value, list):
        raise RowError(f"the {name} are {describe_type(value)}, not a list of integers")
    for place, item in enumerate(value):
        if type(item) is not int:
            raise RowError(f"the {name} are no list of integers: item {place} is {describe_type(item)}")
    try:
        return np.array(value, dtype=np.int64)
    except OverflowError as error:
        raise RowError(f"the {name} do not fit 64 bits") from error


def _message(message: object, number: int) -> Mapping[str, Any]:
    """Return a message without null fields, since in Parquet every message has the fields of all."""
    if not isinstance(message, Mapping):
        raise RowError(f"message {number} is {describe_type(message)}, not an object with role and content")
    kept = {key: value for key, value in message.items() if value is not None}
    role = kept.get("role")
    if not isinstance(role, str) or not role:
        raise RowError(f"message {number} has no role")
    if isinstance(kept.get("content"), list):
        kept["content"] = _joined(kept["content"], f"message {number} ({role})")
    if not isinstance(kept.get("content"), str) and not ("content" not in kept and kept.get("tool_calls")):
        raise RowError(f"message {number} ({role}): the content is {describe_type(kept.get('content'))}, not a string")
    for text in strings(kept):
        _utf8(text)
    # As in the formats of fine-tuning services, 0 excludes a message of the assistant from the loss.
    weight = kept.pop("weight", 1)
    if role == ASSISTANT and weight not in (0, 1):
        raise RowError(f"message {number} ({role}): the weight is {weight!r:.40}, neither 0 nor 1")
    return {**kept, "weight": 0} if role == ASSISTANT and weight == 0 else kept


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
    """Return the definitions of tools: a list of objects, or its JSON; none if it is null or empty.

    Keys whose value is null are left out, since in Parquet every object has the keys of all; JSON text keeps them.
    """
    from_text = isinstance(value, str)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RowError(f"the tools are no JSON: {json_problem(error)}") from error
    if value is None:
        return ()
    if not isinstance(value, list):
        raise RowError(f"the tools are {describe_type(value)}, not a list")
    _refuse_deep(value, "tools")
    for number, tool in enumerate(value):
        if not isinstance(tool, Mapping):
            raise RowError(f"tool {number} is {describe_type(tool)}, not an object")
    for text in strings(value):
        _utf8(text)
    return tuple(value if from_text else _without_nulls(value))


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def strings(value: object) -> list[str]:
    """Return every string in a JSON value, keys included."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for pair in value.items() for item in pair for text in strings(item)]
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [text for item in value for text in strings(item)]
    return []
