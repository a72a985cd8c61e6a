"""Translates pydantic's errors into `Problem`: setting, value, rule, hint and nearest name."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from ray_ulysses.config.schema import section_models, setting_paths
from ray_ulysses.config.stage_section import StageSection
from ray_ulysses.errors import NOT_GIVEN, Problem
from ray_ulysses.validation import rule_of, shown_text

_MOST_GUESSED = 50
_REFERENCE = "docs/configuration.md lists every setting"
_TEXT = "write it in quotes if it looks like a number, a date or a boolean"

# Rules whose text for a setting differs from that for the content of a file.
_RULES = {
    "missing": "the setting is required",
    "model_type": "must be a group of settings",
    "string_pattern_mismatch": "may have only letters, digits, '.', '_' and '-', and must start with a letter or digit",
}

# The hint of each kind of pydantic error; the rule comes from `validation`.
_HINTS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "missing": lambda _: "add it to the file, or give it with --set",
    "greater_than": lambda c: f"use a number above {c['gt']}",
    "greater_than_equal": lambda c: f"use {c['ge']} or more",
    "less_than": lambda c: f"use a number below {c['lt']}",
    "less_than_equal": lambda c: f"use {c['le']} or less",
    "finite_number": lambda _: "use an ordinary number",
    "int_type": lambda _: "write a number without a fraction or quotes",
    "int_from_float": lambda _: "write a number without a fraction",
    "float_type": lambda _: "write a number without quotes",
    "bool_type": lambda _: "write true or false",
    "string_type": lambda _: _TEXT,
    "string_too_short": lambda _: "give a text",
    "string_too_long": lambda _: "choose a shorter one",
    "string_pattern_mismatch": lambda _: "choose another name",
    "literal_error": lambda _: "use one of these",
    "tuple_type": lambda _: "write it as [a, b]",
    "too_long": lambda _: "write it as [a, b]",
    "too_short": lambda _: "give one, or null",
    "dict_type": lambda _: "write it as indented 'key: value' lines",
    "model_type": lambda _: "write its settings indented below it",
    "refused": lambda c: c["hint"],
}


def problems_of(error: ValidationError) -> tuple[Problem, ...]:
    """Return a problem for each error of pydantic, in its order."""
    details = error.errors(include_url=False)
    # A list whose only entry is wrong also counts as empty for pydantic, which reports both.
    details = [detail for detail in details if detail["type"] != "too_short" or not detail["input"]]
    # Searching for the nearest setting is slow, and nobody reads thousands of problems.
    return tuple(_problem(detail, is_guessed=number < _MOST_GUESSED) for number, detail in enumerate(details))


def _problem(detail: ErrorDetails, *, is_guessed: bool) -> Problem:
    path = shown_text(".".join(str(part) for part in detail["loc"]))
    if detail["type"] == "extra_forbidden":
        return _unknown(path, detail["input"], is_guessed=is_guessed)
    hint_of = _HINTS.get(detail["type"])
    rule = _RULES.get(detail["type"]) or rule_of(detail)
    hint = hint_of(detail.get("ctx", {})) if hint_of else _REFERENCE
    value = NOT_GIVEN if detail["type"] == "missing" else detail.get("ctx", {}).get("shown", detail["input"])
    return Problem(path=path, value=value, rule=rule, hint=hint)


def _unknown(path: str, value: object, *, is_guessed: bool) -> Problem:
    if path.rpartition(".")[2] == "trust_remote_code":
        return Problem(
            path=path,
            value=value,
            rule="code of a model's repository is never run: it would run on every worker, and its attention can't "
            "be replaced exactly",
            hint="remove it, and use a model whose architecture Transformers implements",
        )
    nearest = nearest_name(path) if is_guessed else None
    hint = "correct the name, or remove it" if nearest else f"remove it; {_REFERENCE}"
    return Problem(path=path, value=value, rule="there is no such setting", hint=hint, nearest=nearest)


def nearest_name(path: str) -> str | None:
    """Return the known section or setting that an unknown name most likely means, or None.

    The setting's own section is searched first, then all other sections for the same or a similar name.
    """
    section, _, setting = path.rpartition(".")
    if not section:
        return _closest(setting, tuple(section_models())) or _elsewhere(setting)
    if section.startswith("stages."):
        close = _closest(setting, tuple(StageSection.model_fields))
        return f"{section}.{close}" if close else _elsewhere(setting)
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
