"""Applies ``--set a.b=c`` to a configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from ray_ulysses.config.yaml_text import parse_yaml
from ray_ulysses.errors import Problem

_LONGEST_PATH = 200
_FORM = "write --set section.setting=value, such as --set run.stop_step=200"


def apply_overrides(
    tree: Mapping[str, object], overrides: Sequence[str]
) -> tuple[dict[str, object], tuple[Problem, ...]]:
    """Return a copy of a configuration tree with overrides applied in order, and what is wrong with them.

    Args:
        tree: The configuration as read from YAML.
        overrides: Texts of the form ``a.b=c``; the value is read as YAML, so that ``[1, 2]`` is a list and
            an empty one is null. A number or the name of an entry leads into a list, as in ``stages.long.lr=1e-5``.
            Names that don't exist are left for the schema to refuse.
    """
    changed = {name: _unshared(value) for name, value in tree.items()}
    problems: list[Problem] = []
    for override in overrides:
        path, separator, text = override.partition("=")
        names = path.strip().split(".")
        # No setting has a name that a terminal can't print.
        if not (separator and len(names) > 1 and all(names) and path.isprintable() and len(path) <= _LONGEST_PATH):
            problems.append(Problem(path="--set", value=override, rule="is not of the form a.b=c", hint=_FORM))
            continue
        value, wrong = parse_yaml(text, f"--set {path}")
        problems.extend(wrong)
        if not wrong:
            problems.extend(_put(changed, names, value))
    return changed, tuple(problems)


def _unshared(value: object) -> object:
    """Return a copy in which no two places are one object, as an anchor of YAML and its aliases are."""
    if isinstance(value, Mapping):
        return {name: _unshared(below) for name, below in value.items()}
    return [_unshared(below) for below in value] if isinstance(value, list | tuple) else value


def _put(tree: dict[str, object], names: Sequence[str], value: object) -> tuple[Problem, ...]:
    """Set one value inside nested mappings and lists, in place; missing and null mappings are created."""
    node: dict[str, object] | list[object] = tree
    for depth, name in enumerate(names):
        holder, place = ".".join(names[:depth]), _place(node, name)
        if place is None:
            rule = f"{holder} has no entry {name!r}"
            return (Problem(path="--set", value=".".join(names), rule=rule, hint=_entries(node)),)
        entries = cast("dict[object, object]", node)
        if depth == len(names) - 1:
            entries[place] = value
            break
        below = entries.get(place) if isinstance(node, dict) else entries[place]
        if below is None:
            below = entries[place] = {}
        if not isinstance(below, dict | list):
            holder = ".".join(names[: depth + 1])
            rule = f"{holder} is a value, not a group of settings"
            return (Problem(path="--set", value=".".join(names), rule=rule, hint=f"set {holder} itself"),)
        node = below
    return ()


def _place(node: Mapping[str, object] | Sequence[object], name: str) -> str | int | None:
    """Return where a name leads: in a list, such as that of stages, the name of an entry, else a number from 0."""
    if isinstance(node, Mapping):
        return name
    if (named := next((number for number, entry in enumerate(node) if _name_of(entry) == name), None)) is not None:
        # A stage may be called 8192.
        return named
    return int(name) if name.isascii() and name.isdigit() and int(name) < len(node) else None


def _entries(node: Mapping[str, object] | Sequence[object]) -> str:
    named = [name for entry in node if (name := _name_of(entry)) is not None]
    return f"use a number from 0 to {len(node) - 1}" + (f", or a name: {', '.join(named)}" if named else "")


def _name_of(entry: object) -> str | None:
    return str(entry["name"]) if isinstance(entry, Mapping) and "name" in entry else None
