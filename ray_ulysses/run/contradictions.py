"""Finds every contradiction between a configuration and the run that it would resume."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ray_ulysses.config import load_config
from ray_ulysses.config.resume import resume_conflicts
from ray_ulysses.errors import Problem
from ray_ulysses.parallel.layout import automatic_ring_size, row_multiple
from ray_ulysses.planner.settings import fits_rows
from ray_ulysses.run_names import CONFIG_FILE, PLAN_FOLDER

if TYPE_CHECKING:
    from ray_ulysses.config import Config
    from ray_ulysses.data.plan.plan import Plan
    from ray_ulysses.run.settings import ResolvedRun


def changed_settings(config: Config, *, branch: bool) -> tuple[Problem, ...]:
    """Return a problem for each changed setting that is fixed for the life of a run; none where there is no run.

    Args:
        config: The configuration to continue with, paths absolute.
        branch: Whether settings of the data plan may change.

    Raises:
        ConfigError: The stored configuration can't be read.
    """
    stored = config.run_dir / CONFIG_FILE
    return resume_conflicts(load_config(stored), config, branch=branch) if stored.is_file() else ()


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
