"""Reads the stored state of a run, and refuses a configuration that contradicts it; imports no torch."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ray_ulysses.checkpoint.fence import Lineage, read_lineage
from ray_ulysses.config.loading import load_config_if_any
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
from ray_ulysses.storage.place import open_store

if TYPE_CHECKING:
    from ray_ulysses.config import Config
    from ray_ulysses.data.plan.plan import Plan
    from ray_ulysses.run.settings import ResolvedRun

_NO_ATTEMPT = Lineage(newest_attempt=0, started_from={})


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredRun:
    """The stored state of a run that a command starts or resumes, except its plan and journal."""

    config: Config | None
    """The stored configuration; None if there is none yet."""
    lineage: Lineage
    """Attempts claimed where the present configuration places the checkpoints."""
    has_begun: bool
    """Whether an attempt was claimed, there or where the stored configuration places the checkpoints. Until then, the
    stored configuration and plan may be replaced."""

    def conflicts(self, config: Config, *, branch: bool) -> tuple[Problem, ...]:
        """Return a problem for each changed setting that is fixed for the life of a run that has begun (pure).

        Args:
            config: The configuration to continue with, paths absolute.
            branch: Whether settings of the data plan may change.
        """
        if not self.has_begun or self.config is None:
            return ()
        return resume_conflicts(self.config, config, branch=branch)


def read_stored_run(config: Config) -> StoredRun:
    """Return the stored state of a configuration's run; paths must be absolute.

    Raises:
        ConfigError: The stored configuration can't be read.
        UnnamedServerError: Only the stored configuration names the server of its checkpoints.
        RunError: A storage does not answer.
    """
    with run_dir_answers(config):
        stored = load_config_if_any(config.run_dir / CONFIG_FILE)
        lineage = _lineage_at(config, here := checkpoint_location(config))
        has_begun = lineage.newest_attempt > 0
        if not has_begun and stored is not None:
            way_out = "set the same checkpoint.storage if the run is yours"
            there = stored_checkpoints(stored, config.run_dir, named=named_by(config), way_out=way_out)
            has_begun = there != here and _lineage_at(config, there).newest_attempt > 0
    return StoredRun(config=stored, lineage=lineage, has_begun=has_begun)


def _lineage_at(config: Config, location: str) -> Lineage:
    if location == str(config.run_dir):
        # The caller reports storage failures; an impossible path is refused when it is written.
        with contextlib.suppress(NotADirectoryError):
            return read_lineage(open_store(config.run_dir))
        return _NO_ATTEMPT
    with storage_answers(location):
        return read_lineage(open_store(location))


def refuse_changed(config: Config, *, branch: bool) -> StoredRun:
    """Return the stored state of a run, unless settings have changed that are fixed for its life.

    Raises:
        ConfigError: Names each of them.
        RunError: A storage does not answer.
    """
    stored = read_stored_run(config)
    if problems := stored.conflicts(config, branch=branch):
        raise ConfigError(problems, source=f"resume of run {config.run.name!r} in {config.run.storage}")
    return stored


def misfit(run: ResolvedRun, stored: Plan | None) -> tuple[Problem, ...]:
    """Return why a run's stored rows, whose length multiple is fixed, can't be split as configured.

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
    """Return why the plan of the present settings differs from the stored plan.

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
