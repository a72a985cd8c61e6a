"""Renders chat templates through Transformers within bounds on steps, time and sizes: a template is foreign code.

Transformers' sandbox bounds what a template may reach, but neither its loops nor its numbers. The bounds are put into
the tree that Jinja parses. A loop counts its turns where it begins, so that one over a few values costs a call.
"""

from __future__ import annotations

import functools
import inspect
import re
import time
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType
from typing import Any

MOST_CHARACTERS = 32 << 20
"""The longest text that is tokenized at once, at 150 bytes per character of the library's own; and that a template may
write."""
_MOST_STEPS = 10_000_000
_MOST_S = 30.0
# A loop over fewer values looks at the clock only where it begins.
_FEW = 64
_MOST_NUMBER = 100_000
_MOST_BITS = 1 << 16
# A list of twice the same list, again and again, is small until it is written or compared.
_MOST_NESTED = 1 << 18
_FORMAT_WIDTH = re.compile(r"[%{][^%{}a-zA-Z]*(?:\d{5}|\*)")
# Filters with a number of times or a width.
_COUNTING_FILTERS = ("center", "indent", "batch", "slice", "wordwrap", "round", "tojson")
# Methods of texts whose result may be far larger than the text and the arguments, and its size.
_GROWING: dict[str, Callable[..., int]] = {
    "join": lambda text, values: _joined_size(text, values),
    "replace": lambda text, old, new, *_: text.count(old) * len(new),
    "expandtabs": lambda text, size=8: text.count("\t") * size,
    "translate": lambda text, table: len(text) * _longest(table.values()),
}


class EndlessTemplateError(Exception):
    """A template goes on beyond the bounds."""


class BoundedTemplate:
    """A chat template that can be rendered any number of times.

    Args:
        text: The template.

    Raises:
        Exception: It can't be compiled: of any type, since Jinja makes Python code of it.
    """

    def __init__(self, text: str) -> None:
        from jinja2 import nodes
        from transformers.utils import chat_template_utils

        # Transformers makes an environment for each template. No other template has this one, past any cache.
        env: Any = inspect.unwrap(chat_template_utils._cached_compile_jinja_template)("").environment
        self._text, self._steps, self._deadline = text, 0, 0.0
        self._bound(env)
        template = env.parse(text)
        for loop in [*template.find_all(nodes.For)]:
            loop.iter = _filtered(loop.iter, "_counted")
        for block in [*template.find_all((nodes.For, nodes.Macro, nodes.CallBlock))]:
            if not isinstance(block, nodes.For) or block.recursive:
                block.body.insert(0, nodes.ExprStmt(_filtered(nodes.Const(1), "_step"), lineno=block.lineno))
        for assigned in [*template.find_all(nodes.Assign)]:
            assigned.node = _filtered(assigned.node, "_sized")
        for holder in [*template.find_all((nodes.List, nodes.Tuple))]:
            # The targets of a loop or an assignment are tuples too.
            if getattr(holder, "ctx", "load") == "load":
                holder.items = [_nested_node(item) for item in holder.items]
        for pair in [*template.find_all(nodes.Pair)]:
            pair.value = _nested_node(pair.value)
        template.set_environment(env)
        compiled = env.template_class.from_code(env, env.compile(template), env.make_globals(None))
        compiled.generate = functools.partial(_sized_parts, compiled.generate)
        # The same function with another compiler.
        public: Any = chat_template_utils.render_jinja_template
        names = {**public.__globals__, "_compile_jinja_template": lambda _: compiled}
        self._render: Any = FunctionType(public.__code__, names, public.__name__, public.__defaults__)

    def render(self, **arguments: Any) -> Any:
        """Call ``render_jinja_template`` of Transformers with this template.

        Raises:
            EndlessTemplateError: It takes too many steps, or too long.
            Exception: A template may raise anything.
        """
        self._steps, self._deadline = 0, time.monotonic() + _MOST_S
        return self._render(chat_template=self._text, **arguments)

    def _spend(self, steps: int) -> None:
        self._steps += steps
        if self._steps > _MOST_STEPS:
            raise EndlessTemplateError(f"it goes on after {_MOST_STEPS:,} turns of its loops")
        if time.monotonic() > self._deadline:
            raise EndlessTemplateError(f"it goes on after {_MOST_S:g} s")

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
        """Raise OverflowError for values that are large where a list counts each time that they hold it."""
        seen, size, held = 0, 0, [*values]
        while held:
            value = held.pop()
            if isinstance(value, str):
                size += len(value)
            elif isinstance(value, list | tuple | dict):
                seen += len(value)
                if seen > _MOST_NESTED:
                    raise OverflowError(f"a value of more than {_MOST_NESTED:,} nested ones is too large")
                held.extend(value.values() if isinstance(value, dict) else value)
        _refuse_size(size)
        if seen:
            self._spend(seen)

    def _bound(self, env: Any) -> None:
        """Put the bounds into an environment."""
        from jinja2 import pass_context
        from jinja2.exceptions import SecurityError

        bounded_range = env.globals["range"]

        # With a context, so that they are not evaluated while compiling.
        @pass_context
        def step(_: Any, steps: int) -> None:
            self._spend(steps)

        @pass_context
        def counted(_: Any, values: Any) -> Any:
            if not hasattr(values, "__len__"):
                return self._timed(values, 1)
            self._spend(len(values))
            return values if len(values) < _FEW else _Timed(values, self._timed)

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
            # As in the sandbox itself, without a call of another function.
            if not env.is_safe_callable(called):
                raise SecurityError(f"{called!r} is not safely callable")
            return context.call(called, *arguments, **options)

        wrap = env.wrap_str_format

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

        @pass_context
        def nested(_: Any, value: Any) -> Any:
            self._refuse_nested((value,))
            return value

        env.filters |= {"_step": step, "_counted": counted, "_sized": self._sized, "_nested": nested}
        # It draws text by chance, of any length.
        del env.globals["lipsum"]
        env.filters |= {name: _counting(env.filters[name]) for name in _COUNTING_FILTERS}
        env.filters["format"] = _formatting(env.filters["format"])
        env.filters["replace"] = _replacing(env.filters["replace"])
        env.filters["join"] = _joining(env.filters["join"])
        env.globals["range"] = counted_range
        env.call, env.wrap_str_format, env.concat = counted_call, wrap_str_format, _joined
        env.intercepted_binops = frozenset(("*", "**", "%"))
        env.call_binop = functools.partial(_binary, env.binop_table)


