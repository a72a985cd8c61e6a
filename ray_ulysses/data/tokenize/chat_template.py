"""Loads a Hugging Face tokenizer's chat template and renders it with Transformers, within resource limits.

A template is untrusted code. Transformers' sandbox limits what a template may access, but neither its loops nor the
sizes of its values. Limits on steps, time and sizes are therefore inserted into the syntax tree that Jinja produces. A
loop over a few values is checked only when the loop begins, which costs one call per loop.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import json
import re
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

from ray_ulysses.data.sources.rows import WEIGHT, RowError
from ray_ulysses.errors import UserError
from ray_ulysses.validation import parse_json

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]

TRAINING = "training"
_SUFFIX = "_training.jinja"
_GENERATION_MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# Llama 3.1's and other templates write the current date. Resuming a preparation on another day must give the same
# tokens, so the date is fixed to the one that Llama 3.2's template uses without a clock: 26 July 2024.
_CLOCK_CALL = re.compile(r"""strftime_now\(\s{0,9}(["'])(.{0,99}?)\1\s{0,9}\)""")
_DAY = (2024, 7, 26, 0, 0, 0, 4, 208, 0)
_MOST_TEMPLATE = 1 << 20
# A few conversations may be too long for a template; if there are more, the template itself never ends.
_MOST_ENDLESS = 8
# File name in tracebacks of a template that Jinja did not load from a file.
_TEMPLATE_FRAME = "<template>"

MOST_CHARACTERS = 32 << 20
"""Maximum number of characters that are tokenized at once (the library needs 150 bytes per character), and maximum
length of a rendered conversation."""
_MOST_STEPS = 10_000_000
_MOST_S = 30.0
# A loop over fewer values checks the time only when it begins.
_FEW = 64
_MOST_NUMBER = 100_000
_MOST_BITS = 1 << 16
# Lists that contain the same list many times are small in memory until they are rendered or compared.
_MOST_NESTED = 1 << 18
_FORMAT_WIDTH = re.compile(r"[%{][^%{}a-zA-Z]*(?:\d{5}|\*)")
# Filters that take a repeat count or a width.
_COUNTING_FILTERS = ("center", "indent", "batch", "slice", "wordwrap", "round", "tojson")
# String methods whose result may be far larger than their inputs, with the size that each method adds.
_GROWING: dict[str, Callable[..., int]] = {
    "join": lambda text, values: _joined_size(text, values),
    "replace": lambda text, old, new, *_: text.count(old) * len(new),
    "expandtabs": lambda text, size=8: text.count("\t") * size,
    "translate": lambda text, table: len(text) * _longest(table.values()),
}


class ChatTemplate:
    """A loaded chat template.

    Args:
        directory: The tokenizer directory, whose named special tokens the template may use.
        source: Text of the template, or None for the tokenizer's own template.

    Attributes:
        source: Text of the template.
        has_marks: Whether the template marks the assistant's text with ``{% generation %}``.
        literals: String constants in the template's expressions.
        names: Names in the template's expressions.

    Raises:
        UserError: The tokenizer has no template, or the template is invalid.
    """

    def __init__(self, directory: Path, source: str | None = None) -> None:
        from jinja2 import Environment

        self.source = own_template(directory) if source is None else source
        self.has_marks = _GENERATION_MARK.search(self.source) is not None
        self._named_tokens = named_tokens(directory)
        self._name = f"tokenizer={directory}: its chat template" if source is None else "--chat-template: the file"
        self._num_endless = 0
        if len(self.source) > _MOST_TEMPLATE:
            raise UserError(f"{self._name} has {len(self.source)} characters; the limit is {_MOST_TEMPLATE}")
        fixed = _CLOCK_CALL.sub(lambda call: json.dumps(time.strftime(call.group(2), _DAY)), self.source)
        self._template = self._compiled(fixed)
        tokens = [*Environment().lexer.tokenize(fixed)]
        self.literals = frozenset(token.value for token in tokens if token.type == "string")
        self.names = frozenset(token.value for token in tokens if token.type == "name")

    def _compiled(self, text: str) -> _BoundedTemplate:
        from jinja2.exceptions import TemplateSyntaxError

        try:
            template = _BoundedTemplate(text)
        except TemplateSyntaxError as error:
            raise UserError(
                f"{self._name} is not a valid Jinja template (line {error.lineno}: {error}); correct the template"
            ) from error
        except Exception as error:
            # Python may reject the code that Jinja generates.
            raise UserError(f"{self._name} can't be compiled ({type(error).__name__}: {error}); correct it") from error
        try:
            template.render(conversations=[[{"role": "user", "content": "."}]])
        except EndlessTemplateError as error:
            raise UserError(f"{self._name} never ends: {error}; use another template (--chat-template)") from error
        except Exception:
            # The template compiled. It may refuse this conversation and still render others.
            return template
        return template

    def render(self, messages: Messages, tools: Tools, *, asks: bool = False) -> str:
        """Render a conversation, followed by the generation prompt if ``asks`` is set.

        Raises:
            RowError: The template refuses the conversation. The reason includes the template's line number.
        """
        return self.render_marked(messages, tools, asks=asks, marks=False)[0]

    def render_marked(
        self, messages: Messages, tools: Tools, *, asks: bool = False, marks: bool = True
    ) -> tuple[str, list[tuple[int, int]]]:
        """Render like `render`; return the text and, if ``marks`` is set, the character ranges in generation marks."""
        conversation = [{key: value for key, value in message.items() if key != WEIGHT} for message in messages]
        try:
            texts, marked = self._template.render(
                conversations=[conversation],
                tools=[dict(tool) for tool in tools] or None,
                add_generation_prompt=asks,
                return_assistant_tokens_mask=marks,
                **self._named_tokens,
            )
        except EndlessTemplateError as error:
            self._num_endless += 1
            if self._num_endless > _MOST_ENDLESS:
                raise UserError(f"{self._name} never ends: {error}; use another template (--chat-template)") from error
            raise RowError(f"the chat template does not terminate: {error}") from error
        except Exception as error:
            # Template code may raise any exception.
            frames = traceback.walk_tb(error.__traceback__)
            lines = [line for frame, line in frames if frame.f_code.co_filename == _TEMPLATE_FRAME]
            where = f" in line {lines[-1]}" if lines else ""
            raise RowError(f"the chat template fails{where}: {type(error).__name__}: {error}") from error
        return texts[0], sorted(marked[0]) if marks else []


def own_template(directory: Path) -> str:
    """Return the text of a tokenizer's chat template.

    Raises:
        UserError: The tokenizer has no template, or the template is not UTF-8.
    """
    file = directory / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"tokenizer={directory}: {file.name} is not UTF-8 ({error}); save it as UTF-8") from error
    template = json_object(directory / "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):
        # A list of several templates: [{"name": "default", "template": ...}, ...].
        template = {one.get("name"): one.get("template") for one in template if isinstance(one, dict)}.get("default")
    if isinstance(template, str):
        return template
    raise UserError(
        f"--messages-field: the tokenizer {directory} has no chat template; add chat_template.jinja to the directory, "
        "set --chat-template, or use a chat model's tokenizer"
    )


def training_template(tokenizer: str | Path, folder: Path | None = None) -> str:
    """Return TRL's training variant of a tokenizer's chat template, which marks the assistant's text.

    Args:
        tokenizer: The tokenizer directory.
        folder: Folder of TRL's templates, or None to use the installed package, without importing it.

    Raises:
        UserError: The tokenizer has no template, TRL is not installed, or TRL has no variant of the template.
    """
    own = own_template(Path(tokenizer)).strip()
    folder = folder or trl_templates()
    hint = "remove the option: the turns of any template can be found by rendering (--turns split)"
    if folder is None:
        raise UserError(
            f"--chat-template={TRAINING}: requires the templates from the trl package; install trl (pip install trl), "
            f"or {hint}"
        )
    for path in sorted(folder.glob(f"*{_SUFFIX}")):
        plain = path.with_name(path.name.removesuffix(_SUFFIX) + ".jinja")
        if plain.is_file() and plain.read_text(encoding="utf-8").strip() == own:
            return path.read_text(encoding="utf-8")
    raise UserError(
        f"--chat-template={TRAINING}: TRL has no training variant of the chat template of tokenizer={tokenizer}; use "
        f"a file, or {hint}"
    )


def trl_templates() -> Path | None:
    """Return the chat template folder of the installed TRL package, or None if TRL is not installed."""
    found = importlib.util.find_spec("trl")
    places = [] if found is None else found.submodule_search_locations or []
    return next((Path(place) / "chat_templates" for place in places if (Path(place) / "chat_templates").is_dir()), None)


def named_tokens(directory: Path) -> dict[str, str]:
    """Return the tokens that templates refer to by name, such as bos_token and eos_token."""
    found = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        for name, token in json_object(directory / file).items():
            content = token.get("content") if isinstance(token, dict) else token
            if name.endswith("_token") and isinstance(content, str):
                found[name] = content
    return found


def json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a tokenizer file, or an empty dict if the file does not exist.

    Raises:
        UserError: The file is not a JSON object.
    """
    if not path.is_file():
        return {}
    try:
        fields = parse_json(path.read_bytes())
    except ValueError as error:
        raise UserError(f"tokenizer={path.parent}: {path.name} is not a JSON object ({error})") from error
    if not isinstance(fields, dict):
        raise UserError(f"tokenizer={path.parent}: {path.name} is not a JSON object")
    return fields


class EndlessTemplateError(Exception):
    """Error for a template that exceeds the limits on steps or time."""


class _BoundedTemplate:
    """A compiled chat template. Compiling a template may raise any exception."""

    def __init__(self, text: str) -> None:
        from transformers.utils import chat_template_utils

        # Transformers creates an environment per template. Bypass its cache, so that this environment is not shared.
        env: Any = inspect.unwrap(chat_template_utils._cached_compile_jinja_template)("").environment
        self._text, self._steps, self._deadline = text, 0, 0.0
        self._bound(env)
        template = env.parse(text)
        _insert_bounds(template)
        template.set_environment(env)
        compiled = env.template_class.from_code(env, env.compile(template), env.make_globals(None))
        compiled.generate = functools.partial(_sized_parts, compiled.generate)
        # A copy of render_jinja_template that uses our compiled template.
        public: Any = chat_template_utils.render_jinja_template
        names = {**public.__globals__, "_compile_jinja_template": lambda _: compiled}
        self._render: Any = FunctionType(public.__code__, names, public.__name__, public.__defaults__)

    def render(self, **arguments: Any) -> Any:
        """Call Transformers' ``render_jinja_template`` with this template.

        Raises:
            EndlessTemplateError: The template exceeds the limit on steps or time.
            Exception: Template code may raise any exception.
        """
        self._steps, self._deadline = 0, time.monotonic() + _MOST_S
        return self._render(chat_template=self._text, **arguments)

    def _spend(self, steps: int) -> None:
        self._steps += steps
        if self._steps > _MOST_STEPS:
            raise EndlessTemplateError(f"the loops run for more than {_MOST_STEPS:,} iterations")
        if time.monotonic() > self._deadline:
            raise EndlessTemplateError(f"rendering takes more than {_MOST_S:g} s")

    def _timed(self, values: Iterable[Any], steps: int) -> Iterator[Any]:
        for number, value in enumerate(values):
            if not number & 31:
                self._spend(32 * steps)
            yield value

    def _sized(self, value: Any) -> Any:
        if isinstance(value, str):
            _refuse_size(len(value))
        elif isinstance(value, list | tuple) and (
            len(value) > _MOST_NESTED or any(isinstance(one, list | tuple) for one in value)
        ):
            self._refuse_nested((value,))
        return value

    def _refuse_nested(self, values: Iterable[Any]) -> None:
        """Raise OverflowError if the values are too large when every occurrence of a shared list is counted."""
        seen, size, held = 0, 0, [*values]
        while held:
            value = held.pop()
            if isinstance(value, str):
                size += len(value)
            elif isinstance(value, list | tuple | dict):
                seen += len(value)
                if seen > _MOST_NESTED:
                    raise OverflowError(f"a value with more than {_MOST_NESTED:,} nested values is too large")
                held.extend(value.values() if isinstance(value, dict) else value)
        _refuse_size(size)
        if seen:
            self._spend(seen)

    def _bound(self, env: Any) -> None:
        """Install the resource limits in a Jinja environment."""
        from jinja2 import pass_context
        from jinja2.exceptions import SecurityError

        bounded_range, wrap = env.globals["range"], env.wrap_str_format

        # The context argument prevents Jinja from evaluating these filters at compile time.
        @pass_context
        def step(_: Any, steps: int) -> None:
            self._spend(steps)

        @pass_context
        def counted(_: Any, values: Any) -> Any:
            if not hasattr(values, "__len__"):
                return self._timed(values, 1)
            self._spend(len(values))
            return values if len(values) < _FEW else _Timed(values, self._timed)

        @pass_context
        def nested(_: Any, value: Any) -> Any:
            self._refuse_nested((value,))
            return value

        def counted_range(*arguments: int) -> range:
            found: range = bounded_range(*arguments)
            self._spend(len(found))
            return found

        def counted_call(context: Any, called: Any, /, *arguments: Any, **options: Any) -> Any:
            for value in (*arguments, *options.values()) if options else arguments:
                if type(value) is int and value > _MOST_NUMBER and called is not counted_range:
                    _refuse_large_numbers([value])
            if options:
                self._refuse_nested(options.values())
            if type(text := getattr(called, "__self__", None)) is str and (size := _GROWING.get(called.__name__)):
                arguments = tuple(list(value) if hasattr(value, "__next__") else value for value in arguments)
                _refuse_size(size(text, *arguments, *options.values()))
            # The sandbox's own check, without another function call.
            if not env.is_safe_callable(called):
                raise SecurityError(f"{called!r} is not safely callable")
            return context.call(called, *arguments, **options)

        def wrap_str_format(value: Any) -> Any:
            wrapped = wrap(value)
            if wrapped is None:
                return None
            text = value.__self__
            _refuse_wide(text)

            def bounded(*arguments: Any, **options: Any) -> Any:
                mapped = [one for held in arguments if isinstance(held, dict) for one in held.values()]
                _refuse_size(text.count("{") * _longest((*arguments, *options.values(), *mapped)))
                return wrapped(*arguments, **options)

            return bounded

        # lipsum generates random text of any length.
        del env.globals["lipsum"]
        env.globals["range"] = counted_range
        env.filters |= {"_step": step, "_counted": counted, "_sized": self._sized, "_nested": nested}
        env.filters |= {name: _checked(env.filters[name], _check_numbers) for name in _COUNTING_FILTERS}
        env.filters |= {
            "join": _bounded_join(env.filters["join"]),
            "format": _checked(env.filters["format"], lambda value, *_, **__: _refuse_wide(str(value))),
            "replace": _checked(
                env.filters["replace"],
                lambda _, text, old, new, *__: _refuse_size(str(text).count(str(old)) * len(str(new))),
            ),
        }
        env.call, env.wrap_str_format, env.concat = counted_call, wrap_str_format, _joined
        env.intercepted_binops = frozenset(("*", "**", "%"))
        env.call_binop = functools.partial(_binary, env.binop_table)


def _insert_bounds(template: Any) -> None:
    """Wrap values in a template's syntax tree in the filters that limit the values' sizes and loops."""
    from jinja2 import nodes

    def filtered(node: Any, name: str) -> Any:
        return nodes.Filter(node, name, [], [], None, None, lineno=getattr(node, "lineno", None))

    def nested(node: Any) -> Any:
        return node if isinstance(node, nodes.Const) else filtered(node, "_nested")

    for loop in [*template.find_all(nodes.For)]:
        loop.iter = filtered(loop.iter, "_counted")
    for block in [*template.find_all((nodes.For, nodes.Macro, nodes.CallBlock))]:
        if not isinstance(block, nodes.For) or block.recursive:
            block.body.insert(0, nodes.ExprStmt(filtered(nodes.Const(1), "_step"), lineno=block.lineno))
    for assigned in [*template.find_all(nodes.Assign)]:
        assigned.node = filtered(assigned.node, "_sized")
    for holder in [*template.find_all((nodes.List, nodes.Tuple))]:
        # The targets of loops and assignments are tuples too.
        if getattr(holder, "ctx", "load") == "load":
            holder.items = [nested(item) for item in holder.items]
    for pair in [*template.find_all(nodes.Pair)]:
        pair.value = nested(pair.value)


class _Timed:
    """Values that check the time limit while a loop iterates over them. ``loop.length`` requires ``__len__``."""

    def __init__(self, values: Any, timed: Callable[[Iterable[Any], int], Iterator[Any]]) -> None:
        self._values, self._timed = values, timed

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[Any]:
        return self._timed(self._values, 0)


def _checked(called: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
    @functools.wraps(called)
    def checking(*arguments: Any, **options: Any) -> Any:
        check(*arguments, **options)
        return called(*arguments, **options)

    return checking


def _bounded_join(join: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(join)
    def joining(context: Any, value: Any, d: Any = "", *attribute: Any, **options: Any) -> Any:
        held = list(value)
        _refuse_size(_joined_size(str(d), held))
        return join(context, held, d, *attribute, **options)

    return joining


def _check_numbers(*arguments: Any, **options: Any) -> None:
    _refuse_large_numbers((*arguments[1:], *options.values()))


def _binary(table: Any, _: Any, operator: str, left: Any, right: Any) -> Any:
    """Evaluate ``*``, ``**`` or ``%``; raise OverflowError if the result would be too large."""
    if operator == "%":
        _refuse_wide(left)
        if isinstance(left, str):
            _refuse_size(left.count("%") * _longest(right if isinstance(right, tuple) else (right,)))
    elif operator == "*":
        times, other = (left, right) if isinstance(left, int) else (right, left)
        if hasattr(other, "__len__") and isinstance(times, int) and len(other) * times > MOST_CHARACTERS:
            raise OverflowError(f"a value repeated {times} times is too large")
        if isinstance(times, int) and isinstance(other, int) and _bits(times) + _bits(other) > _MOST_BITS:
            raise OverflowError("the product is too large")
    elif isinstance(left, int) and isinstance(right, int) and _bits(left) * abs(right) > _MOST_BITS:
        raise OverflowError("the power is too large")
    return table[operator](left, right)


def _bits(number: int) -> int:
    return int(number).bit_length()


def _refuse_large_numbers(values: Iterable[object]) -> None:
    for value in values:
        if type(value) is int and value > _MOST_NUMBER:
            raise OverflowError(f"the number {value if _bits(value) < 64 else '2**64 or more'} is too large")


def _refuse_wide(text: object) -> None:
    if isinstance(text, str) and _FORMAT_WIDTH.search(text):
        raise OverflowError("the width in a format string is too large")


def _joined_size(text: str, values: Any) -> int:
    return len(text) * len(values) + sum(len(value) for value in values if isinstance(value, str))


def _longest(values: Iterable[Any]) -> int:
    return max((len(value) for value in values if isinstance(value, str)), default=0)


def _refuse_size(size: int) -> None:
    if size > MOST_CHARACTERS:
        raise OverflowError(f"a text of {size:,} characters is too large")


def _joined(parts: Iterable[str]) -> str:
    held = list(parts)
    _refuse_size(sum(map(len, held)))
    return "".join(held)


def _sized_parts(generate: Callable[..., Iterator[str]], *arguments: Any, **options: Any) -> Iterator[str]:
    size = 0
    for part in generate(*arguments, **options):
        size += len(part)
        _refuse_size(size)
        yield part
