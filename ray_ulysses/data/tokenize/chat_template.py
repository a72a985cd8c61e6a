"""Reads and renders the chat template of a Hugging Face tokenizer directory, through Transformers."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray_ulysses.data.sources.messages import WEIGHT
from ray_ulysses.data.sources.quarantine import RowError
from ray_ulysses.data.tokenize.bounded_template import BoundedTemplate, EndlessTemplateError
from ray_ulysses.errors import UserError
from ray_ulysses.validation import parse_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]

_GENERATION_MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# Llama 3.1 and others write the current date. A preparation that is resumed tomorrow must make the same tokens, so the
# date is the one that Llama 3.2's template falls back to without a clock: 26 July 2024.
_CLOCK_CALL = re.compile(r"""strftime_now\(\s{0,9}(["'])(.{0,99}?)\1\s{0,9}\)""")
_DAY = (2024, 7, 26, 0, 0, 0, 4, 208, 0)
_MOST_TEMPLATE = 1 << 20
# One conversation may be too long for a template; many mean the template.
_MOST_ENDLESS = 8
# Jinja's name for a template that was not read from a file, in tracebacks.
_TEMPLATE_FRAME = "<template>"


class ChatTemplate:
    """A chat template.

    Args:
        directory: The tokenizer, whose named tokens a template may write.
        source: The template's text; None for the tokenizer's own.

    Attributes:
        source: The template's text.
        digest: Hash of it.
        has_marks: Whether it marks what the assistant says with ``{% generation %}``.
        literals: The strings in its expressions.
        names: The names in them.

    Raises:
        UserError: There is no template, or it is invalid.
    """

    def __init__(self, directory: Path, source: str | None = None) -> None:
        text = own_template(directory) if source is None else source
        self.source = text
        self.digest = hashlib.sha256(text.encode()).hexdigest()[:32]
        self.has_marks = _GENERATION_MARK.search(text) is not None
        self.named_tokens = named_tokens(directory)
        self._name = f"tokenizer={directory}: its chat template" if source is None else "--chat-template: the file"
        self._num_endless = 0
        if len(text) > _MOST_TEMPLATE:
            raise UserError(f"{self._name} has {len(text)} characters; it may have {_MOST_TEMPLATE}")
        fixed = _CLOCK_CALL.sub(_fixed_day, text)
        self._template = _compile(fixed, self._name)
        self.literals, self.names = _expressions(fixed)

    def render(self, messages: Messages, tools: Tools, *, asks: bool = False) -> str:
        """Return the text of a conversation; with ``asks`` it ends where the assistant is to answer.

        Raises:
            RowError: The template refuses it; the reason has the line of the template.
        """
        return self._render(messages, tools, asks=asks)[0]

    def render_marked(self, messages: Messages, tools: Tools) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of a conversation, and the character ranges between generation marks.

        Raises:
            RowError: The template refuses it; the reason has the line of the template.
        """
        text, ranges = self._render(messages, tools, marks=True)
        return text, sorted(ranges)

    def _render(
        self, messages: Messages, tools: Tools, *, asks: bool = False, marks: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        try:
            texts, marked = self._template.render(
                conversations=[[_without_weight(message) for message in messages]],
                tools=[dict(tool) for tool in tools] or None,
                add_generation_prompt=asks,
                return_assistant_tokens_mask=marks,
                **self.named_tokens,
            )
        except EndlessTemplateError as error:
            self._num_endless += 1
            if self._num_endless > _MOST_ENDLESS:
                raise UserError(f"{self._name} never ends: {error}; give another one (--chat-template)") from error
            raise RowError(f"the chat template never ends with it: {error}") from error
        except Exception as error:
            # A template is arbitrary code and may raise anything.
            where = "" if (line := _line(error)) is None else f" in line {line}"
            raise RowError(f"the chat template refuses it{where}: {type(error).__name__}: {error}") from error
        return texts[0], list(marked[0]) if marks else []


def named_tokens(directory: Path) -> dict[str, str]:
    """Return bos_token, eos_token and the like, which templates refer to by name."""
    found = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        for name, token in json_object(directory / file).items():
            content = token.get("content") if isinstance(token, dict) else token
            if name.endswith("_token") and isinstance(content, str):
                found[name] = content
    return found


def special_tokens(directory: Path, tokenizer: RustTokenizer) -> dict[int, str]:
    """Return the tokens of a tokenizer directory with a meaning beyond their text, by id."""
    named = set(named_tokens(directory).values())
    added = tokenizer.get_added_tokens_decoder()
    return {key: token.content for key, token in added.items() if token.special or token.content in named}


def json_object(path: Path) -> dict[str, Any]:
    """Return the object in a file of a tokenizer; empty if there is no such file.

    Raises:
        UserError: It is not JSON.
    """
    if not path.is_file():
        return {}
    try:
        fields = parse_json(path.read_bytes())
    except ValueError as error:
        raise UserError(f"tokenizer={path.parent}: {path.name} is not a JSON object ({error})") from error
    return fields if isinstance(fields, dict) else {}


def _without_weight(message: Mapping[str, Any]) -> Mapping[str, Any]:
    return {key: value for key, value in message.items() if key != WEIGHT} if WEIGHT in message else message


def _line(error: BaseException) -> int | None:
    """Return the line of the template that raised an error, or None if it was not raised in the template."""
    line, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == _TEMPLATE_FRAME:
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def _compile(text: str, name: str) -> BoundedTemplate:
    from jinja2.exceptions import TemplateSyntaxError

    try:
        template = BoundedTemplate(text)
    except TemplateSyntaxError as error:
        raise UserError(f"{name} is not a valid Jinja template (line {error.lineno}: {error}); fix it") from error
    except Exception as error:
        # Python may refuse the code that Jinja makes of it.
        raise UserError(f"{name} can't be compiled ({type(error).__name__}: {error}); fix it") from error
    try:
        template.render(conversations=[[{"role": "user", "content": "."}]])
    except EndlessTemplateError as error:
        raise UserError(f"{name} never ends: {error}; give another one (--chat-template)") from error
    except Exception:
        # It compiled; refusing this conversation says nothing about others.
        return template
    return template


def _expressions(template: str) -> tuple[frozenset[str], frozenset[str]]:
    """Return the strings and the names in a template's expressions and statements."""
    from jinja2 import Environment

    found: dict[str, set[str]] = {"string": set(), "name": set()}
    for token in Environment().lexer.tokenize(template):
        if token.type in found:
            found[token.type].add(token.value)
    return frozenset(found["string"]), frozenset(found["name"])


def own_template(directory: Path) -> str:
    """Return the text of a tokenizer's chat template.

    Raises:
        UserError: It has none, or one that is not UTF-8.
    """
    file = directory / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"tokenizer={directory}: {file.name} is not UTF-8 ({error}); save it as UTF-8") from error
    template = json_object(directory / "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):
        # The form of several templates: [{"name": "default", "template": ...}, ...].
        template = {one.get("name"): one.get("template") for one in template if isinstance(one, dict)}.get("default")
    if isinstance(template, str):
        return template
    raise UserError(
        f"--messages-field: the tokenizer {directory} has no chat template; add chat_template.jinja to the directory, "
        "give one (--chat-template), or use the tokenizer of a chat model"
    )


def _fixed_day(call: re.Match[str]) -> str:
    return json.dumps(time.strftime(call.group(2), _DAY))
