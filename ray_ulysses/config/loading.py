"""Loads a `Config` from a YAML file and ``--set``, or reports all of their problems at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ray_ulysses.config.credentials import text_problems
from ray_ulysses.config.overrides import apply_overrides
from ray_ulysses.config.problems import problems_of
from ray_ulysses.config.rules import broken_rules, broken_rules_of_part
from ray_ulysses.config.schema import Config, section_models
from ray_ulysses.config.section import Section
from ray_ulysses.config.yaml_text import read_yaml
from ray_ulysses.errors import ConfigError, Problem
from ray_ulysses.storage.place import Place


def load_config(path: Place | str, overrides: Sequence[str] = (), *, is_users: bool = False) -> Config:
    """Read a configuration file, apply overrides, and check everything that depends on the settings alone.

    Args:
        path: A YAML file, perhaps in an object store.
        overrides: Texts of the form ``a.b=c``, as ``--set`` takes them; later ones win.
        is_users: Whether the user named the file, which may then be a link. A run's own may not.

    Raises:
        ConfigError: With every problem of the file and the overrides, not only the first.
    """
    tree, problems = read_yaml(Path(path) if isinstance(path, str) else path, is_users=is_users)
    return _build(tree, problems, overrides, str(path))


def parse_config(tree: object, overrides: Sequence[str] = (), source: str = "configuration") -> Config:
    """Build a configuration from nested mappings, as `load_config` does from a file.

    Args:
        tree: Sections by name, each a mapping of its settings.
        overrides: Texts of the form ``a.b=c``.
        source: Name of the configuration in errors.

    Raises:
        ConfigError: With every problem of the settings and the overrides.
    """
    return _build(tree, (), overrides, source)


def _build(tree: object, problems: tuple[Problem, ...], overrides: Sequence[str], source: str) -> Config:
    if tree is None and problems:
        raise ConfigError(problems, source)
    if not isinstance(tree, Mapping | None):
        rule, hint = "the file must hold sections such as run, model and data", "see the examples in configs/"
        raise ConfigError((*problems, Problem(path="CONFIG", value=tree, rule=rule, hint=hint)), source)
    changed, wrong_overrides = apply_overrides(tree or {}, overrides)
    config, wrong_settings = _validate(changed)
    problems = (*problems, *wrong_overrides, *wrong_settings)
    reported = tuple(f"{problem.path}." for problem in problems)
    problems += tuple(one for one in text_problems(changed) if not f"{one.path}.".startswith(reported))
    if config is None or problems:
        raise ConfigError(problems, source)
    return config


def _validate(tree: Mapping[str, object]) -> tuple[Config | None, tuple[Problem, ...]]:
    # A section that is missing or all commented out counts as empty: its required settings are then reported one by
    # one.
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
    """Return the settings that no error is about, with defaults filled in, by section."""
    usable: dict[str, dict[str, object]] = {}
    for name, model in section_models().items():
        given = sections[name]
        if (name,) in bad or not isinstance(given, Mapping):
            continue
        usable[name] = {
            field: _built(info.annotation, given[field])
            if field in given
            else info.get_default(call_default_factory=True)
            for field, info in model.model_fields.items()
            if (name, field) not in bad
        }
    return usable


def _built(annotation: Any, value: object) -> object:
    """Return a valid value as the rules expect it: a group of settings within a section as its model."""
    is_group = isinstance(annotation, type) and issubclass(annotation, Section)
    return annotation.model_validate(value) if is_group else value
