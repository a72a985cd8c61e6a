"""Fields of JSON that may not be what it should: each is taken out with its type and its range checked."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

LIMIT = 2**63
"""Whole numbers lie below it: sizes and positions are handed to code that has 64 bits for them."""

_MOST_LEVELS = 50
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80


class FieldError(ValueError):
    """A field is missing or is not what it must be; the text begins with where it stands."""


def is_whole(value: object, least: int = 0, below: int = LIMIT) -> bool:
    """Whether a value of JSON is a whole number in a range; true and 1.0 are none."""
    return type(value) is int and least <= value < below


def is_number(value: object) -> bool:
    """Whether a value of JSON is a number, finite or not."""
    return type(value) is float or is_whole(value, -LIMIT)


def is_text(value: object) -> bool:
    """Whether a value of JSON is a text that can be written anywhere: JSON may hold halves of characters."""
    return isinstance(value, str) and (value.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in value))


def shown(value: object) -> str:
    """Return a value for an error, cut short."""
    if type(value) is str and len(value) < _SHORT.maxstring // 2 and value.isprintable():
        # Every tensor of a manifest has a name, and this is much quicker.
        return repr(value)
    return _SHORT.repr(value)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fields:
    """An object's fields. What takes one out raises `FieldError` if it is missing or wrong.

    Attributes:
        values: As JSON gave them.
        path: Where the object stands; empty for the outermost one.
    """

    values: Mapping[str, Any]
    path: str = ""

    def at(self, name: str) -> str:
        """Return where a field stands."""
        return f"{self.path}.{name}" if self.path else name

    def take(self, name: str) -> Any:
        """Return a field, whatever it is."""
        if name not in self.values:
            raise FieldError(f"{self.at(name)} is missing")
        return self.values[name]

    def wrong(self, name: str, why: str) -> FieldError:
        """Return the error that a field is what it is."""
        return FieldError(f"{self.at(name)} is {shown(self.values[name])}, {why}")

    def whole(self, name: str, *, least: int = 0, below: int = LIMIT) -> int:
        """Return a whole number in a range."""
        value = self.take(name)
        if not is_whole(value, least, below):
            raise self.wrong(name, f"not a whole number from {least} to {below - 1}")
        return int(value)

    def number(self, name: str, *, below: float) -> float:
        """Return a finite number from 0 on."""
        value = self.take(name)
        if not (is_number(value) and math.isfinite(value) and 0 <= value < below):
            raise self.wrong(name, f"not a number from 0 to {below:.0f}")
        return float(value)

    def text(self, name: str) -> str:
        """Return a text."""
        value = self.take(name)
        if not is_text(value):
            raise self.wrong(name, "not a text")
        return str(value)

    def object(self, name: str) -> Fields:
        """Return an object."""
        value = self.take(name)
        if not isinstance(value, dict):
            raise self.wrong(name, "not an object")
        return Fields(values=value, path=self.at(name))

    def items(self, name: str) -> list[Any]:
        """Return a list of whatever it holds."""
        value = self.take(name)
        if not isinstance(value, list):
            raise self.wrong(name, "not a list")
        return value

    def objects(self, name: str) -> list[Fields]:
        """Return a list of objects."""
        found = []
        for number, value in enumerate(self.items(name)):
            if not isinstance(value, dict):
                raise FieldError(f"{self.at(name)}[{number}] is {shown(value)}, not an object")
            found.append(Fields(values=value, path=f"{self.at(name)}[{number}]"))
        return found

    def members(self) -> dict[str, Fields]:
        """Return the objects that this one has as its values."""
        found = {}
        for name, value in self.values.items():
            path = f"{self.path}[{shown(name)}]"
            if not isinstance(value, dict):
                raise FieldError(f"{path} is {shown(value)}, not an object")
            found[name] = Fields(values=value, path=path)
        return found

    def mapping(self, name: str, fits: Callable[[Any], bool], kind: str) -> Mapping[str, Any]:
        """Return an object whose values are all of one kind, which is named in the error."""
        values = self.object(name).values
        for key, value in values.items():
            if not fits(value):
                raise FieldError(f"{self.at(name)}[{shown(key)}] is {shown(value)}, not {kind}")
        return values

    def free(self, name: str) -> Mapping[str, Any]:
        """Return an object of any content that is not nested deeper than can be worked with."""
        found = self.object(name)
        found.check_depth()
        return found.values

    def check_depth(self) -> None:
        """Check that what is in it is not nested deeper than can be worked with."""
        level: list[Any] = [self.values]
        for _ in range(_MOST_LEVELS):
            level = [child for parent in level for child in _children(parent)]
            if not level:
                return
        raise FieldError(f"{self.path} is nested deeper than {_MOST_LEVELS} levels")


def _children(value: object) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []
