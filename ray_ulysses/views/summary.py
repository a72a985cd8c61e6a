"""Renders the summary that ``train`` prints at its end."""

from __future__ import annotations

import math
import shlex
from collections.abc import Collection
from pathlib import Path
from statistics import fmean

from ray_ulysses.planner.report import PlanReport
from ray_ulysses.report.words import as_text, count, duration, facts, size
from ray_ulysses.run_names import SPOOL_FOLDER, TENSORBOARD_FOLDER
from ray_ulysses.storage.location import join_location
from ray_ulysses.storage.place import Place, node_folder
from ray_ulysses.tracking.history import RunHistory
from ray_ulysses.tracking.mlflow_page import mlflow_page
from ray_ulysses.views.time_spent import goodput_in_words

_LAST_LOSSES = 10


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
        rows += _curves(tracking_uri, run_dir) if is_heard else [_unsent(run_dir)]
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
    page = mlflow_page(tracking_uri, run_dir)
    return list(zip(("see the curves", "then open"), filter(None, (page.command, page.url)), strict=False))


def _unsent(run_dir: Place) -> tuple[str, str]:
    return (
        "MLflow",
        f"has received nothing yet; the same command sends it what is stored in {node_folder(run_dir) / SPOOL_FOLDER}",
    )


def _command(config_path: str, overrides: tuple[str, ...]) -> str:
    """Return the command that trains with these overrides; of several for one setting, the last one wins."""
    last = {override.partition("=")[0].strip(): number for number, override in enumerate(overrides)}
    options = "".join(f" --set {shlex.quote(overrides[number])}" for number in sorted(last.values()))
    return f"ray-ulysses train {shlex.quote(config_path)}{options}"
