"""Compares the settings given for a resume with the run's stored settings: some may change, others are fixed.

A setting is fixed if it affects which tokens a step trains on, their order, or the computation. It may change if it
affects where the run trains, on how many workers, for how long, or how verbosely.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ray_ulysses.config.schema import Config, section_models
from ray_ulysses.config.section import OnResume
from ray_ulysses.config.stages import stage_config
from ray_ulysses.errors import NOT_GIVEN, Problem, shown


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """A difference between two JSON values."""

    name: str
    """Dotted path of the difference, such as ``rope_scaling.factor``; empty if the complete values differ."""
    old: object
    """Old value, or ``NOT_GIVEN`` if it was missing."""
    new: object
    """New value, or ``NOT_GIVEN`` if it is missing."""


def differences(old: object, new: object) -> tuple[Difference, ...]:
    """Return the differences between two JSON values, in the order of the old value.

    Mappings are compared key by key. Lists of mappings are compared entry by entry if they have equal lengths.
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


# Names of a run, in storage and in MLflow. A run under another name may start from this run's state.
_NAMES = frozenset({"run.name", "tracking.experiment"})
_MOST_LISTED = 6


def _marks() -> Iterator[tuple[str, OnResume]]:
    """Yield each setting's path and its resume rule, which defaults to its section's rule, in schema order."""
    for section, model in section_models().items():
        for name, field in model.model_fields.items():
            own = (one for one in field.metadata if isinstance(one, OnResume))
            yield f"{section}.{name}", next(own, model.on_resume)


FIXED, BRANCHABLE, FREE = (
    {path: mark.note for path, mark in _marks() if mark.rule == rule} for rule in ("fixed", "by branch", "may change")
)
"""One mapping for each resume rule, from a setting's path to the reason for the rule or to a remark."""

_PLUGINS = "run.plugins"
OUTSIDE_PLAN = tuple(path for path in BRANCHABLE if not path.startswith("data."))
"""Paths of settings that a branch may change without a change of the data plan."""

STAGES = "stages"
"""Path of the list of stages. A branch may change stages that have not begun."""


def resume_conflicts(old: Config, new: Config, *, branch: bool = False) -> tuple[Problem, ...]:
    """Return a problem for each setting that must not differ from the run's stored value, but does.

    With ``branch``, settings of the data plan, the learning rate and the plugins may change.
    """
    paths = {**({} if branch else BRANCHABLE), **FIXED}
    changed = [(path, reason, differences(setting(old, path), setting(new, path))) for path, reason in paths.items()]
    if not branch:
        before, now = ([stage.model_dump(mode="json") for stage in config.stages] for config in (old, new))
        changed.append((STAGES, "a change would alter the data of each step", differences(before, now)))
    return tuple(_conflict(old.run.name, path, reason, found) for path, reason, found in changed if found)


def stage_conflicts(old: Config, new: Config, num_begun: int) -> tuple[Problem, ...]:
    """Return a problem for each change to a stage that has begun, unless a branch may make the change.

    A run without stages counts as one stage.
    """
    if max(1, len(new.stages)) < num_begun:
        rule = f"run '{old.run.name}' has already started {num_begun} stages"
        return (Problem(path=STAGES, value=len(new.stages), rule=rule, hint="restore the stages that have started"),)
    problems: list[Problem] = []
    for number, (was, is_now) in enumerate(zip(old.stages[:num_begun], new.stages, strict=False)):
        # Checkpoints refer to their stage by its name.
        for name in ("name", "optimizer", *(() if number == num_begun - 1 else ("steps", "tokens"))):
            if found := differences(getattr(was, name), getattr(is_now, name)):
                problems.append(_conflict(old.run.name, f"{STAGES}.{number}.{name}", "the stage has started", found))
    for number in range(num_begun):
        before, now = stage_config(old, number), stage_config(new, number)
        # Earlier stages can't be changed. A branch may change only data and learning rate of the current stage.
        fixed = FIXED if number == num_begun - 1 else {**FIXED, **BRANCHABLE}
        for path, reason in fixed.items():
            if path not in (*_NAMES, _PLUGINS) and (found := differences(setting(before, path), setting(now, path))):
                problems.append(_conflict(old.run.name, f"{STAGES}.{number}: {path}", reason, found))
        if (had_own := _has_own_schedule(old, number)) != _has_own_schedule(new, number):
            has = "a schedule of its own" if had_own else "the run's schedule"
            rule = f"the stage started with {has}, and the two schedules count steps differently"
            hint = f"{'restore' if had_own else 'remove'} the stage's schedule"
            problems.append(Problem(path=f"{STAGES}.{number}.schedule", rule=rule, hint=hint))
    return tuple(problems)


