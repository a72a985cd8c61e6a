"""Turns conversations into tokens and the spans written by the assistant.

The chat template of a Hugging Face tokenizer renders the text, through Transformers. The assistant's spans are taken
from the template's ``{% generation %}`` marks if it has them, otherwise from renderings of the conversation truncated
before and after each turn, which must be prefixes of the whole. A message of weight 0 is not supervised.

A conversation's tools are passed to the template. A template that renders the same text without them is refused, since
the assistant's calls would silently be learned without the definitions that they depend on.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ray_ulysses.data.sources.row_fields import ASSISTANT, RowError, strings
from ray_ulysses.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Encoding
    from tokenizers import Tokenizer as RustTokenizer

_BYTE_ROLES = ("system", "user", ASSISTANT, "tool")
_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Llama 3.1 and others write the current date. A preparation that is resumed tomorrow must make the same tokens, so the
# date is the one that Llama 3.2's template falls back to without a clock: 26 July 2024.
_CLOCK_CALL = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")
_DAY = (2024, 7, 26, 0, 0, 0, 4, 208, 0)
_TOOLS_HINT = "leave tools_field out, or use a tokenizer whose chat template writes them"

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ChatTokens:
    """A conversation as tokens.

    Attributes:
        ids: int64 token ids.
        starts: int64, the first token of each supervised span.
        stops: int64, one past the last.
    """

    ids: NDArray[np.int64]
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]


class ChatFormat(Protocol):
    """A tokenizer's format of conversations."""

    @property
    def fingerprint(self) -> str:
        """Return a hash that changes when a conversation would give other tokens."""
        ...

    def encode(self, messages: Messages, tools: Tools = ()) -> ChatTokens:
        """Return the tokens of a conversation; RowError if it, or its tools, can't be written."""
        ...


class ByteChat:
    r"""The format for the byte tokenizer.

    Each message is its role, a line feed, its content, and the end token, which no text can spell:
    ``user\nHello<256>assistant\nHi<256>``. The assistant's contents and their end tokens are supervised. Roles are
    system, user, assistant and tool.
    """

    fingerprint = "bytes-chat-v1"

    def __init__(self, end_token_id: int) -> None:
        self._end = np.array([end_token_id], dtype=np.int64)

    def encode(self, messages: Messages, tools: Tools = ()) -> ChatTokens:
        """Return the tokens of a conversation; RowError for tools, another role or a message without content."""
        if tools:
            raise RowError(f"bytes have no way to write its tools; {_TOOLS_HINT}")
        parts: list[NDArray[np.int64]] = []
        starts, stops, at = [], [], 0
        for number, message in enumerate(messages):
            role, content = message["role"], message.get("content")
            if role not in _BYTE_ROLES:
                raise RowError(f"message {number} has the role '{role}', which is none of {', '.join(_BYTE_ROLES)}")
            if content is None:
                raise RowError(f"message {number} ({role}) has no content")
            header, body = (np.frombuffer(text.encode(), np.uint8) for text in (f"{role}\n", content))
            parts += [header.astype(np.int64), body.astype(np.int64), self._end]
            if _is_learned(message):
                starts.append(at + header.size)
                stops.append(at + header.size + body.size + 1)
            at += header.size + body.size + 1
        return ChatTokens(ids=np.concatenate(parts), starts=np.array(starts, np.int64), stops=np.array(stops, np.int64))


