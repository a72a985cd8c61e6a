"""The command ``check``: a short trial of a run at its full context length."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer

from ray_ulysses.clock import SystemClock
from ray_ulysses.commands.options import AsJson, ConfigPath, Overrides, Quiet, load_run_config
from ray_ulysses.commands.output import Waiting, put, put_line
from ray_ulysses.errors import ConfigError, RunError, UserError
from ray_ulysses.report.words import as_text

if TYPE_CHECKING:
    from rich.console import Console

    from ray_ulysses.config import Config
    from ray_ulysses.inspect.check_report import CheckReport, Trial
    from ray_ulysses.run.preflight import PreparedRun

EXAMPLE = "Example: ray-ulysses check configs/llama-tiny_cpu_sp2-dp2_8k.yaml --steps 20"
_FEWEST_STEPS = 6
_MARKS = {True: "ok", False: "FAILED", None: "-"}


def check(
    config: ConfigPath,
    overrides: Overrides = [],  # noqa: B006
    steps: Annotated[int, typer.Option(help="Steps to train before the checkpoint.", min=_FEWEST_STEPS)] = 50,
    stage: Annotated[str | None, typer.Option(help="Stage to check.  [default: the last]", show_default=False)] = None,
    max_memory: Annotated[
        float, typer.Option(help="Percentage of memory.device_gib that a rank may use.", min=1, max=100)
    ] = 75.0,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the files of the trial run.")] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Train a short copy of a run at its full context length and report what would go wrong in the whole run.

    The most expensive rows are trained first. Memory, speed and losses are compared with the plan, and a checkpoint is
    written and loaded. Exits with 1 if a check fails.
    """
    loaded = load_run_config(config, overrides)
    with Waiting("loading libraries", is_quiet=quiet):
        importlib.import_module("ray_ulysses.cluster.train_job")
        from ray_ulysses.commands.display import open_console

    options = CheckOptions(steps=steps, stage=stage, max_memory=max_memory, keep=keep, is_quiet=quiet)
    report = run_check(loaded, options, open_console(stderr=as_json), partial(put_line, stderr=True))
    put(json.dumps(report.to_json(), indent=2) if as_json else render_check(report), is_exact=as_json)
    if report.failed:
        raise typer.Exit(1)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckOptions:
    """Command-line options of ``check``."""

    steps: int
    stage: str | None
    """Name of the stage to check, or None to check the last stage."""
    max_memory: float
    """Memory limit of a rank, in percent of ``memory.device_gib``."""
    keep: bool
    is_quiet: bool = False


def run_check(config: Config, options: CheckOptions, console: Console, say: Callable[[str], object]) -> CheckReport:
    """Train a short copy of a run on the cluster in two attempts, and return a report.

    The copy trains the most expensive rows in its first step, saves, trains one more step, and resumes from its
    checkpoint.

    Raises:
        UserError: The run can't start, or the stage does not exist.
        RunError: The trial was stopped, or another command took over its run.
    """
    from ray_ulysses.cluster.failures import TrainingFailed
    from ray_ulysses.config.loading import parse_config
    from ray_ulysses.inspect.check_report import judge
    from ray_ulysses.run.preflight import prepare_run

    started = SystemClock().now()
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    planned = _planned(config)
    trial = trial_config(starting_from(planned), options, stamp)
    prepared = prepare_run(trial, Path.cwd())
    prepared.report.raise_problems()
    num_steps = min(options.steps, prepared.plan.num_steps - 2)
    if num_steps < _FEWEST_STEPS:
        raise UserError(
            f"data: the plan of {config.run.name!r} has {prepared.plan.num_steps} steps, but a check needs at least "
            f"{_FEWEST_STEPS + 2}; use a larger corpus or a smaller data.rows_per_step"
        )
    where = trial.run_dir if options.keep else f"{trial.run_dir} (deleted afterwards)"
    if not options.is_quiet:
        say(f"trains {num_steps + 2} steps with a context of {trial.data.context_tokens:,} tokens in {where}")
    try:
        for last_step in (num_steps + 1, num_steps + 2):
            stops = [f"checkpoint.every_steps={num_steps}", f"run.stop_step={last_step}"]
            stopping = parse_config(trial.model_dump(mode="json", exclude_unset=True), stops)
            status = _train(stopping, console, started, is_quiet=options.is_quiet)
            if status != "finished":
                raise RunError(f"the check of run {config.run.name!r} ended early: the trial run is {status}")
            if not _found(prepared, options, num_steps, None).committed:
                # There is no checkpoint to resume from.
                break
        return judge(config.run.name, _found(prepared, options, num_steps, None))
    except (TrainingFailed, UserError) as error:
        return judge(config.run.name, _found(prepared, options, num_steps, str(error)))
    finally:
        if not options.keep:
            _delete(prepared)


