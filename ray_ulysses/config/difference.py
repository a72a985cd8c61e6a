"""Compares two values of a setting, key by key where they are mappings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ray_ulysses.errors import NOT_GIVEN


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """One place where two values differ.

    Attributes:
        name: Dotted name of the place, such as ``rope_scaling.factor``; empty where the values differ as a whole.
        old: Its old value; ``NOT_GIVEN`` where there was none.
        new: Its new value.
    """

    name: str
    old: object
    new: object


def differences(old: object, new: object) -> tuple[Difference, ...]:
    """Return where two JSON values differ, in the order of the old one.

    Mappings are compared key by key, and lists of mappings of equal length entry by entry.
    """
    return tuple(_differences(old, new, ""))


def _differences(old: object, new: object, name: str) -> Iterator[Difference]:
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new) and _are_mappings(*old, *new):
        old, new = dict(enumerate(old)), dict(enumerate(new))
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in dict.fromkeys((*old, *new)):
            below = f"{name}.{key}" if name else f"{key}"
            yield from _differences(old.get(key, NOT_GIVEN), new.get(key, NOT_GIVEN), below)
    elif old != new:
        yield Difference(name=name, old=old, new=new)


def _are_mappings(*values: object) -> bool:
    return bool(values) and all(isinstance(value, Mapping) for value in values)
