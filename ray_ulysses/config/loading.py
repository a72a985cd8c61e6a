"""Loads a `Config` from a YAML file and ``--set`` options, or reports all problems at once."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from ray_ulysses.config.credentials import text_problems
from ray_ulysses.config.files import expanded, read_extended
from ray_ulysses.config.foreign_names import foreign_problem
from ray_ulysses.config.learning import StageSection
from ray_ulysses.config.rules import NO_CORPUS, broken_rules, broken_rules_of_part
from ray_ulysses.config.schema import Config, nested_paths, section_models
from ray_ulysses.config.section import Section
from ray_ulysses.config.yaml_text import decode_yaml, parse_yaml, read_yaml
from ray_ulysses.errors import NOT_GIVEN, ConfigError, Problem
from ray_ulysses.storage.place import Place, open_store
from ray_ulysses.validation import hint_of, rule_of, shown_text


def load_config(
    path: Place | str,
    overrides: Sequence[str] = (),
    *,
    environment: Mapping[str, str] | None = None,
    needs_corpus: bool = True,
) -> Config:
    """Read a configuration file, apply overrides, and check every rule that depends on the settings alone.

    Overrides have the form ``a.b=c``; later ones win.

    Args:
        path: The file.
        overrides: Settings that replace those of the file.
        environment: For a user's file, which may extend other files and refer to these environment variables. None for
            a stored configuration, where neither is allowed and no symbolic link is followed.
        needs_corpus: Whether a configuration that names no corpus is refused.

    Raises:
        ConfigError: The file or an override has problems. The error lists all of them.
    """
    place = Path(path) if isinstance(path, str) else path
    if environment is None or not isinstance(place, Path):
        return _build(*read_yaml(place), overrides, str(path))
    return _build(*read_extended(place, environment), overrides, str(path), environment, needs_corpus)


def load_config_if_any(path: Place) -> Config | None:
    """Load a run's stored configuration like `load_config`, or return None if the file does not exist.

    Raises:
        ConfigError: The configuration can't be used.
        OSError: The object store does not respond.
    """
    if isinstance(path, Path):
        return load_config(path) if path.is_file() else None
    try:
        content = open_store(path.parent).read_whole(path.name)
    except FileNotFoundError:
        return None
    return _build(*decode_yaml(content, path), (), str(path))


def parse_config(tree: object, overrides: Sequence[str] = ()) -> Config:
    """Build a configuration from nested mappings, like `load_config` from a file.

    Raises:
        ConfigError: The settings or the overrides have problems. The error lists all of them.
    """
    return _build(tree, (), overrides, "configuration")


def _build(
    tree: object,
    problems: tuple[Problem, ...],
    overrides: Sequence[str],
    source: str,
    environment: Mapping[str, str] | None = None,
    needs_corpus: bool = True,
) -> Config:
    if tree is None and problems:
        raise ConfigError(problems, source)
    if not isinstance(tree, Mapping | None):
        rule, hint = "the file must contain sections such as run, model and data", "see the examples in configs/"
        raise ConfigError((*problems, Problem(path="CONFIG", value=tree, rule=rule, hint=hint)), source)
    changed, wrong_overrides = apply_overrides(tree or {}, overrides)
    changed, wrong_references = (changed, ()) if environment is None else expanded(changed, environment)
    config, wrong_settings = _validate(changed)
    unexpanded = {problem.path for problem in wrong_references}
    wrong_settings = tuple(
        problem
        for problem in wrong_settings
        if problem.path not in unexpanded and (needs_corpus or problem.rule != NO_CORPUS)
    )
    problems = (*problems, *wrong_overrides, *wrong_references, *wrong_settings)
    reported = tuple(f"{problem.path}." for problem in problems)
    problems += tuple(one for one in text_problems(changed) if not f"{one.path}.".startswith(reported))
    if config is None or problems:
        raise ConfigError(problems, source)
    return config


def _validate(tree: Mapping[str, object]) -> tuple[Config | None, tuple[Problem, ...]]:
    # A missing or commented-out section counts as empty, so that its required settings are reported one by one.
    sections: dict[str, object] = {name: {} for name in section_models()}
    sections.update({name: value for name, value in tree.items() if value is not None or name not in sections})
    try:
        config = Config.model_validate(sections)
    except ValidationError as error:
        bad = {tuple(detail["loc"][:2]) for detail in error.errors(include_url=False)}
        return None, (
            *problems_of(error),
            *broken_rules_of_part(_usable(sections, bad), bool(tree.get("stages"))),
        )
    return config, broken_rules(config)


def _usable(sections: Mapping[str, object], bad: set[tuple[int | str, ...]]) -> dict[str, dict[str, object]]:
    """Return the valid settings by section, with defaults filled in."""
    usable: dict[str, dict[str, object]] = {}
    for name, model in section_models().items():
        given = sections[name]
        if (name,) in bad or not isinstance(given, Mapping):
            continue
        usable[name] = {"model_fields_set": set(given)} | {
            field: _built(info.annotation, given[field])
            if field in given
            else info.get_default(call_default_factory=True)
            for field, info in model.model_fields.items()
            if (name, field) not in bad
        }
    return usable


def _built(annotation: Any, value: object) -> object:
    """Convert a valid value to the form that rules expect: nested settings become a model."""
    is_group = isinstance(annotation, type) and issubclass(annotation, Section)
    return annotation.model_validate(value) if is_group else value


_LONGEST_PATH = 200
_FORM = "write --set section.setting=value, such as --set run.stop_step=200"


def apply_overrides(
    tree: Mapping[str, object], overrides: Sequence[str]
) -> tuple[dict[str, object], tuple[Problem, ...]]:
    """Return a copy of a configuration tree with overrides applied in order, and the problems of the overrides.

    Args:
        tree: The configuration as read from YAML.
        overrides: Texts of the form ``a.b=c``. Values are parsed as YAML, so ``[1, 2]`` is a list and an empty value is
            null. A list entry is selected by its index or its name, as in ``stages.long.lr=1e-5``. Unknown names are
            refused later, by the schema.
    """
    changed = {name: _unshared(value) for name, value in tree.items()}
    problems: list[Problem] = []
    for override in overrides:
        path, separator, text = override.partition("=")
        names = path.strip().split(".")
        # Setting names are printable and short.
        if not (separator and len(names) > 1 and all(names) and path.isprintable() and len(path) <= _LONGEST_PATH):
            problems.append(Problem(path="--set", value=override, rule="is not of the form a.b=c", hint=_FORM))
            continue
        value, wrong = parse_yaml(text, f"--set {path}")
        problems.extend(wrong)
        if not wrong:
            problems.extend(_put(changed, names, value))
    return changed, tuple(problems)


def _unshared(value: object) -> object:
    """Return a deep copy in which YAML aliases no longer share an object with their anchor."""
    if isinstance(value, Mapping):
        return {name: _unshared(below) for name, below in value.items()}
    return [_unshared(below) for below in value] if isinstance(value, list | tuple) else value


def _put(tree: dict[str, object], names: Sequence[str], value: object) -> tuple[Problem, ...]:
    """Set a value inside nested mappings and lists, in place. Missing and null mappings are created."""
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
    """Return the mapping key or list index for a name. A list entry may be selected by its name or its index."""
    if isinstance(node, Mapping):
        return name
    if (named := next((number for number, entry in enumerate(node) if _name_of(entry) == name), None)) is not None:
        # Names take precedence over indices: a stage may be called 8192.
        return named
    return int(name) if name.isascii() and name.isdigit() and int(name) < len(node) else None


def _entries(node: Mapping[str, object] | Sequence[object]) -> str:
    named = [name for entry in node if (name := _name_of(entry)) is not None]
    return f"use a number from 0 to {len(node) - 1}" + (f", or a name: {', '.join(named)}" if named else "")


def _name_of(entry: object) -> str | None:
    return str(entry["name"]) if isinstance(entry, Mapping) and "name" in entry else None


_MOST_GUESSED = 50
_AMBIGUOUS = ("kind", "name", "path", "enabled", "config", "steps", "min", "max", "plan", "weight", "engine")
"""Names that mean something else in each section, so they are not searched in other sections."""
_REFERENCE = "docs/configuration.md lists every setting"
_NAME_RULE = "may have only letters, digits, '.', '_' and '-', and must start with a letter or digit"


def problems_of(error: ValidationError) -> tuple[Problem, ...]:
    """Convert each pydantic error to a problem, in the same order."""
    details = error.errors(include_url=False)
    # If the only entry of a list is wrong, pydantic also reports the list as empty.
    details = [detail for detail in details if detail["type"] != "too_short" or not detail["input"]]
    # Suggestions are limited, since searching for similar names is slow and nobody reads thousands of problems.
    return tuple(_problem(detail, is_guessed=number < _MOST_GUESSED) for number, detail in enumerate(details))


def _problem(detail: ErrorDetails, *, is_guessed: bool) -> Problem:
    path = shown_text(".".join(str(part) for part in detail["loc"]))
    if detail["type"] == "extra_forbidden":
        return _unknown(path, detail["input"], is_guessed=is_guessed)
    rule = _NAME_RULE if detail["type"] == "string_pattern_mismatch" else rule_of(detail)
    hint = hint_of(detail) or _REFERENCE
    value = NOT_GIVEN if detail["type"] == "missing" else detail.get("ctx", {}).get("shown", detail["input"])
    return Problem(path=path, value=value, rule=rule, hint=hint)


def _unknown(path: str, value: object, *, is_guessed: bool) -> Problem:
    if (problem := foreign_problem(path, value)) is not None:
        return problem
    nearest = nearest_name(path) if is_guessed else None
    hint = "correct the name, or remove it" if nearest else f"remove it; {_REFERENCE}"
    return Problem(path=path, value=value, rule="there is no such setting", hint=hint, nearest=nearest)


def nearest_name(path: str) -> str | None:
    """Return the section or setting that an unknown name most likely refers to, or None.

    Settings of the same section are searched first, then all other sections.
    """
    section, _, setting = path.rpartition(".")
    if not section:
        return _closest(setting, tuple(section_models())) or _elsewhere(setting)
    if section.startswith("stages."):
        own = tuple(StageSection.model_fields)
    else:
        own = tuple(known[len(section) + 1 :] for known in nested_paths() if known.rpartition(".")[0] == section)
    close = _closest(setting, own)
    return f"{section}.{close}" if close else _elsewhere(setting)


def _elsewhere(setting: str) -> str | None:
    names = {known.rpartition(".")[2]: known for known in reversed(tuple(nested_paths()))}
    names = {name: known for name, known in names.items() if name not in _AMBIGUOUS}
    close = _closest(setting, tuple(names), cutoff=0.85)
    return names[close] if close else None


def _closest(name: str, known: Sequence[str], cutoff: float = 0.75) -> str | None:
    plain = name.lower().replace("-", "_")
    # A typing error rarely changes the first letter, and tp_size and sp_size are not the same setting.
    likely = [one for one in known if one[:1] == plain[:1]]
    return next(iter(difflib.get_close_matches(plain, likely, n=1, cutoff=cutoff)), None)