def _planned(config: Config) -> Config:
    """Return a run's configuration with the planner's choices.

    The choices depend on peer memory and on all stages, so they can't be made from the trial's configuration.
    """
    from ray_ulysses.config.job_paths import relative_path_problems
    from ray_ulysses.planner.problems import memory_problems_of_run
    from ray_ulysses.run.preflight import planned_memory

    source, relative = f"run {config.run.name!r}", relative_path_problems(config, Path.cwd(), os.environ)
    try:
        planned, shape, _ = planned_memory(config, Path.cwd())
    except UserError as error:
        if not relative:
            raise
        raise ConfigError(relative, source=source, beside=error) from error
    if problems := (*relative, *memory_problems_of_run(planned, shape)):
        raise ConfigError(problems, source=source)
    return planned


def starting_from(config: Config) -> Config:
    """Replace MLflow references in a configuration with paths, since the trial does not use MLflow.

    Raises:
        UserError: The checkpoint does not exist.
        RunError: MLflow does not respond.
    """
    from ray_ulysses.config.reference_to_checkpoint import MlflowReference, parse_reference
    from ray_ulysses.config.schema import with_settings
    from ray_ulysses.run.origin import find_origin

    reference = config.model.resume_from
    if reference is None or not isinstance(parse_reference(reference), MlflowReference):
        return config
    return with_settings(config, {"model.resume_from": str(find_origin(config))})