def _has_own_schedule(config: Config, number: int) -> bool:
    return bool(config.stages) and config.stages[number].schedule is not None


def _conflict(run: str, path: str, reason: str, found: tuple[Difference, ...]) -> Problem:
    may_branch = path in BRANCHABLE or path == STAGES
    instead = "make it a branch of the run with `ray-ulysses train --branch`, " if may_branch else ""
    hint = f"restore {path} to resume, {instead}or choose another run.name to start a new run"
    if found[0].name:
        rule = f"differs from the value that run '{run}' was started with ({_listed(found)}), and {reason}"
        return Problem(path=path, rule=rule, hint=hint)
    rule = f"run '{run}' was started with {shown(found[0].old)}, and {reason}"
    return Problem(path=path, value=found[0].new, rule=rule, hint=hint)


def _listed(found: tuple[Difference, ...]) -> str:
    listed = [f"{one.name}: {_or_nothing(one.new)}, the run has {_or_nothing(one.old)}" for one in found[:_MOST_LISTED]]
    more = len(found) - len(listed)
    return "; ".join(listed) + (f"; and {more} more" if more else "")


def _or_nothing(value: object) -> str:
    return "nothing" if value is NOT_GIVEN else shown(value)


def branch_changes(old: Config, new: Config) -> tuple[str, ...]:
    """Describe a branch's changes to learning rate, plugins and stages. Changes to the data are in the plan."""
    before, now = (
        {**{path: setting(config, path) for path in OUTSIDE_PLAN}, STAGES: config.model_dump(mode="json")[STAGES]}
        for config in (old, new)
    )
    return tuple(
        f"{one.name} changes from {_or_nothing(one.old)} to {_or_nothing(one.new)}" for one in differences(before, now)
    )


def resume_settings(config: Config) -> dict[str, Any]:
    """Return the settings that a state is saved with, as JSON values by path.

    Only a branch changes those in ``OUTSIDE_PLAN``; the others are equal in all attempts of a run.
    """
    return {path: setting(config, path) for path in (*FIXED, *OUTSIDE_PLAN) if path not in _NAMES}


def settings_that_differ(stored: Mapping[str, Any], config: Config) -> str:
    """Describe how a configuration differs from ``stored``, the `resume_settings` that a state was saved with."""
    now = resume_settings(config)
    found = [(path, one) for path in now if path in stored for one in differences(stored[path], now[path])]
    return "; ".join(
        f"{path}{'.' if one.name else ''}{one.name} is {_or_nothing(one.new)} and was {_or_nothing(one.old)}"
        for path, one in found
    )


def resume_fingerprint(config: Config) -> str:
    """Return a hash of the settings that a saved state depends on, which are equal in all attempts of a run."""
    settings = {path: value for path, value in resume_settings(config).items() if path in FIXED}
    text = json.dumps(settings, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def setting(config: Config, path: str) -> Any:
    """Return the setting at a dotted path as a JSON value."""
    section, _, name = path.partition(".")
    value = getattr(config, section).model_dump(mode="json", include={name})[name]
    if path == "model.rope":
        # `unchanged` has the same meaning as null.
        value = None if value == "unchanged" else value
        return value and {name: given for name, given in value.items() if given is not None}
    return value
