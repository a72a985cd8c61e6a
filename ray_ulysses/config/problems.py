"""Translates pydantic's errors into `Problem`: setting, value, rule, hint and nearest name."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from ray_ulysses.config.schema import section_models, setting_paths
from ray_ulysses.config.stage_section import StageSection
from ray_ulysses.errors import NOT_GIVEN, Problem
from ray_ulysses.validation import hint_of, rule_of, shown_text

_MOST_GUESSED = 50
_REFERENCE = "docs/configuration.md lists every setting"
_NAME_RULE = "may have only letters, digits, '.', '_' and '-', and must start with a letter or digit"


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
    rule = _NAME_RULE if detail["type"] == "string_pattern_mismatch" else rule_of(detail)
    value = NOT_GIVEN if detail["type"] == "missing" else detail.get("ctx", {}).get("shown", detail["input"])
    return Problem(path=path, value=value, rule=rule, hint=hint_of(detail) or _REFERENCE)


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
