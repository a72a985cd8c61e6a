"""Makes documents from the fields of rows.

A row of JSONL, Parquet or a data set is one of four kinds: text; tokens with or without labels; a chat; or a prompt
with its completion. The kind follows from the options that name the fields.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from ray_ulysses.data.sources.messages import ChatRow, conversation
from ray_ulysses.data.sources.quarantine import RowError
from ray_ulysses.data.sources.row_values import describe_type, utf8_text
from ray_ulysses.errors import NOT_GIVEN, ConfigError, Problem

RowKind = Literal["text", "tokens", "messages", "completion"]
FieldRole = Literal[
    "text", "tokens", "labels", "messages", "tools", "system", "prompt", "input", "completion", "weight", "id"
]
DEFAULT_TEXT_FIELD = "text"
# Optional in each row.
OPTIONAL_ROLES: tuple[FieldRole, ...] = ("tools", "system", "input", "weight", "id")
_ALONE = ("text", "tokens", "messages")
_LARGEST_WEIGHT = 1_000_000
# The two prompts of Stanford Alpaca (tatsu-lab/stanford_alpaca, ``train.py``), on which its descendants were trained.
_ALPACA_PROMPT_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{prompt}\n\n### Input:\n{input}\n\n### Response:"
)
_ALPACA_PROMPT = (
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{prompt}\n\n### Response:"
)
_MOST_NAMES = 12
# The names that common data sets give their fields, the kinds of rows in the order in which they are tried.
_COMMON_FIELDS: tuple[dict[FieldRole, tuple[str, ...]], ...] = (
    {"messages": ("messages", "conversations", "conversation", "chat", "dialog"), "tools": ("tools",)},
    {"prompt": ("prompt",), "completion": ("completion", "response", "output", "answer")},
    {"prompt": ("instruction",), "input": ("input",), "completion": ("output", "response")},
    {"prompt": ("question",), "completion": ("answer", "response")},
    {"tokens": ("input_ids", "tokens", "token_ids"), "labels": ("labels",)},
    {"text": ("text", "content", "contents", "body", "document", "raw_content", "article", "code", "markdown")},
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowFields:
    """Names of the keys or columns of a row that are read; None for those that are not.

    Attributes:
        text: The text of a document; ``text`` if no other field is named.
        tokens: Token ids.
        labels: Beside ``tokens``: -100 or the token itself for each token.
        messages: A chat, a list of ``{role, content}`` or ``{from, value}``, or its JSON; a content may be a list of
            ``{type: text, text}``.
        tools: Beside ``messages``: the tools that the assistant may call, for the chat template; a list, or its JSON.
        system: Beside ``messages``: the text of a system message that comes first, as a column of its own; empty or
            missing for none.
        prompt: The text before the completion; only the completion is supervised. Beside ``messages``: the messages
            that come before them, and are not learned.
        input: Beside ``prompt`` and ``completion``: what the instruction in ``prompt`` is about; empty or missing for
            none. The prompt is then the one of Stanford Alpaca.
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
    system: str | None = None
    prompt: str | None = None
    input: str | None = None
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
    def are_named(self) -> bool:
        """Return whether an option names a field, so that only rows are read."""
        return self != RowFields()

    @property
    def is_chat(self) -> bool:
        """Return whether every row is a conversation."""
        return self.kind == "messages"

    @property
    def by_role(self) -> dict[FieldRole, str]:
        """Return the fields that are read, by role."""
        # Asked for once per row.
        return _by_role(self)

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
        alone = _ALONE if "messages" in given else (*_ALONE, "prompt")
        chosen = [role for role in alone if role in given]
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
        pairs = [("input", "completion"), ("system", "messages")]
        if "messages" not in given:
            pairs += [("prompt", "completion"), ("completion", "prompt")]
        for role, partner in pairs:
            if role in given and partner not in given:
                refuse(role, f"needs {option(partner)}, which is not given", "name that field too")
        if "completion" in given and "messages" in given:
            rule = f"the completion of a chat is {option('messages')}={given['messages']!r} already"
            refuse("completion", rule, "name one of the two")
        names = [value for role, value in given.items() if role != "id"]
        for name in sorted({name for name in names if name and names.count(name) > 1}):
            roles = [role for role, value in given.items() if value == name]
            refuse(roles[-1], f"is the field of {option(roles[0])} already", "name two fields")
        if kind == "text":
            for role in given:
                refuse(role, "--kind=text reads whole files, which have no fields", "leave it out, or set another kind")
        return found