class _Timed:
    """Values whose iteration looks at the clock; they have a length, which ``loop.length`` takes."""

    def __init__(self, values: Any, timed: Callable[[Iterable[Any], int], Iterator[Any]]) -> None:
        self._values, self._timed = values, timed

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[Any]:
        return self._timed(self._values, 0)


def _filtered(node: Any, name: str) -> Any:
    from jinja2 import nodes

    return nodes.Filter(node, name, [], [], None, None, lineno=getattr(node, "lineno", None))


def _nested_node(node: Any) -> Any:
    from jinja2 import nodes

    return node if isinstance(node, nodes.Const) else _filtered(node, "_nested")


def _binary(table: Any, _: Any, operator: str, left: Any, right: Any) -> Any:
    """Return a product, a power, a remainder or a formatted text; OverflowError if it would be large."""
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
            raise OverflowError(f"the number {value if _bits(value) < 64 else '2**64'} or more is too large")


def _refuse_wide(text: object) -> None:
    if isinstance(text, str) and _FORMAT_WIDTH.search(text):
        raise OverflowError("a format has a width that is too large")


def _counting(called: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(called)
    def counting(*arguments: Any, **options: Any) -> Any:
        _refuse_large_numbers((*arguments[1:], *options.values()))
        return called(*arguments, **options)

    return counting


def _formatting(called: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(called)
    def formatting(value: Any, *arguments: Any, **options: Any) -> Any:
        _refuse_wide(str(value))
        return called(value, *arguments, **options)

    return formatting


def _replacing(called: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(called)
    def replacing(context: Any, text: Any, old: Any, new: Any, *count: Any) -> Any:
        _refuse_size(str(text).count(str(old)) * len(str(new)))
        return called(context, text, old, new, *count)

    return replacing


def _joining(called: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(called)
    def joining(context: Any, value: Any, d: Any = "", *attribute: Any, **options: Any) -> Any:
        held = list(value)
        _refuse_size(_joined_size(str(d), held))
        return called(context, held, d, *attribute, **options)

    return joining


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