class TemplateChat:
    """The chat template of a Hugging Face tokenizer directory.

    Raises:
        UserError: The directory has no chat template, or an invalid one.
    """

    def __init__(self, directory: Path, tokenizer: RustTokenizer, eos_token_id: int) -> None:
        """Take a tokenizer, whose settings are changed."""
        self._tokenizer = tokenizer
        # Special tokens written by the template are meant; contents that spell one are refused.
        self._tokenizer.encode_special_tokens = False
        self._eos_token_id = eos_token_id
        self._names = _named_tokens(directory)
        self._special = special_tokens(directory, tokenizer)
        source = _read_template(directory)
        self.fingerprint = hashlib.sha256(source.encode()).hexdigest()[:32]
        self._template = _CLOCK_CALL.sub(_fixed_day, source)
        self._has_marks = _GENERATION_MARK.search(source) is not None
        _compile(self._template, directory)

    def encode(self, messages: Messages, tools: Tools = ()) -> ChatTokens:
        """Return the tokens of a conversation.

        Raises:
            RowError: It forges a token, the template refuses it, or the template does not write its tools.
        """
        self._refuse_forgery(messages, tools)
        text, ranges = self._marked(messages, tools) if self._has_marks else self._by_prefixes(messages, tools)
        if tools and text == self._render(messages, ())[0]:
            raise RowError(f"the chat template does not write its tools; {_TOOLS_HINT}")
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        ids = np.asarray(encoding.ids, dtype=np.int64)
        self._refuse_disguise(encoding, text)
        firsts = np.asarray([first for first, _ in encoding.offsets], dtype=np.int64)
        spans = []
        for first, last in ranges:
            # A token belongs to the range that holds its first character.
            begin, end = (int(place) for place in np.searchsorted(firsts, [first, last], side="left"))
            spans.append((begin, self._turn_end(encoding, text, begin, end, last)))
        kept = [(begin, end) for begin, end in spans if begin < end]
        starts, stops = np.array(kept, dtype=np.int64).reshape(-1, 2).T
        return ChatTokens(ids=ids, starts=starts, stops=stops)

    def _refuse_forgery(self, messages: Messages, tools: Tools) -> None:
        named = [(f"message {number} ({message['role']})", message) for number, message in enumerate(messages)]
        for name, value in [*named, *((f"tool {number}", tool) for number, tool in enumerate(tools))]:
            for text in strings(value):
                for token in self._special.values():
                    if token in text:
                        raise RowError(f"{name} spells the special token '{token}'")

    def _refuse_disguise(self, encoding: Encoding, text: str) -> None:
        """Refuse text that the tokenizer's normalization turns into a special token."""
        for token_id, (first, last) in zip(encoding.ids, encoding.offsets, strict=True):
            token = self._special.get(token_id)
            if token is not None and text[first:last].strip() != token.strip():
                raise RowError(f"'{text[first:last]}' reads as the special token '{token}'")

    def _turn_end(self, encoding: Encoding, text: str, begin: int, end: int, last: int) -> int:
        """Return the end of a turn, with its end token and without the line feed that the template adds."""
        ids = encoding.ids
        if begin < end < len(ids) and ids[end] == self._eos_token_id and ids[end - 1] not in self._special:
            return end + 1
        for token in range(end - 1, begin - 1, -1):
            if ids[token] in self._special:
                return end if text[encoding.offsets[token][1] : last].strip() else token + 1
        return end

    def _marked(self, messages: Messages, tools: Tools) -> tuple[str, list[tuple[int, int]]]:
        """Return the text and the character ranges between the template's generation marks."""
        text, marked = self._render(messages, tools, marks=True)
        ranges = sorted(marked)
        turns = [message for message in messages if message["role"] == ASSISTANT]
        if all(_is_learned(turn) for turn in turns):
            return text, ranges
        said = [text[first:last] for first, last in ranges]
        contents = [(turn.get("content") or "").strip() for turn in turns]
        if len(said) != len(turns) or not all(content in one for content, one in zip(contents, said, strict=True)):
            raise RowError(
                "the chat template does not mark one span per answer, so none of them can have a weight of 0"
            )
        return text, [said_range for said_range, turn in zip(ranges, turns, strict=True) if _is_learned(turn)]

    def _by_prefixes(self, messages: Messages, tools: Tools) -> tuple[str, list[tuple[int, int]]]:
        """Return the text, and the character range that each assistant turn adds to its prompt."""
        text, _ = self._render(messages, tools)
        ranges = []
        for number, message in enumerate(messages):
            if not _is_learned(message):
                continue
            asked, _ = self._render(messages[:number], tools, asks=True)
            answered, _ = self._render(messages[: number + 1], tools)
            if not (text.startswith(answered) and answered.startswith(asked)):
                raise RowError(
                    f"the chat template writes message {number} differently if the conversation ends with it, so "
                    "its tokens can't be identified; mark them with {% generation %} in the template"
                )
            ranges.append((len(asked), len(answered)))
        return text, ranges

    def _render(
        self, messages: Messages, tools: Tools, *, asks: bool = False, marks: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        # Transformers 5.23 is annotated to return one string; it returns the texts and the marked ranges of each.
        render: Any = render_jinja_template
        try:
            texts, marked = render(
                conversations=[[{k: v for k, v in message.items() if k != "weight"} for message in messages]],
                tools=[dict(tool) for tool in tools] or None,
                chat_template=self._template,
                add_generation_prompt=asks,
                return_assistant_tokens_mask=marks,
                **self._names,
            )
        except Exception as error:
            # A template is arbitrary code and may raise anything.
            raise RowError(f"the chat template refuses it: {type(error).__name__}: {error}") from error
        return texts[0], list(marked[0]) if marks else []


def special_tokens(directory: Path, tokenizer: RustTokenizer) -> dict[int, str]:
    """Return the tokens of a tokenizer directory with a meaning beyond their text, by id."""
    named = set(_named_tokens(directory).values())
    added = tokenizer.get_added_tokens_decoder()
    return {key: token.content for key, token in added.items() if token.special or token.content in named}


def _is_learned(message: Mapping[str, Any]) -> bool:
    return bool(message["role"] == ASSISTANT and message.get("weight") != 0)


def _compile(template: str, directory: Path) -> None:
    from jinja2.exceptions import TemplateError, TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        render_jinja_template(conversations=[[{"role": "user", "content": "."}]], chat_template=template)
    except TemplateSyntaxError as error:
        raise UserError(
            f"tokenizer={directory}: its chat template is not a valid Jinja template ({error}); fix it"
        ) from error
    except (TemplateError, TypeError, ValueError, LookupError, AttributeError):
        # It compiled; refusing this conversation says nothing about others.
        return


def _read_template(directory: Path) -> str:
    file = directory / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"tokenizer={directory}: {file.name} is not UTF-8 ({error}); save it as UTF-8") from error
    template = _json_object(directory / "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):
        # The form of several templates: [{"name": "default", "template": ...}, ...].
        template = {one.get("name"): one.get("template") for one in template if isinstance(one, dict)}.get("default")
    if isinstance(template, str):
        return template
    raise UserError(
        f"messages_field: the tokenizer {directory} has no chat template; add chat_template.jinja to the directory, "
        "or use the tokenizer of a chat model"
    )


def _named_tokens(directory: Path) -> dict[str, str]:
    """Return bos_token, eos_token and the like, which templates refer to by name."""
    found = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        for name, token in _json_object(directory / file).items():
            content = token.get("content") if isinstance(token, dict) else token
            if name.endswith("_token") and isinstance(content, str):
                found[name] = content
    return found


def _json_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"tokenizer={path.parent}: {path.name} is not a JSON object ({error})") from error
    return fields if isinstance(fields, dict) else {}


def _fixed_day(call: re.Match[str]) -> str:
    return json.dumps(time.strftime(call.group(2), _DAY))