def trial_config(config: Config, options: CheckOptions, stamp: str) -> Config:
    """Return the trial's configuration: the user's configuration with the trial's own settings.

    Args:
        config: The user's configuration, with absolute paths.
        options: Command-line options.
        stamp: Suffix that makes the trial's name unique.

    Raises:
        UserError: The stage does not exist.
    """
    from ray_ulysses.config.loading import parse_config
    from ray_ulysses.config.stages import stage_config

    names = [stage.name for stage in config.stages]
    if options.stage is not None and options.stage not in names:
        known = f"the stages are {', '.join(names)}" if names else "the run has no stages"
        raise UserError(f"--stage={options.stage}: no such stage; {known}")
    config = stage_config(config, names.index(options.stage) if options.stage is not None else len(names) - 1)
    tree = config.model_dump(mode="json", exclude_unset=True)
    tree.pop("stages", None)
    off = dict.fromkeys(("stop_step", "eval_every_steps", "sample_every_steps", "early_stopping", "profile"))
    tree["run"] |= {"name": f"{config.run.name}-check-{stamp}", "self_test": True, **off}
    if config.model.resume_from is not None and config.model.resume_state == "all":
        # The trial has its own plan.
        tree["model"] |= {"resume_state": "weights"}
    tree["data"] |= {"row_order": "costliest", "epochs": 1}
    schedule = tree.setdefault("schedule", {})
    # The trial includes the peak of the learning rate.
    schedule |= {"warmup_ratio": None, "warmup_steps": min(config.schedule.warmup_steps, options.steps // 5)}
    saves = {"every_minutes": None, "save_at_end": False, "keep_best": 0}
    tree["checkpoint"] = {**tree.get("checkpoint", {}), **saves, "max_failed_saves": 0, "failed_saves_patience_s": 0.0}
    tree["tracking"] = {"enabled": False}
    # A tile is at most as long as this stage's rows.
    longest = -(-config.data.context_tokens // config.parallel.sp_size)
    tiles = {name: getattr(config.memory, name) for name in ("loss_tile", "mlp_tile")}
    shorter = {name: min(tile, longest) for name, tile in tiles.items() if isinstance(tile, int)}
    tree["memory"] = {**tree.get("memory", {}), **shorter}
    # Load the checkpoint that was written, and report the first failure.
    tree["elastic"] = {**tree.get("elastic", {}), "peer_memory": False, "max_failures": 0, "bad_steps": "stop"}
    return parse_config(tree)


def _train(config: Config, console: Console, started: float, *, is_quiet: bool) -> str:
    """Train to the configured stop step, and return the run's final status."""
    from ray_ulysses.cluster.train_job import train
    from ray_ulysses.commands.progress import ProgressView
    from ray_ulysses.commands.train import run_texts
    from ray_ulysses.run.preflight import prepare_run

    with ProgressView(
        config.run_dir, name=config.run.name, console=console, log_every_steps=1, is_quiet=is_quiet
    ) as view:
        view.phase("planning")
        prepared = prepare_run(config, Path.cwd())
        prepared.report.raise_problems()
        view.expect(prepared.last_step)
        return train(prepared, run_texts(prepared), view, started).history.status


def _found(prepared: PreparedRun, options: CheckOptions, num_steps: int, failure: str | None) -> Trial:
    from ray_ulysses.inspect.check_report import Trial
    from ray_ulysses.planner.flops import step_flops
    from ray_ulysses.rehearsal.check import TOLERANCES
    from ray_ulysses.storage.place import open_store
    from ray_ulysses.tracking.events import AttemptStarted, CheckpointCommitted, CheckpointFailed, StepDone
    from ray_ulysses.tracking.journal_reader import read_entries
    from ray_ulysses.tracking.steps import ungroup_steps

    config, plan, report = prepared.config, prepared.plan, prepared.report
    events = list(ungroup_steps(read_entries(config.run_dir))) if open_store(config.run_dir).exists() else []
    attempts = [event for event in events if isinstance(event, AttemptStarted)]
    steps = [event for event in events if isinstance(event, StepDone)]
    first = [one for one in steps if one.attempt == attempts[0].attempt] if attempts else []
    stats = [plan.stats(plan.step_rows(one.step)) for one in first]
    tokens = [int(one.document_tokens.sum(dtype="int64")) for one in stats]
    squares = [int(one.sum_squares.sum()) for one in stats]
    work = [step_flops(report.shape, tokens=a, sum_squared_lengths=b) for a, b in zip(tokens, squares, strict=True)]
    is_loaded = len(attempts) > 1 and attempts[-1].resumed_step > 0
    return Trial(
        num_steps=num_steps,
        row_tokens=plan.settings.capacity,
        longest_row=plan.row_tokens(0),
        step_tokens=tokens,
        steps=first,
        again=[one for one in steps if is_loaded and one.attempt == attempts[-1].attempt],
        committed=[event.step for event in events if isinstance(event, CheckpointCommitted)],
        unsaved=next((event.reason for event in events if isinstance(event, CheckpointFailed)), None),
        loaded_step=attempts[-1].resumed_step if is_loaded else None,
        failure=failure,
        tolerance=TOLERANCES[config.model.dtype],
        has_gpu=config.cluster.gpus_per_worker > 0,
        planned_bytes=report.memory.device_bytes,
        limit_gib=config.memory.device_gib or (attempts[0].device_gib if attempts else config.device_gib),
        most_of_limit=options.max_memory / 100,
        # Scale by cost: the trial's rows are more expensive than the mean row.
        modelled_s=None
        if report.step_time is None or not work
        else report.step_time.seconds * median(work) / report.data.flops_per_step,
        is_compared=report.step_time is not None and report.step_time.is_measured,
        is_pretrained=config.model.init == "pretrained",
    )


def _delete(prepared: PreparedRun) -> None:
    """Delete the trial's directory, and its checkpoint folder if that folder is on different storage."""
    from ray_ulysses.storage.place import node_folder, open_store, place_of

    run_dir = prepared.config.run_dir
    shutil.rmtree(node_folder(run_dir), ignore_errors=True)
    # Both are named after the trial and contain only its files.
    for place in (run_dir, place_of(prepared.run.location)):
        with contextlib.suppress(OSError):
            open_store(place.parent).delete(place.name)


def render_check(report: CheckReport) -> str:
    """Return the report's text: one line per check, and the verdict."""
    width = max(len(line.name) for line in report.lines)
    lines = [f"check of run {report.name!r}", ""]
    for line in report.lines:
        lines.append(f"  {_MARKS[line.holds]:<6}  {line.name:<{width}}  {line.found} [{line.rule}]")
    failed = ", ".join(line.name for line in report.failed)
    lines += ["", f"FAILED: {failed}" if failed else "ready for the whole run"]
    return as_text(lines)
