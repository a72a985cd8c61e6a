"""Reads a run's stored state and refuses configurations that conflict with it. Does not import torch."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ray_ulysses.checkpoint.fence import read_lineage
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


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredRun:
    """A run's stored state, except for its plan and journal."""

    config: Config | None
    """The stored configuration, or None before the first command."""
    has_begun: bool
    """Whether an attempt is recorded in the checkpoint location of the current or the stored configuration. Before the
    first attempt, the stored configuration and plan may be replaced."""

    def conflicts(self, config: Config, *, branch: bool) -> tuple[Problem, ...]:
        """Return a problem for each changed setting that is fixed once the first attempt has started.

        Args:
            config: The new configuration with absolute paths.
            branch: Whether the settings of data and learning rate may change.
        """
        if not self.has_begun or self.config is None:
            return ()
        return resume_conflicts(self.config, config, branch=branch)


def read_stored_run(config: Config) -> StoredRun:
    """Read the stored state of the configured run. The configuration's paths must be absolute.

    Raises:
        ConfigError: The stored configuration can't be read.
        UnnamedServerError: The checkpoint server is specified only by the stored configuration.
        RunError: A storage location does not respond.
    """
    with run_dir_answers(config):
        stored = load_config_if_any(config.run_dir / CONFIG_FILE)
        has_begun = _has_begun_at(config, here := checkpoint_location(config))
        if not has_begun and stored is not None:
            way_out = "set the same checkpoint.storage if the run is yours"
            there = stored_checkpoints(stored, config.run_dir, named=named_by(config), way_out=way_out)
            has_begun = there != here and _has_begun_at(config, there)
    return StoredRun(config=stored, has_begun=has_begun)


def _has_begun_at(config: Config, location: str) -> bool:
    if location == str(config.run_dir):
        # The caller reports storage failures. An invalid path is refused later, by the storage check.
        with contextlib.suppress(NotADirectoryError):
            return read_lineage(open_store(config.run_dir)).newest_attempt > 0
        return False
    with storage_answers(location):
        return read_lineage(open_store(location)).newest_attempt > 0


def refuse_changed(config: Config, *, branch: bool) -> StoredRun:
    """Read a run's stored state, and refuse changes to settings that are fixed for the run's lifetime.

    Raises:
        ConfigError: Some of these settings have changed.
        RunError: A storage location does not respond.
    """
    stored = read_stored_run(config)
    if problems := stored.conflicts(config, branch=branch):
        raise ConfigError(problems, source=f"resume of run {config.run.name!r} in {config.run.storage}")
    return stored


def misfit(run: ResolvedRun, stored: Plan | None) -> tuple[Problem, ...]:
    """Return a problem if the configured ``sp_size`` and ``ring_size`` can't split the rows of the stored plan.

    Every row length in the stored plan is a multiple of the plan's ``pad_multiple``, which can't change.

    Args:
        run: The run with the current configuration.
        stored: The run's stored plan, or None for a new run.
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
    new_run = "start a new run that lists the size in parallel.allowed_sp"
    if config.parallel.ring_size is None:
        hint = f"use {choices} to resume, or {new_run}"
        return (Problem(path="parallel.sp_size", value=config.parallel.sp_size, rule=rule, hint=hint),)
    hint = f"use null with a parallel.sp_size of {choices} to resume, or {new_run}"
    return (Problem(path="parallel.ring_size", value=config.parallel.ring_size, rule=rule, hint=hint),)


def other_plan(config: Config, stored: Plan | None, plan: Plan, num_new: int) -> tuple[Problem, ...]:
    """Return a problem if the current settings produce a plan that does not continue the stored plan.

    Args:
        config: The current configuration.
        stored: The run's stored plan, or None for a new run.
        plan: The plan produced by the current settings.
        num_new: Number of segments at the end of ``plan`` that may replace stored segments of later stages.
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
    rule = f"{config.run_dir / PLAN_FOLDER} contains plan {stored.plan_id}, but these settings produce {plan.plan_id}"
    hint = (
        "restore the settings; if an earlier command with --branch was interrupted, repeat that command; or start a "
        "new run under another run.name"
    )
    return (Problem(path="data", rule=rule, hint=hint),)
