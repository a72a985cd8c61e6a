"""Reads a user's configuration file: the files that it extends, and the environment variables in its values."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from ray_ulysses.config.credentials import CREDENTIALS
from ray_ulysses.config.yaml_text import QuotedText, parse_yaml, read_yaml
from ray_ulysses.errors import Problem, names_secret

_EXTENDS = "extends"
_REFERENCE = re.compile(r"\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^{}]*))?\}")


def read_extended(
    path: Path, environment: Mapping[str, str], above: tuple[Path, ...] = ()
) -> tuple[object, tuple[Problem, ...]]:
    """Parse a configuration file over the file that it ``extends``, if any.

    Sections are merged setting by setting; a setting, and the list of stages, replaces that of the extended file.

    Args:
        path: The file.
        environment: The variables that ``extends`` may refer to. References in settings remain, see `expanded`.
        above: The files that extend this one.

    Returns:
        The merged value, or None if a file can't be read, and the problems of all files.
    """
    tree, problems = read_yaml(path, is_users=True)
    if not isinstance(tree, dict) or _EXTENDS not in tree:
        return tree, problems
    written = tree.pop(_EXTENDS)
    base, wrong = expanded({_EXTENDS: written}, environment)
    if wrong:
        return tree, (*problems, *wrong)
    if not isinstance(name := base[_EXTENDS], str):
        rule, hint = "must be the path of a configuration file", "write a path relative to this file, or remove it"
        return tree, (*problems, Problem(path=_EXTENDS, value=written, rule=rule, hint=hint))
    below, chain = path.parent / os.path.expanduser(name), (*above, path.resolve())
    if below.resolve() in chain:
        rule, hint = "the file extends itself, directly or through other files", "extend another file"
        return tree, (*problems, Problem(path=_EXTENDS, value=name, rule=rule, hint=hint))
    found, wrong = read_extended(below, environment, chain)
    if found is None and wrong:
        return None, tuple(replace(one, path=_EXTENDS) if one.path == "CONFIG" else one for one in wrong)
    if not isinstance(found, dict | None):
        rule, hint = "the file must contain sections such as run, model and data", "extend another file"
        return None, (Problem(path=_EXTENDS, value=name, rule=rule, hint=hint),)
    return _merged(found or {}, tree), (*wrong, *problems)


def _merged(below: Mapping[str, object], above: Mapping[str, object]) -> dict[str, object]:
    merged = dict(below)
    for name, section in above.items():
        under = merged.get(name)
        # A section whose settings are all commented out changes nothing.
        given = {} if section is None else section
        merged[name] = {**under, **given} if isinstance(under, dict) and isinstance(given, dict) else section
    return merged


def expanded(
    tree: Mapping[str, object], environment: Mapping[str, str]
) -> tuple[dict[str, object], tuple[Problem, ...]]:
    """Return a tree with ``${NAME}`` and ``${NAME:-default}`` replaced in all its texts, and the problems.

    A reference that is a whole value, without quotation marks, may become a number, true, false or null.
    """
    problems: list[Problem] = []
    return {name: _expanded(value, environment, name, problems) for name, value in tree.items()}, tuple(problems)


def _expanded(value: object, environment: Mapping[str, str], path: str, problems: list[Problem]) -> object:
    if isinstance(value, Mapping):
        return {key: _expanded(below, environment, f"{path}.{key}", problems) for key, below in value.items()}
    if isinstance(value, list):
        return [_expanded(below, environment, f"{path}.{number}", problems) for number, below in enumerate(value)]
    if not isinstance(value, str):
        return value
    problems.extend(wrong := list(_wrong_references(value, environment, path)))
    if wrong:
        return value
    # As in a shell, the default also replaces an empty value.
    text = _REFERENCE.sub(lambda found: environment.get(found["name"]) or found["default"] or "", value)
    if _REFERENCE.fullmatch(value) is None or isinstance(value, QuotedText):
        return text
    scalar, _ = parse_yaml(text, "")
    return scalar if isinstance(scalar, int | float) or text in ("", "~", "null") else text


def _wrong_references(text: str, environment: Mapping[str, str], path: str) -> Iterator[Problem]:
    for found in _REFERENCE.finditer(text):
        name = found["name"]
        if name in CREDENTIALS or names_secret(name):
            rule = f"{name} looks like a secret, and the configuration is stored with the run"
            hint = "remove it, and set it in the environment of every node or in cluster.secrets_file"
            yield Problem(path=path, value=text, rule=rule, hint=hint)
        elif name not in environment and found["default"] is None:
            rule, hint = f"the environment variable {name} is not set", f"set it, or write ${{{name}:-default}}"
            yield Problem(path=path, value=text, rule=rule, hint=hint)
