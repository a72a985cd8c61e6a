"""Turns rows into documents, or into reasons to reject them.

A row of JSONL, Parquet or a dataset is of one of seven kinds, by the field options: text; tokens with optional labels;
a chat in OpenAI, ShareGPT or TRL format; a prompt with a completion; a prompt with a completion that is labeled as
desirable or not; a prompt with a chosen and a rejected answer; or a query with a text that matches it.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from ray_ulysses.errors import NOT_GIVEN, ConfigError, Problem

RowKind = Literal["text", "tokens", "messages", "completion", "answer", "pair", "query"]
FieldRole = Literal[
    "text", "tokens", "labels", "messages", "tools", "system", "prompt", "input", "completion", "chosen", "rejected",
    "query", "positive", "weight", "label", "id",
]  # fmt: skip
DEFAULT_TEXT_FIELD = "text"
# Fields that any row may lack.
OPTIONAL_ROLES: tuple[FieldRole, ...] = ("tools", "system", "input", "weight", "id")
# The two prompts of Stanford Alpaca (tatsu-lab/stanford_alpaca, ``train.py``), shared by its derivatives.
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
# Field names of common datasets by row kind, in the order in which the kinds are tried.
_COMMON_FIELDS: tuple[dict[FieldRole, tuple[str, ...]], ...] = (
    {"messages": ("messages", "conversations", "conversation", "chat", "dialog"), "tools": ("tools",)},
    {"prompt": ("prompt",), "chosen": ("chosen",), "rejected": ("rejected",)},
    {"chosen": ("chosen",), "rejected": ("rejected",)},
    {"prompt": ("prompt",), "completion": ("completion", "response", "output", "answer")},
    {"prompt": ("instruction",), "input": ("input",), "completion": ("output", "response")},
    {"query": ("query", "anchor"), "positive": ("positive", "pos")},
    {"prompt": ("question",), "completion": ("answer", "response")},
    {"tokens": ("input_ids", "tokens", "token_ids"), "labels": ("labels",)},
    {"text": ("text", "content", "contents", "body", "document", "raw_content", "article", "code", "markdown")},
)

ASSISTANT = "assistant"
WEIGHT = "weight"
"""Key of a message's weight. A message of weight 0 is not supervised."""
_SYSTEM = "system"
_FUNCTION_CALL = "function_call"
# Maps ShareGPT's senders to roles.
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

MOST_BYTES = 256 << 20
"""Maximum size in bytes of a document: a line, a JSON list element, a table cell, or a file read as one text."""
_TOO_LARGE = "larger than a document may be"
TOO_LARGE = f"{_TOO_LARGE}: more than {MOST_BYTES >> 20} MiB"
# An object that takes six bytes in a file may take 200 bytes in Python.
_MOST_CONTAINERS = 1 << 23
# Far above the depth of real messages and tools, and far below the recursion limits of Python and chat templates.
_MAX_DEPTH = 100

_SAME = re.compile(r"^(the same \w+ as) .*", re.DOTALL)
# The text after the colon differs between documents, except in reasons that concern a message or a tool.
_DETAILED = re.compile(r"^(?!message |tool |the chat template refuses )([^:]+): .*", re.DOTALL)
_NUMBER = re.compile(r"(?<![-\w])(?<!line )\d+\b")


