"""Applies ``--set a.b=c`` to a configuration."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

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
            an empty one is null. Names that don't exist are left for the schema to refuse.
    """
    changed = copy.deepcopy(dict(tree))
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


def _put(tree: dict[str, object], names: Sequence[str], value: object) -> tuple[Problem, ...]:
    """Set one value inside nested mappings, in place; missing and null mappings on the way are created."""
    node = tree
    for depth, name in enumerate(names[:-1], start=1):
        below = node.get(name)
        if below is None:
            below = node[name] = {}
        if not isinstance(below, dict):
            holder = ".".join(names[:depth])
            rule = f"{holder} is a value, not a group of settings"
            return (Problem(path="--set", value=".".join(names), rule=rule, hint=f"set {holder} itself"),)
        node = below
    node[names[-1]] = value
    return ()
