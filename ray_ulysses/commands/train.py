"""The command ``train``, and the summary that it prints at its end."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Collection
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from ray_ulysses.clock import SystemClock
from ray_ulysses.commands.inspect import goodput_in_words
from ray_ulysses.commands.options import AsJson, Branch, ConfigPath, Overrides, Quiet, load_run_config
from ray_ulysses.commands.output import put, put_line
from ray_ulysses.report.words import as_text, count, duration, facts, size
from ray_ulysses.run_names import SPOOL_FOLDER, TENSORBOARD_FOLDER

if TYPE_CHECKING:
    from ray_ulysses.planner.report import PlanReport
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
    """Train, or resume the run with the same name and storage. Uses the cluster of RAY_ADDRESS, else this machine."""
    started = SystemClock().now()
    loaded = load_run_config(config, overrides)
    from ray_ulysses.run.stored_run import refuse_changed

    absolute = loaded.with_absolute_paths(Path.cwd())
    stored = refuse_changed(absolute, branch=branch)
    from ray_ulysses.commands.display import open_console
    from ray_ulysses.commands.progress import ProgressView

    every = loaded.run.log_every_steps
    console = open_console(stderr=as_json)
    with ProgressView(
        absolute.run_dir, name=loaded.run.name, console=console, log_every_steps=every, is_quiet=quiet
    ) as view:
        view.phase("loading libraries")
        from ray_ulysses.run.preflight import prepare_run

        view.phase("planning")
        prepared = prepare_run(loaded, Path.cwd(), branch=branch, stored=stored)
        prepared.report.raise_problems()
        # Ray, only once nothing is left to refuse.
        from ray_ulysses.cluster.train_job import train as run_training
        from ray_ulysses.tracking.mlflow_tracker import is_tracked

        for note in prepared.notes:
            put_line(f"note: {note}", stderr=True)
        view.expect(prepared.last_step)
        result = run_training(prepared, view, started)
    if as_json:
        put(json.dumps(result.history.to_json(), indent=2))
        return
    if result.was_complete:
        put_line(
            f"run {result.history.name!r} is complete at step {result.history.step:,}; nothing was started. "
            "Raise run.stop_step to continue, or choose another run.name for a new run"
        )
    summary = render_summary(
        result.history,
        run_dir=prepared.config.run_dir,
        location=prepared.run.location,
        config_path=str(config),
        overrides=tuple(overrides),
        planned_steps=prepared.plan.num_steps,
        elapsed_s=result.seconds,
        tracking_uri=prepared.config.tracking_uri,
        trackers=prepared.config.trackers,
        is_heard=is_tracked(prepared.config.run_dir),
        unigram_nats=prepared.report.corpus.unigram_nats,
        memory=memory_in_words(prepared.report, view.state.peak_memory_gib, has_gpu=loaded.cluster.gpus_per_worker > 0),
    )
    put(summary)


def render_summary(
    history: RunHistory,
    *,
    run_dir: Place,
    location: str,
    config_path: str,
    overrides: tuple[str, ...] = (),
    planned_steps: int,
    elapsed_s: float,
    tracking_uri: str | None = None,
    trackers: Collection[str] = (),
    is_heard: bool = True,
    unigram_nats: float | None = None,
    memory: str | None = None,
) -> str:
    """Return the result of a run, where it is stored, and how to continue, as aligned lines.

    Args:
        history: The run's history from its journal.
        run_dir: The run's directory.
        location: Path or URI that holds its checkpoints.
        config_path: The given configuration, for the command that resumes.
        overrides: The given ``--set`` options.
        planned_steps: Steps of the data plan.
        elapsed_s: Seconds of this command.
        tracking_uri: MLflow's URI; None if it does not record the run.
        trackers: What records the run.
        is_heard: Whether MLflow has received anything of the run.
        unigram_nats: Entropy of the corpus's bytes, if known; a model that learned anything has a lower loss.
        memory: The peak of memory beside the planned one, as `memory_in_words` says it.
    """
    from ray_ulysses.storage.location import join_location
    from ray_ulysses.storage.place import node_folder

    rows = [("steps", f"{history.step:,} of {planned_steps:,} planned")]
    # A step may be recorded with a loss that is not finite.
    last = [step.loss for step in history.steps[-_LAST_LOSSES:] if math.isfinite(step.loss)]
    if last:
        rows.append(("final loss", f"{last[-1]:.4f} nats"))
        rows.append((f"mean of last {len(last)}", f"{fmean(last):.4f} nats"))
    if unigram_nats is not None:
        rows.append(("byte entropy", f"{unigram_nats:.4f} nats (unigram, of the corpus)"))
    rows.append(("tokens", f"{count(history.tokens)} ({history.tokens:,})"))
    rows.append(("time", duration(elapsed_s)))
    if memory is not None:
        rows.append(("memory", memory))
    rows.append(("goodput", goodput_in_words(history.time_spent)))
    committed = [checkpoint for checkpoint in history.checkpoints if checkpoint.committed]
    rows.append(("checkpoint", join_location(location, committed[-1].path) if committed else "none committed"))
    if tracking_uri is not None:
        spool = node_folder(run_dir) / SPOOL_FOLDER
        unsent = f"has received nothing yet; the same command sends it what is stored in {spool}"
        rows += _curves(tracking_uri, run_dir) if is_heard else [("MLflow", unsent)]
    rows += _other_trackers(trackers, node_folder(run_dir))
    if history.step < planned_steps and history.status != "finished":
        rows.append(("resume", _command(config_path, overrides)))
    elif history.step < planned_steps:
        rows.append(("continue", _command(config_path, (*overrides, f"run.stop_step={planned_steps}"))))
    else:
        rows.append(("continue", "every planned row is trained; start a new run.name with more data or epochs"))
    return as_text([f"run {history.name!r}: {history.status}", *facts(rows)])


def memory_in_words(report: PlanReport, peak_gib: float | None, *, has_gpu: bool) -> str | None:
    """Return the measured peak of memory beside the planned one; None if no step was measured."""
    if peak_gib is None:
        return None
    planned = size(report.memory.device_bytes)
    if has_gpu:
        return f"peak {peak_gib:.2f} GiB allocated on the GPU of rank 0; {planned} planned"
    return f"peak {peak_gib:.2f} GiB resident in rank 0's process, libraries included; {planned} planned without them"


def _other_trackers(trackers: Collection[str], own: Path) -> list[tuple[str, str]]:
    """Return how to look at what trackers beside MLflow have recorded in a folder of this node."""
    rows = []
    if "tensorboard" in trackers:
        rows.append(("TensorBoard", f"tensorboard --logdir {shlex.quote(str(own / TENSORBOARD_FOLDER))}"))
    if "wandb" in trackers:
        rows.append(("W&B", f"what was not sent yet: wandb sync {shlex.quote(str(own / 'wandb'))}/*run-*"))
    return rows


def _curves(tracking_uri: str, run_dir: Place) -> list[tuple[str, str]]:
    from ray_ulysses.tracking.mlflow_page import mlflow_page

    page = mlflow_page(tracking_uri, run_dir)
    return list(zip(("see the curves", "then open"), filter(None, (page.command, page.url)), strict=False))


def _command(config_path: str, overrides: tuple[str, ...]) -> str:
    """Return the command that trains with these overrides; of several for one setting, the last one wins."""
    last = {override.partition("=")[0].strip(): number for number, override in enumerate(overrides)}
    options = "".join(f" --set {shlex.quote(overrides[number])}" for number in sorted(last.values()))
    return f"ray-ulysses train {shlex.quote(config_path)}{options}"
