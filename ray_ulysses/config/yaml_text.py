"""Reads and writes YAML without duplicate keys, tags, or unquoted words that turn into other values.

PyYAML follows YAML 1.1, in which ``3e-4`` is text, ``no`` is false, ``1:30`` is 90 and ``010`` is 8. This module
applies the core schema of YAML 1.2 to plain scalars instead, and also accepts ``131_072`` as a number.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from ray_ulysses.errors import Problem, shown
from ray_ulysses.storage.place import Place, open_store
from ray_ulysses.storage.regular import open_regular

_TAG = "tag:yaml.org,2002:"
_RESOLVERS = (
    ("null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    ("bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    ("int", re.compile(r"^[-+]?[0-9]+(?:_[0-9]+)*$"), list("-+0123456789")),
    (
        "float",
        re.compile(
            r"^[-+]?(?:\.[0-9]+|[0-9]+(?:_[0-9]+)*(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$"
            r"|^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$"
        ),
        list("-+.0123456789"),
    ),
    ("merge", re.compile(r"^<<$"), ["<"]),
)

# A configuration has hundreds of values on five levels; anything beyond these bounds is a mistake or an attack.
_MOST_BYTES, _MOST_VALUES, _MOST_LEVELS = 2**17, 10_000, 50
_NO_TEXT = re.compile("[\0\ud800-\udfff]")


class QuotedText(str):
    """Text with a ``${`` in quotation marks: after expansion it stays text, even if it reads as a number."""

    __slots__ = ()


class _Loader(yaml.SafeLoader):
    """A safe loader with size limits, YAML 1.2's plain scalars and no tags. It records duplicate keys."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.duplicates: list[tuple[str, int, int]] = []
        self._num_values = self._level = 0
        self._sizes: dict[int, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Return the next node, and count its values, with aliases expanded, against the size limit."""
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        if getattr(event, "tag", None) is not None:
            raise _error(event, f"the tag {shown(event.tag)} is not supported; write a plain value")
        before = self._num_values
        self._level += 1
        if self._level > _MOST_LEVELS:
            raise _error(event, f"the value is nested deeper than {_MOST_LEVELS} levels")
        node = super().compose_node(parent, index)
        self._level -= 1
        if not isinstance(event, yaml.AliasEvent):
            self._num_values += 1
            self._sizes[id(node)] = self._num_values - before
        elif id(node) in self._sizes:
            self._num_values += self._sizes[id(node)]
        else:
            raise _error(event, "an alias must not occur inside the value that it refers to")
        if self._num_values > _MOST_VALUES:
            raise _error(event, f"the file contains more than {_MOST_VALUES:,} values, with aliases expanded")
        return node

    def compose_scalar_node(self, anchor: Any) -> yaml.ScalarNode:
        """Return the next scalar."""
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        if _NO_TEXT.search(event.value):
            raise _error(event, "text must not contain a zero byte or a lone surrogate")
        return super().compose_scalar_node(anchor)

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Return the next mapping. Keys are checked here, before merge keys add more."""
        node = super().compose_mapping_node(anchor)
        seen: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _error(key, "a key must be plain text")
            line = key.start_mark.line + 1
            if key.value in seen:
                self.duplicates.append((key.value, seen[key.value], line))
            seen.setdefault(key.value, line)
        return node

    def construct_int(self, node: yaml.ScalarNode) -> int:
        """Return a decimal number, without treating a leading zero as octal."""
        return int(self.construct_scalar(node))

    def construct_text(self, node: yaml.ScalarNode) -> str:
        """Return text, marked if it is quoted and may refer to a variable."""
        text = self.construct_scalar(node)
        return QuotedText(text) if node.style is not None and "${" in text else text


def _error(what: Any, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=what.start_mark)


class _Dumper(yaml.SafeDumper):
    """A safe dumper that quotes exactly the strings that `_Loader` would not read as text."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012

    def ignore_aliases(self, data: object) -> bool:
        return True


_Loader.add_constructor(_TAG + "int", _Loader.construct_int)
_Loader.add_constructor(_TAG + "str", _Loader.construct_text)
for _kind, _pattern, _first in _RESOLVERS:
    _Loader.add_implicit_resolver(_TAG + _kind, _pattern, _first)
    _Dumper.add_implicit_resolver(_TAG + _kind, _pattern, _first)


def parse_yaml(text: str, source: str) -> tuple[object, tuple[Problem, ...]]:
    """Parse a YAML text and return its value, and the problems of the text itself.

    Args:
        text: One YAML document. The value of an empty document is None.
        source: Name of the text, for problems.

    Returns:
        The value (None if the text is not valid YAML), and a problem for a syntax error or for each duplicate key.
    """
    if len(text) > _MOST_BYTES:
        rule = f"is larger than {_MOST_BYTES // 1024} KiB"
        hint = "specify a configuration file; a long model.config belongs in a config.json in the directory model.path"
        return None, (Problem(path=source, rule=rule, hint=hint),)
    try:
        loader = _Loader(text)
        value = loader.get_single_data()
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{source}:{mark.line + 1}:{mark.column + 1}" if mark is not None else source
        what = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
        return None, (Problem(path=place, rule=f"not valid YAML: {what}", hint="correct the file's syntax"),)
    problems = tuple(
        Problem(
            path=f"{source}:{again}",
            value=key,
            rule=f"the key occurs twice, on line {first} and on line {again}",
            hint="keep one of the two",
        )
        for key, first, again in loader.duplicates
    )
    return value, problems


def read_yaml(path: Place, *, is_users: bool = False) -> tuple[object, tuple[Problem, ...]]:
    """Parse a YAML file like `parse_yaml`. If the file can't be read, the problem states the reason.

    Symbolic links are followed only for a file specified by the user (``is_users``).
    """
    try:
        if not is_users or not isinstance(path, Path):
            return decode_yaml(open_store(path.parent).read_whole(path.name, _MOST_BYTES + 1), path)
        with open_regular(path) as stream:
            return decode_yaml(stream.read(_MOST_BYTES + 1), path)
    except FileNotFoundError:
        rule, hint = "the file does not exist", "check the path; configs/ has examples"
    except IsADirectoryError:
        rule, hint = "is a directory", "specify the YAML file in it"
    except OSError as error:
        rule, hint = f"can't be read ({error.strerror})", "check its permissions"
    return None, (Problem(path="CONFIG", value=str(path), rule=rule, hint=hint),)


def decode_yaml(content: bytes, path: Place) -> tuple[object, tuple[Problem, ...]]:
    """Parse the content of a YAML file like `parse_yaml`."""
    try:
        # The size limit may cut a character in half.
        text = content.decode("utf-8", errors="ignore" if len(content) > _MOST_BYTES else "strict")
    except UnicodeDecodeError:
        problem = Problem(path="CONFIG", value=str(path), rule="is not UTF-8 text", hint="specify a YAML file")
        return None, (problem,)
    return parse_yaml(text, path.name)


def dump_yaml(value: object) -> str:
    """Format mappings, lists and scalars as YAML text that `parse_yaml` parses to an equal value."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=110)