@functools.lru_cache(maxsize=8)
def _by_role(fields: RowFields) -> dict[FieldRole, str]:
    named = asdict(fields)
    found: dict[FieldRole, str] = {role: named[role] for role in get_args(FieldRole) if named[role] is not None}
    return {"text": DEFAULT_TEXT_FIELD, **found} if fields.kind == "text" else found


def option(role: str) -> str:
    """Return the name of the option for a field."""
    return f"--{role}-field"


def missing_role(names: Collection[str], fields: RowFields) -> tuple[FieldRole, str]:
    """Return the first field that a row without all fields lacks, and its role."""
    return next(
        (role, name) for role, name in fields.by_role.items() if role not in OPTIONAL_ROLES and name not in names
    )


def fields_found(names: Sequence[str]) -> str:
    """Return a text that lists the fields of rows, and the options that fit them."""
    shown = ", ".join(f"{name!r:.40}" for name in names[:_MOST_NAMES]) + (", ..." if len(names) > _MOST_NAMES else "")
    fitting = fitting_options(names)
    return f"the fields are {shown or 'none'}" + (f"; use {fitting}" if fitting else "")


def fitting_options(names: Sequence[str]) -> str:
    """Return the options for rows with the fields that common data sets have; empty if none fits."""
    for known in _COMMON_FIELDS:
        given = {role: next((name for name in choices if name in names), None) for role, choices in known.items()}
        if all(name is not None for role, name in given.items() if role not in (*OPTIONAL_ROLES, "labels")):
            return " ".join(f"{option(role)} {name}" for role, name in given.items() if name is not None)
    return ""


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
class CompletionRow:
    """A prompt and the completion to be learned."""

    prompt: str
    completion: str


Content = str | TokenRow | ChatRow | CompletionRow


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
        return _completion_row(row)
    if kind == "tokens":
        return _token_row(row)
    return conversation(row["messages"], row.get("tools"), row.get("prompt"), row.get("system"))


def _completion_row(row: Mapping[FieldRole, Any]) -> CompletionRow:
    for role in ("prompt", "completion"):
        if isinstance(row[role], Sequence) and not isinstance(row[role], str | bytes):
            raise RowError(
                f"the {role} is a list; if it holds messages, name the completion's by {option('messages')}, and "
                f"those before them by {option('prompt')}"
            )
    completion, prompt = _text(row["completion"], "completion"), row["prompt"]
    prompt = "" if prompt == "" else _text(prompt, "prompt")
    if "input" in row:
        given = row["input"]
        if given is None or (isinstance(given, str) and not given):
            prompt = _ALPACA_PROMPT.format(prompt=prompt)
        else:
            prompt = _ALPACA_PROMPT_WITH_INPUT.format(prompt=prompt, input=_text(given, "input"))
    return CompletionRow(prompt=prompt, completion=completion)


def row_id(value: object) -> str:
    """Return a row's own id as text, empty if it has none; RowError if it is neither text nor a number."""
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise RowError(f"the id is {describe_type(value)}, not a string or an integer")
    return utf8_text(str(value))


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
    # A mask may be of booleans.
    numbers = (float(one) if isinstance(one, bool | np.bool_) else one for one in value)
    return np.array([_weight(one, f"weight {place}") for place, one in enumerate(numbers)], dtype=np.float32)


def _weight(value: object, name: str) -> float:
    """Return a weight as fp32 holds it."""
    number = value.item() if isinstance(value, np.generic) else value
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise RowError(f"{name} is {describe_type(number)}, not a number")
    if not 0 <= number <= _LARGEST_WEIGHT:
        raise RowError(f"{name} is {number!r:.40}, not a number from 0 to {_LARGEST_WEIGHT:,}")
    return float(np.float32(number))


def _text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise RowError(f"the {name} is {describe_type(value)}, not a string")
    if not value:
        raise RowError("empty" if name == "text" else f"the {name} is empty")
    return utf8_text(value)


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