class RowError(ValueError):
    """Error for a row that cannot become a document. The quarantine file lists the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejected:
    """A rejected document or file, with the reason."""

    source: str
    """Path of the source file, or path or Hub id of the dataset."""
    offset: int
    """Line or row number within the source, from 1, or 0 for an entire file."""
    reason: str


def reason_class(reason: str) -> str:
    """Return a reason without the parts that differ between documents, so that equal reasons can be counted."""
    return _NUMBER.sub("N", _DETAILED.sub(r"\1", _SAME.sub(r"\1 another", reason)))


@dataclass(frozen=True, kw_only=True, slots=True)
class RowFields:
    """The keys or columns to read from each row; None for a role that is not read."""

    text: str | None = None
    """Document text. The default is ``text`` if no field option is set."""
    tokens: str | None = None
    labels: str | None = None
    """With ``tokens``: one label per token, either -100 or the token itself."""
    messages: str | None = None
    """A chat: a list of ``{role, content}`` or ``{from, value}``, or the list's JSON. A content may be a list of
    ``{type: text, text}``."""
    tools: str | None = None
    """With ``messages``: definitions of the tools that the assistant may call, as a list or its JSON."""
    system: str | None = None
    """With ``messages``: text of a system message to insert first; null or an empty string for no system message."""
    prompt: str | None = None
    """Text before the completion; only the completion is supervised. With ``messages``: earlier messages, which are not
    supervised."""
    input: str | None = None
    """With ``prompt`` and ``completion``: input for the instruction in ``prompt``, or null or an empty string. Setting
    this field selects Stanford Alpaca's prompt format."""
    completion: str | None = None
    chosen: str | None = None
    """The better answer: text with ``prompt``, or messages that end with the answer. Only answers are supervised."""
    rejected: str | None = None
    query: str | None = None
    """A text whose vector is trained to be near the vector of ``positive``."""
    positive: str | None = None
    weight: str | None = None
    """Loss weight of the document's tokens; 1 if missing. With ``tokens``, a list of one weight per token is
    allowed."""
    label: str | None = None
    """Class of the document: an integer or a string. With ``completion``: whether the completion is desirable."""
    id: str | None = None
    """Row id, which is stored in the corpus."""

    @classmethod
    def from_options(cls, options: Mapping[str, str | None]) -> RowFields:
        """Return the fields set by the command-line options, ``text_field`` and so on."""
        return cls(**{name.removesuffix("_field"): value for name, value in options.items()})

    @property
    def kind(self) -> RowKind:
        """Kind of document in each row."""
        if self.tokens is not None:
            return "tokens"
        if self.messages is not None:
            return "messages"
        if self.chosen is not None:
            return "pair"
        if self.completion is not None and self.label is not None:
            return "answer"
        if self.query is not None:
            return "query"
        return "text" if self.prompt is None else "completion"

    @property
    def are_named(self) -> bool:
        """Whether at least one field option is set, in which case files are read as rows, never as text."""
        return self != RowFields()

    @property
    def by_role(self) -> dict[FieldRole, str]:
        """Name of the field to read for each role."""
        # Cached, since it is read once per row.
        return _by_role(self)

    def check(self, kind: str) -> None:
        """Refuse fields that contradict each other or ``SourceSpec.kind``.

        Raises:
            ConfigError: One problem for each wrong option.
        """
        given = {role: value for role, value in asdict(self).items() if value is not None}
        problems = []

        def refuse(role: str, rule: str, hint: str = "set that option too") -> None:
            problems.append(Problem(path=option(role), value=given.get(role, NOT_GIVEN), rule=rule, hint=hint))

        for role, value in given.items():
            if not value:
                refuse(role, "is empty", "set it to the name of a key or column")
        of_messages = {"messages", "chosen"} & {*given}
        alone = ("text", "tokens", "messages", "chosen", "query", *(() if of_messages else ("prompt",)))
        chosen = [role for role in alone if role in given]
        for other in chosen[1:]:
            refuse(
                other,
                f"a row has only one kind, and {option(chosen[0])}={given[chosen[0]]!r} selects another kind",
                "remove one of the two options, and prepare rows of another kind as a separate corpus",
            )
        pairs = [("labels", "tokens"), ("tools", "messages"), ("input", "completion"), ("system", "messages")]
        pairs += [("chosen", "rejected"), ("rejected", "chosen"), ("query", "positive"), ("positive", "query")]
        if not of_messages:
            pairs += [("prompt", "completion"), ("completion", "prompt")]
        for role, partner in pairs:
            if role in given and partner not in given:
                refuse(role, f"requires {option(partner)}, which is not set")
        for other in of_messages if "completion" in given else ():
            rule = f"{option(other)}={given[other]!r} already contains the completion"
            refuse("completion", rule, "remove one of the two options")
        if "weight" in given and self.kind in ("pair", "answer", "query"):
            refuse("weight", "losses of answers and pairs have no weights", "remove it")
        if "label" in given and {"chosen", "query"} & {*given}:
            refuse("label", "a pair of texts has no class", "remove it")
        names = [value for role, value in given.items() if role != "id"]
        for name in sorted({name for name in names if name and names.count(name) > 1}):
            roles = [role for role, value in given.items() if value == name]
            refuse(roles[-1], f"{option(roles[0])} is the same field", "set two different fields")
        if kind == "text":
            for role in given:
                refuse(role, "--kind=text reads entire files, which have no fields", "remove it, or set another --kind")
        if problems:
            raise ConfigError(problems, source="prepare")


