"""Finds every contradiction between a configuration and the run that it would resume."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from ray_ulysses.checkpoint.fence import read_lineage
from ray_ulysses.config import load_config
from ray_ulysses.config.resume import resume_conflicts
from ray_ulysses.errors import ConfigError, Problem
from ray_ulysses.parallel.layout import automatic_ring_size, row_multiple
from ray_ulysses.planner.settings import fits_rows
from ray_ulysses.run.checkpoint_store import (
    checkpoint_location,
    named_by,
    run_dir_answers,
    storage_answers,
    stored_checkpoints,
)
from ray_ulysses.run_names import CONFIG_FILE, PLAN_FOLDER
from ray_ulysses.storage.place import open_store, store_at

if TYPE_CHECKING:
    from ray_ulysses.config import Config
    from ray_ulysses.data.plan.plan import Plan
    from ray_ulysses.run.settings import ResolvedRun


def has_attempt(config: Config) -> bool:
    """Return whether an attempt of the run was claimed; until then, its stored configuration and plan are replaced.

    Attempts are where the checkpoints are: of this configuration, or of the stored one.

    Raises:
        ConfigError: The stored configuration can't be read.
        UnnamedServerError: Only the stored configuration names the server of its checkpoints.
        RunError: The storage of the checkpoints does not answer.
    """
    here, path = checkpoint_location(config), config.run_dir / CONFIG_FILE
    if _is_claimed(config, here):
        return True
    there = here
    if path.is_file():
        way_out = "set the same checkpoint.storage if the run is yours"
        there = stored_checkpoints(load_config(path), config.run_dir, named=named_by(config), way_out=way_out)
    return there != here and _is_claimed(config, there)


def _is_claimed(config: Config, location: str) -> bool:
    if location == str(config.run_dir):
        # A failure of its storage is the caller's to name; a path that can't be one is refused when it is written.
        with contextlib.suppress(NotADirectoryError):
            return read_lineage(store_at(config.run_dir)).newest_attempt > 0
        return False
    with storage_answers(location):
        return read_lineage(open_store(location)).newest_attempt > 0


def changed_settings(config: Config, *, branch: bool) -> tuple[Problem, ...]:
    """Return a problem for each changed setting that is fixed for the life of a run that has an attempt.

    Args:
        config: The configuration to continue with, paths absolute.
        branch: Whether settings of the data plan may change.

    Raises:
        ConfigError: The stored configuration can't be read.
    """
    stored = config.run_dir / CONFIG_FILE
    return resume_conflicts(load_config(stored), config, branch=branch) if stored.is_file() else ()


def refuse_changed(config: Config, *, branch: bool) -> None:
    """Refuse settings that are fixed for the life of the run; without torch, before anything else is read.

    Raises:
        ConfigError: Names each of them.
        RunError: A storage does not answer.
    """
    with run_dir_answers(config):
        problems = changed_settings(config, branch=branch) if has_attempt(config) else ()
    if problems:
        raise ConfigError(problems, source=f"resume of run {config.run.name!r} in {config.run.storage}")


def misfit(run: ResolvedRun, stored: Plan | None) -> tuple[Problem, ...]:
    """Return why a run's stored rows, whose lengths keep their multiple for life, can't be split as configured.

    Args:
        run: The run as it is configured now.
        stored: The run's plan; None where there is no run.
    """
    config, shape = run.config, run.shape
    if stored is None or fits_rows(config, shape, stored.settings.pad_multiple):
        return ()
    multiple = stored.settings.pad_multiple
    rule = f"does not fit the rows of run '{config.run.name}', whose lengths are multiples of {multiple}"
    fitting = [
        size
        for size in config.parallel.allowed_sp or range(1, multiple + 1)
        if multiple % row_multiple(size, automatic_ring_size(size, shape.num_heads)) == 0
    ]
    choices = ", ".join(str(size) for size in fitting)
    new_run = "name the size in parallel.allowed_sp of a new run"
    if config.parallel.ring_size is None:
        hint = f"use {choices} to resume, or {new_run}"
        return (Problem(path="parallel.sp_size", value=config.parallel.sp_size, rule=rule, hint=hint),)
    hint = f"use null with a parallel.sp_size of {choices} to resume, or {new_run}"
    return (Problem(path="parallel.ring_size", value=config.parallel.ring_size, rule=rule, hint=hint),)


def other_plan(config: Config, stored: Plan | None, plan: Plan, num_new: int) -> tuple[Problem, ...]:
    """Return why the plan that the settings make is not the stored plan of the run.

    Args:
        config: The configuration to continue with.
        stored: The run's plan; None where there is no run.
        plan: The plan that the settings make.
        num_new: Segments at its end that need not be stored yet; stages that they replace may be.
    """
    planned = [segment.plan_id for segment in plan.segments]
    found = planned if stored is None else [segment.plan_id for segment in stored.segments]
    if stored is None or found == planned:
        return ()
    kept = plan.segments[: len(planned) - num_new]
    replaced = stored.segments[len(kept) :]
    if (
        kept
        and found[: len(kept)] == planned[: len(kept)]
        and all(one.stage_number > kept[-1].stage_number for one in replaced)
    ):
        return ()
    rule = f"{config.run_dir / PLAN_FOLDER} holds plan {stored.plan_id}, these settings make plan {plan.plan_id}"
    hint = (
        "restore the settings, repeat with --branch the command that began to change the data, or start a new run "
        "under another run.name"
    )
    return (Problem(path="data", rule=rule, hint=hint),)
