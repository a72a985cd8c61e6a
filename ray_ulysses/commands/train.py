"""The command ``train`` and its final summary."""

from __future__ import annotations

import json
import math
import shlex
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from ray_ulysses.clock import SystemClock
from ray_ulysses.commands.inspect import goodput_in_words
from ray_ulysses.commands.options import AsJson, Branch, ConfigPath, Overrides, Quiet, load_run_config
from ray_ulysses.commands.output import put, put_line
from ray_ulysses.report.words import as_text, count, duration, facts, folded, size
from ray_ulysses.run_names import TENSORBOARD_FOLDER

if TYPE_CHECKING:
    from ray_ulysses.cluster.train_job import TrainResult
    from ray_ulysses.config import Config
    from ray_ulysses.run.early_stopping import EarlyStop
    from ray_ulysses.run.preflight import PreparedRun
    from ray_ulysses.run.run_files import RunTexts
    from ray_ulysses.storage.place import Place
    from ray_ulysses.tracking.history import RunHistory

EXAMPLE = "Example: ray-ulysses train configs/llama-tiny_cpu_sp2-dp2_8k.yaml --set run.stop_step=20"
_LAST_LOSSES = 10


def train(
    config: ConfigPath,
    overrides: Overrides = [],  # noqa: B006
    branch: Branch = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Train a model, or resume the run with this name and storage. Uses the cluster at RAY_ADDRESS, or this machine."""
    started = SystemClock().now()
    loaded = load_run_config(config, overrides)
    trained = train_config(loaded, to_stderr=as_json, started=started, branch=branch, is_quiet=quiet)
    result, prepared = trained.result, trained.prepared
    if as_json:
        put(json.dumps(result.history.to_json(), indent=2), is_exact=True)
        return
    from ray_ulysses.run.early_stopping import early_stop

    early = early_stop(prepared.config, prepared.plan)
    if early is not None and early.step >= prepared.last_step:
        early = None
    if result.was_complete:
        way = "Raise run.stop_step" if early is None else "Set run.early_stopping=null"
        put_line(
            f"run {result.history.name!r} is complete at step {result.history.step:,}; nothing was started. "
            f"{way} to continue, or choose another run.name for a new run"
        )
    from ray_ulysses.tracking.mlflow_tracker import is_tracked

    put(
        render_summary(
            result.history,
            prepared,
            command=(str(config), tuple(overrides)),
            elapsed_s=result.seconds,
            is_heard=is_tracked(prepared.config.run_dir),
            peak_gib=trained.peak_gib,
            early=early,
        )
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """A run that `train_config` has trained."""

    prepared: PreparedRun
    result: TrainResult
    peak_gib: float | None
    """Measured peak memory, or None if no step was measured."""


def train_config(config: Config, *, to_stderr: bool, started: float, branch: bool, is_quiet: bool) -> Trained:
    """Train a run, showing its progress.

    Args:
        config: The loaded configuration.
        to_stderr: Whether progress is written to standard error instead of standard output.
        started: Start time of the command, in seconds since the epoch.
        branch: Whether an existing run's data and learning rate may change.
        is_quiet: Whether to show no progress.

    Raises:
        UserError: The run can't start.
        RunError: Training failed.
    """
    from ray_ulysses.run.stored_run import refuse_changed

    absolute = config.with_absolute_paths(Path.cwd())
    stored = refuse_changed(absolute, branch=branch)
    from ray_ulysses.cluster.address import cluster_address
    from ray_ulysses.commands.display import open_console
    from ray_ulysses.commands.prepare import prepare_first
    from ray_ulysses.commands.progress import ProgressView
    from ray_ulysses.supervision.image import warm_image

    console = open_console(stderr=to_stderr)
    prepare_first(config, Path.cwd(), open_console(quiet=True) if is_quiet else console)
    every = config.run.log_every_steps
    with (
        warm_image() if cluster_address(config.cluster.address) is None else nullcontext(),
        ProgressView(
            absolute.run_dir, name=config.run.name, console=console, log_every_steps=every, is_quiet=is_quiet
        ) as view,
    ):
        view.phase("loading libraries")
        from ray_ulysses.run.preflight import prepare_run

        view.phase("planning")
        prepared = prepare_run(config, Path.cwd(), branch=branch, stored=stored)
        prepared.report.raise_problems()
        # Import Ray only after every check has passed.
        from ray_ulysses.cluster.train_job import train as run_training

        for note in prepared.notes:
            put_line(f"note: {note}", stderr=True)
        view.expect(prepared.last_step)
        result = run_training(prepared, run_texts(prepared), view, started)
    peak_gib = None if view.state.last is None else view.state.last.peak_memory_gib
    return Trained(prepared=prepared, result=result, peak_gib=peak_gib)


def run_texts(prepared: PreparedRun) -> RunTexts:
    """Return the content of the files in the run's directory that describe the run."""
    from ray_ulysses.report.plan import render_plan
    from ray_ulysses.report.readme import render_readme
    from ray_ulysses.run.checkpoint_store import needs_trust
    from ray_ulysses.run.run_files import RunTexts

    config, report = prepared.config, prepared.report
    trust = needs_trust(config)
    readme = render_readme(report, config.run_dir, prepared.run.location, needs_trust=trust)
    return RunTexts(plan=folded(render_plan(report), 120), readme=readme, facts=report.to_json())


def render_summary(
    history: RunHistory,
    prepared: PreparedRun,
    *,
    command: tuple[str, tuple[str, ...]],
    elapsed_s: float,
    is_heard: bool = True,
    peak_gib: float | None = None,
    early: EarlyStop | None = None,
) -> str:
    """Return a run's result, its location and the command that continues it, as aligned lines.

    Args:
        history: The run's history from its journal.
        prepared: The run.
        command: The user's configuration file and ``--set`` options, for the command that resumes the run.
        elapsed_s: Seconds since this command started.
        is_heard: Whether the MLflow server has received any of the run's data.
        peak_gib: Measured peak memory, or None if no step was measured.
        early: Why the run ends before its last step, if it does.
    """
    from ray_ulysses.storage.place import node_folder, place_of

    config, planned_steps, nats = prepared.config, prepared.plan.num_steps, prepared.report.corpus.unigram_nats
    rows = [("steps", f"{history.step:,} of {planned_steps:,} planned")]
    ended_early = early is not None and early.step <= history.step
    if ended_early:
        rows.append(("ended early", str(early)))
    # A step's recorded loss may be infinite or NaN.
    last = [step.loss for step in history.steps[-_LAST_LOSSES:] if math.isfinite(step.loss)]
    if last:
        rows.append(("final loss", f"{last[-1]:.4f} nats"))
        rows.append((f"mean of last {len(last)}", f"{fmean(last):.4f} nats"))
    if nats is not None:
        # A model that has learned anything has a lower loss.
        rows.append(("byte entropy", f"{nats:.4f} nats (the corpus's unigram entropy)"))
    rows.append(("tokens", f"{count(history.tokens)} ({history.tokens:,})"))
    rows.append(("time", duration(elapsed_s)))
    if peak_gib is not None:
        planned = f"{size(prepared.report.memory.device_bytes)} planned"
        where = f"resident in rank 0's process, libraries included; {planned} without them"
        if config.cluster.gpus_per_worker > 0:
            where = f"allocated on the GPU of rank 0; {planned}"
        rows.append(("memory", f"peak {peak_gib:.2f} GiB {where}"))
    rows.append(("goodput", goodput_in_words(history.time_spent)))
    committed = [checkpoint for checkpoint in history.checkpoints if checkpoint.committed]
    place = str(place_of(prepared.run.location) / committed[-1].path) if committed else "none committed"
    rows.append(("checkpoint", place))
    own = node_folder(config.run_dir)
    if config.tracking_uri is not None:
        unsent = "has received nothing yet; the same command uploads the run's journal"
        rows += _curves(config.tracking_uri, config.run_dir) if is_heard else [("MLflow", unsent)]
    if "tensorboard" in config.trackers:
        rows.append(("TensorBoard", f"tensorboard --logdir {shlex.quote(str(own / TENSORBOARD_FOLDER))}"))
    if "wandb" in config.trackers:
        rows.append(("W&B", f"to upload the rest: wandb sync {shlex.quote(str(own / 'wandb'))}/*run-*"))
    path, overrides = command
    if history.step < planned_steps and history.status != "finished":
        rows.append(("resume", _command(path, overrides)))
    elif ended_early:
        rows.append(("continue", _command(path, (*overrides, "run.early_stopping=null"))))
    elif history.step < planned_steps:
        rows.append(("continue", _command(path, (*overrides, f"run.stop_step={planned_steps}"))))
    else:
        rows.append(("continue", "all planned rows are done; start a new run.name with more data or epochs"))
    return as_text([f"run {history.name!r}: {history.status}", *facts(rows)])


def _curves(tracking_uri: str, run_dir: Place) -> list[tuple[str, str]]:
    from ray_ulysses.tracking.mlflow_tracker import mlflow_page

    page = mlflow_page(tracking_uri, run_dir)
    return list(zip(("see the curves", "then open"), filter(None, (page.command, page.url)), strict=False))


def _command(config_path: str, overrides: tuple[str, ...]) -> str:
    """Return the ``train`` command with these overrides; a setting's last override wins."""
    last = {override.partition("=")[0].strip(): number for number, override in enumerate(overrides)}
    options = "".join(f" --set {shlex.quote(overrides[number])}" for number in sorted(last.values()))
    return f"ray-ulysses train {shlex.quote(config_path)}{options}"