@functools.lru_cache(maxsize=8)
def _by_role(fields: RowFields) -> dict[FieldRole, str]:
    named = asdict(fields)
    found: dict[FieldRole, str] = {role: named[role] for role in get_args(FieldRole) if named[role] is not None}
    return {"text": DEFAULT_TEXT_FIELD, **found} if fields.kind == "text" else found


def option(role: str) -> str:
    """Return the command-line option that sets the field for a role."""
    return f"--{role}-field"


def missing_role(names: Collection[str], fields: RowFields) -> tuple[FieldRole, str]:
    """Return the role and the name of the first required field that is missing."""
    return next(
        (role, name) for role, name in fields.by_role.items() if role not in OPTIONAL_ROLES and name not in names
    )


def fields_found(names: Sequence[str]) -> str:
    """Describe the rows' fields, and the options that fit these fields."""
    shown = ", ".join(f"{name!r:.40}" for name in names[:_MOST_NAMES]) + (", ..." if len(names) > _MOST_NAMES else "")
    fitting = fitting_options(names)
    return f"the fields are {shown or 'none'}" + (f"; use {fitting}" if fitting else "")


def fitting_options(names: Sequence[str]) -> str:
    """Return the options that fit a row's fields, or an empty string if the fields match no common dataset format."""
    for known in _COMMON_FIELDS:
        given = {role: next((name for name in choices if name in names), None) for role, choices in known.items()}
        if all(name is not None for role, name in given.items() if role not in (*OPTIONAL_ROLES, "labels")):
            return " ".join(f"{option(role)} {name}" for role, name in given.items() if name is not None)
    return ""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenRow:
    """A document that is already tokenized."""

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64] | None
    """One label per token, either -100 or the token; None if every token is supervised."""
    is_window: bool = False
    """Whether the tokens are a window of concatenated documents, each ended by an end token, instead of a document."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatRow:
    """A conversation."""

    messages: tuple[Mapping[str, Any], ...]
    """Messages with ``role``, ``content`` (a string) and any other fields that the chat template reads. An assistant
    message with ``weight`` 0 is not supervised."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Definitions of the tools that the assistant may call, passed to the chat template."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionRow:
    """A prompt, and its completion, which is supervised."""

    prompt: str
    completion: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PairRow:
    """A prompt with two answers, or a prompt with its answer and then with that of another row."""

    chosen: ChatRow | CompletionRow
    rejected: ChatRow | CompletionRow


@dataclass(frozen=True, kw_only=True, slots=True)
class QueryRow:
    """A query and a text that matches it."""

    query: str
    positive: str


Content = str | TokenRow | ChatRow | CompletionRow | PairRow | QueryRow


def row_content(row: Mapping[FieldRole, Any], kind: RowKind) -> Content:
    """Return the document in a row, given the row's values by role; raise RowError if the values are not a document."""
    if kind == "text":
        return _text(row["text"], "text")
    if kind in ("completion", "answer"):
        return _completion_row(row)
    if kind == "pair":
        return _pair_row(row)
    if kind == "query":
        return QueryRow(query=_text(row["query"], "query"), positive=_text(row["positive"], "positive"))
    if kind == "messages":
        return conversation(row["messages"], row.get("tools"), row.get("prompt"), row.get("system"))
    tokens = _integers(row["tokens"], "tokens")
    if not tokens.size:
        raise RowError("empty")
    labels = _integers(row["labels"], "labels") if "labels" in row else None
    if labels is not None and labels.size != tokens.size:
        raise RowError(f"there are {labels.size} labels for {tokens.size} tokens")
    return TokenRow(tokens=tokens, labels=labels)


