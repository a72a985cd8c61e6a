"""From pydantic's errors to ours: the setting, its value, the rule, the way out and the nearest name."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from ray_ulysses.config.schema import section_models, setting_paths
from ray_ulysses.errors import NOT_GIVEN, Problem

_REFERENCE = "docs/configuration.md lists every setting"
_TEXT = "write it in quotes if it looks like a number, a date or a truth value"

# What to say for each kind of pydantic error; a kind that is not here keeps pydantic's own words.
_WORDS: dict[str, Callable[[Mapping[str, Any]], tuple[str, str]]] = {
    "missing": lambda _: ("the setting is required", "add it to the file, or give it with --set"),
    "greater_than": lambda c: (f"must be above {c['gt']}", f"use a number above {c['gt']}"),
    "greater_than_equal": lambda c: (f"must be at least {c['ge']}", f"use {c['ge']} or more"),
    "less_than": lambda c: (f"must be below {c['lt']}", f"use a number below {c['lt']}"),
    "less_than_equal": lambda c: (f"must be at most {c['le']}", f"use {c['le']} or less"),
    "finite_number": lambda _: ("must be a finite number", "use an ordinary number"),
    "int_type": lambda _: ("must be a whole number", "write a number without a fraction or quotes"),
    "int_from_float": lambda _: ("must be a whole number", "write a number without a fraction"),
    "float_type": lambda _: ("must be a number", "write a number without quotes"),
    "bool_type": lambda _: ("must be true or false", "write true or false"),
    "string_type": lambda _: ("must be text", _TEXT),
    "string_too_short": lambda _: ("must not be empty", "give a text"),
    "string_too_long": lambda c: (f"must have at most {c['max_length']} characters", "choose a shorter one"),
    "string_pattern_mismatch": lambda _: (
        "may have only letters, digits, '.', '_' and '-', and starts with a letter or a digit",
        "choose another name",
    ),
    "literal_error": lambda c: (f"must be {c['expected']}", "use one of these"),
    "tuple_type": lambda _: ("must be a list", "write it as [a, b]"),
    "too_long": lambda c: (f"must have {c['max_length']} values", "write it as [a, b]"),
    "dict_type": lambda _: ("must be a mapping", "write it as indented 'key: value' lines"),
    "model_type": lambda _: ("must be a group of settings", "write its settings indented below it"),
    "refused": lambda c: (c["rule"], c["way_out"]),
}


def problems_of(error: ValidationError) -> tuple[Problem, ...]:
    """Return a problem for each error that pydantic found, in the order in which it found them."""
    return tuple(_problem(detail) for detail in error.errors(include_url=False))


def _problem(detail: ErrorDetails) -> Problem:
    path = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "extra_forbidden":
        return _unknown(path, detail["input"])
    words = _WORDS.get(detail["type"])
    rule, way_out = words(detail.get("ctx", {})) if words else (detail["msg"], _REFERENCE)
    value = NOT_GIVEN if detail["type"] == "missing" else detail.get("ctx", {}).get("shown", detail["input"])
    return Problem(path=path, value=value, rule=rule, way_out=way_out)


def _unknown(path: str, value: object) -> Problem:
    if path.rpartition(".")[2] == "trust_remote_code":
        return Problem(
            path=path,
            value=value,
            rule="code of a model's repository is never run: it would run on every worker, and attention in it can't "
            "be replaced exactly",
            way_out="remove it, and use a model whose architecture Transformers has",
        )
    nearest = nearest_name(path)
    way_out = "correct the name, or remove it" if nearest else f"remove it; {_REFERENCE}"
    return Problem(path=path, value=value, rule="there is no such setting", way_out=way_out, nearest=nearest)


def nearest_name(path: str) -> str | None:
    """Return the known section or setting that an unknown one most likely means, or None.

    A setting's own section is looked at first, then the same or a similar name in any other section.
    """
    section, _, setting = path.rpartition(".")
    if not section:
        return _closest(setting, tuple(section_models())) or _elsewhere(setting)
    own = [known for known in setting_paths() if known.startswith(f"{section}.")]
    close = _closest(setting, [known.partition(".")[2] for known in own])
    return f"{section}.{close}" if close else _elsewhere(setting)


def _elsewhere(setting: str) -> str | None:
    names = {known.partition(".")[2]: known for known in reversed(setting_paths())}
    close = _closest(setting, tuple(names))
    return names[close] if close else None


def _closest(name: str, known: Sequence[str]) -> str | None:
    found = difflib.get_close_matches(name.lower().replace("-", "_"), known, n=1, cutoff=0.7)
    return found[0] if found else None