def _completion_row(row: Mapping[FieldRole, Any]) -> CompletionRow:
    for role in ("prompt", "completion"):
        if isinstance(row[role], Sequence) and not isinstance(row[role], str | bytes):
            raise RowError(
                f"the {role} is a list; if it contains messages, set {option('messages')} to the completion's field, "
                f"and {option('prompt')} to the field of the messages before it"
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


def _pair_row(row: Mapping[FieldRole, Any]) -> PairRow:
    chosen, rejected, prompt = row["chosen"], row["rejected"], row.get("prompt")
    for one in (chosen, rejected):
        if not isinstance(one, str | list):
            raise RowError(f"an answer is {describe_type(one)}, not text or a list of messages")
    if chosen == rejected:
        raise RowError("both answers are the same")
    if isinstance(chosen, str) and isinstance(rejected, str):
        if not isinstance(prompt, str) or not prompt:
            raise RowError("the answers are text, but the prompt is not")
        answers = [_completion_row({"prompt": prompt, "completion": one}) for one in (chosen, rejected)]
        return PairRow(chosen=answers[0], rejected=answers[1])
    *before, first = _messages(chosen, "messages of the chosen answer", 0)
    *before_second, second = _messages(rejected, "messages of the rejected answer", 0)
    if before != before_second:
        raise RowError("the messages before the last are not the same in both answers")
    if not first["role"] == second["role"] == ASSISTANT:
        raise RowError("the last message of an answer is not the assistant's")
    if isinstance(prompt, str):
        if prompt not in [one.get("content") for one in before]:
            raise RowError("the prompt is not among the messages of the answers")
    elif prompt is not None:
        said = _messages(prompt, "messages of the prompt", 0)
        before = before if before[: len(said)] == said else [*said, *before]
    if not before:
        raise RowError("the answers have no prompt")
    before = [{**one, WEIGHT: 0} if one["role"] == ASSISTANT else one for one in before]
    return PairRow(chosen=ChatRow(messages=(*before, first)), rejected=ChatRow(messages=(*before, second)))


def _text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise RowError(f"the {name} is {describe_type(value)}, not a string")
    if not value:
        raise RowError("empty" if name == "text" else f"the {name} is empty")
    return utf8_text(value)


def _integers(value: object, name: str) -> NDArray[np.int64]:
    if isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in "iu":
        if value.dtype == np.uint64 and value.size and value.max() > np.iinfo(np.int64).max:
            raise RowError(f"the {name} do not fit in 64 bits")
        return value.astype(np.int64)
    if not isinstance(value, list):
        raise RowError(f"the {name} are {describe_type(value)}, not a list of integers")
    for place, item in enumerate(value):
        if type(item) is not int:
            raise RowError(f"the {name} are not a list of integers: item {place} is {describe_type(item)}")
    try:
        return np.array(value, dtype=np.int64)
    except OverflowError as error:
        raise RowError(f"the {name} do not fit in 64 bits") from error


def conversation(messages: object, tools: object = None, prompt: object = None, system: object = None) -> ChatRow:
    """Build the row's conversation.

    Args:
        messages: A list of ``{role, content}``, or of ShareGPT's ``{from, value}``, or the list's JSON.
        tools: Tool definitions as a list or its JSON, or None.
        prompt: Unsupervised messages that come first, or None.
        system: Text of a system message to insert before all other messages; None or an empty string for none.

    Raises:
        RowError: The values are not a conversation.
    """
    said = [] if prompt is None else _messages(prompt, "messages of the prompt", 0)
    said = [{**message, WEIGHT: 0} if message["role"] == ASSISTANT else message for message in said]
    said += _messages(messages, "messages", len(said))
    if system is not None and not isinstance(system, str):
        raise RowError(f"the system message is {describe_type(system)}, not a string")
    if system:
        if said[0]["role"] == _SYSTEM:
            raise RowError("the messages begin with a system message, but the row's system field is also set")
        said.insert(0, {"role": _SYSTEM, "content": utf8_text(system)})
    return ChatRow(messages=tuple(said), tools=_tools(tools))


def _messages(value: object, name: str, first_number: int) -> list[Mapping[str, Any]]:
    if isinstance(value, str):
        value = _parse_json(value, name)
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise RowError(f"the {name} are {describe_type(value)}, not a list")
    if not value:
        raise RowError("empty")
    refuse_deep(value, name)
    return [_message(message, number) for number, message in enumerate(value, first_number)]


def _message(message: object, number: int) -> Mapping[str, Any]:
    """Normalize a message. Null fields are removed, since in Parquet all messages have the same fields."""
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
    refuse_surrogates(kept)
    # As in fine-tuning APIs, weight 0 excludes an assistant message from the loss.
    weight = kept.pop(WEIGHT, 1)
    if role == ASSISTANT and weight not in (0, 1):
        raise RowError(f"message {number} ({role}): the weight is {weight!r:.40}, not 0 or 1")
    return {**kept, WEIGHT: 0} if role == ASSISTANT and weight == 0 else kept


def _from_sharegpt(message: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Convert ``{from, value}`` to a message with a role and either a content or tool calls.

    The sender names are those of ShareGPT and LLaMA-Factory (``src/llamafactory/data/converter.py``).
    """
    sender, value = message["from"], message.get("value")
    role = _SENDERS.get(sender) if isinstance(sender, str) else None
    if role is None:
        raise RowError(f"message {number} has the unknown sender {sender!r:.40}; use one of {', '.join(_SENDERS)}")
    rest = {key: field for key, field in message.items() if key not in ("from", "value")}
    if sender != _FUNCTION_CALL:
        return {**rest, "role": role, "content": value}
    calls = _parse_json(value, f"calls of message {number}") if isinstance(value, str) else value
    refuse_deep(calls, f"calls of message {number}")
    calls = calls if isinstance(calls, list) else [calls]
    for call in calls:
        if not isinstance(call, Mapping) or not isinstance(call.get("name"), str) or "arguments" not in call:
            raise RowError(f"message {number} ({_FUNCTION_CALL}): a call lacks a name or arguments")
    functions = [{"name": call["name"], "arguments": call["arguments"]} for call in calls]
    return {**rest, "role": role, "tool_calls": [{"type": "function", "function": one} for one in functions]}


def _joined(parts: Sequence[object], where: str) -> str:
    """Join the parts of a message's content, all of which must be text.

    Parts are joined with a space, as in Transformers' server (5.x, ``cli/serving/utils.py``), so that training and
    serving see the same text.
    """
    texts = []
    for number, part in enumerate(parts):
        if not isinstance(part, Mapping):
            described = describe_type(part)
            raise RowError(f"{where}: part {number} of the content is {described}, not an object with a type")
        if part.get("type") != "text":
            kind = json.dumps(part.get("type"), default=str)
            raise RowError(f"{where}: part {number} of the content is {kind}, not text")
        if not isinstance(part.get("text"), str):
            raise RowError(f"{where}: the text of part {number} is {describe_type(part.get('text'))}, not a string")
        texts.append(part["text"])
    return " ".join(texts)


def _tools(value: object) -> tuple[Mapping[str, Any], ...]:
    """Return tool definitions from a list of objects or its JSON. Null and an empty string mean no tools."""
    if isinstance(value, str):
        value = _parse_json(value, "tools") if value else None
    if value is None:
        return ()
    if not isinstance(value, list):
        raise RowError(f"the tools are {describe_type(value)}, not a list")
    refuse_deep(value, "tools")
    for number, tool in enumerate(value):
        if not isinstance(tool, Mapping):
            raise RowError(f"tool {number} is {describe_type(tool)}, not an object")
    refuse_surrogates(value)
    return tuple(value)


def describe_type(value: object) -> str:
    """Return the type of an unexpected value, for errors."""
    return "missing" if value is None else f"of type {type(value).__name__}"


def json_problem(error: ValueError | RecursionError) -> str:
    """Return the reason why text could not be parsed as JSON."""
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def too_large(data: bytes | str, start: int = 0) -> str | None:
    """Return why the JSON from index ``start`` on needs too much memory, or None if it is small enough."""
    size = len(data) - start
    if size > MOST_BYTES:
        return TOO_LARGE
    if size > _MOST_CONTAINERS:
        marks: Any = (b"[", b"{") if isinstance(data, bytes) else ("[", "{")
        if sum(data.count(mark, start) for mark in marks) > _MOST_CONTAINERS:
            return f"{_TOO_LARGE}: more than {_MOST_CONTAINERS:,} lists and objects"
    return None


def _parse_json(value: str, name: str) -> Any:
    if (reason := too_large(value)) is not None:
        raise RowError(f"the {name} are {reason}")
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise RowError(f"the {name} are not JSON: {json_problem(error)}") from error


def refuse_deep(value: object, name: str) -> None:
    """Refuse a value that is nested too deeply for recursive functions, with the same error in every process."""
    level = [value]
    for _ in range(_MAX_DEPTH):
        inner: list[object] = []
        for outer in level:
            if isinstance(outer, Mapping | Sequence):
                inner.extend(outer.values() if isinstance(outer, Mapping) else outer)
        level = [one for one in inner if not isinstance(one, str | bytes)]
        if not level:
            return
    raise RowError(f"the {name} are nested more than {_MAX_DEPTH} levels deep")


def refuse_surrogates(value: object) -> None:
    """Refuse a JSON value that contains a lone surrogate in a string."""
    for text in strings(value):
        utf8_text(text)


def utf8_text(text: str) -> str:
    """Return a text; raise RowError if it contains a lone surrogate."""
    if text.isascii():
        return text
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RowError(f"a lone surrogate at character {error.start}") from error
    return text


def strings(value: object) -> list[str]:
    """Return every string in a JSON value, including keys."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for pair in value.items() for item in pair for text in strings(item)]
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [text for item in value for text in strings(item)]
    return []
