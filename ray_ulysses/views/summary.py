"""Builds and renders the summary that ``train`` prints at its end."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from ray_ulysses.run_names import SPOOL_FOLDER
from ray_ulysses.storage.location import join_location
from ray_ulysses.tracking.history import RunHistory
from ray_ulysses.tracking.mlflow_page import MlflowPage, mlflow_page
from ray_ulysses.views.time_spent import goodput_in_words
from ray_ulysses.views.words import count, duration, facts

_LAST_LOSSES = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """The result of a ``train`` command.

    Attributes:
        name: The run's name.
        status: The run's status.
        step: Completed steps.
        planned_steps: Steps of the data plan.
        final_loss: Loss of the last step, in nats; None before the first.
        mean_last_losses: Mean loss of the last steps, in nats.
        num_last: Number of steps in that mean.
        unigram_nats: Entropy of the corpus's bytes; a model that learned anything has a lower loss.
        tokens: Supervised tokens trained on.
        elapsed_s: Seconds of this command.
        goodput: Share of the time of all the run's commands spent on steps that count, and where the rest went.
        checkpoint: Newest committed checkpoint.
        mlflow: The page of the curves; None if the run is not tracked.
        waiting: Where unsent tracking data is stored, if MLflow has received nothing of the run; else None.
        resume: Command that resumes the run.
        go_on: Command that continues to the end of the planned data.
    """

    name: str
    status: str
    step: int
    planned_steps: int
    final_loss: float | None
    mean_last_losses: float | None
    num_last: int
    unigram_nats: float | None
    tokens: int
    elapsed_s: float
    goodput: str
    checkpoint: str | None
    mlflow: MlflowPage | None
    waiting: str | None = None
    resume: str
    go_on: str


def build_summary(
    history: RunHistory,
    *,
    run_dir: Path,
    location: str,
    config_path: str,
    overrides: tuple[str, ...] = (),
    planned_steps: int,
    elapsed_s: float,
    tracking_uri: str | None = None,
    is_heard: bool = True,
    unigram_nats: float | None = None,
) -> Summary:
    """Build the summary of a run from its history.

    Args:
        history: The run's history from its journal.
        run_dir: The run's directory.
        location: Path or URI that holds its checkpoints.
        config_path: The given configuration, for the command that resumes.
        overrides: The given ``--set`` options.
        planned_steps: Steps of the data plan.
        elapsed_s: Seconds of this command.
        tracking_uri: MLflow's URI; None if the run is not tracked.
        is_heard: Whether MLflow has received anything of the run.
        unigram_nats: Entropy of the corpus's bytes, if known.
    """
    last = [step.loss for step in history.steps[-_LAST_LOSSES:]]
    committed = [checkpoint for checkpoint in history.checkpoints if checkpoint.committed]
    return Summary(
        name=history.name,
        status=history.status,
        step=history.step,
        planned_steps=planned_steps,
        final_loss=last[-1] if last else None,
        mean_last_losses=fmean(last) if last else None,
        num_last=len(last),
        unigram_nats=unigram_nats,
        tokens=history.tokens,
        elapsed_s=elapsed_s,
        goodput=goodput_in_words(history.time_spent),
        checkpoint=join_location(location, committed[-1].path) if committed else None,
        mlflow=None if tracking_uri is None else mlflow_page(tracking_uri, run_dir),
        waiting=None if is_heard else str(run_dir / SPOOL_FOLDER),
        resume=_command(config_path, overrides),
        go_on=_command(config_path, (*overrides, f"run.stop_step={planned_steps}")),
    )


def _command(config_path: str, overrides: tuple[str, ...]) -> str:
    """Return the command that trains with these overrides; of several for one setting, the last one wins."""
    last = {override.partition("=")[0].strip(): number for number, override in enumerate(overrides)}
    options = "".join(f" --set {shlex.quote(overrides[number])}" for number in sorted(last.values()))
    return f"ray-ulysses train {shlex.quote(config_path)}{options}"


def render_summary(summary: Summary) -> str:
    """Return the summary as aligned lines."""
    rows = [("steps", f"{summary.step:,} of {summary.planned_steps:,} planned")]
    if summary.final_loss is not None and summary.mean_last_losses is not None:
        rows.append(("final loss", f"{summary.final_loss:.4f} nats"))
        rows.append((f"mean of last {summary.num_last}", f"{summary.mean_last_losses:.4f} nats"))
    if summary.unigram_nats is not None:
        rows.append(("byte entropy", f"{summary.unigram_nats:.4f} nats (unigram, of the corpus)"))
    rows.append(("tokens", f"{count(summary.tokens)} ({summary.tokens:,})"))
    rows.append(("time", duration(summary.elapsed_s)))
    rows.append(("goodput", summary.goodput))
    rows.append(("checkpoint", summary.checkpoint or "none committed"))
    if summary.mlflow is not None and summary.waiting is not None:
        rows.append(
            ("MLflow", f"has received nothing yet; the same command sends it what is stored in {summary.waiting}")
        )
    elif summary.mlflow is not None:
        ways = [way for way in (summary.mlflow.command, summary.mlflow.url) if way is not None]
        rows += zip(("see the curves", "then open"), ways, strict=False)
    rows.append(_next_step(summary))
    return "\n".join([f"run {summary.name!r}: {summary.status}", *facts(rows)])


def _next_step(summary: Summary) -> tuple[str, str]:
    if summary.step < summary.planned_steps:
        if summary.status == "finished":
            return ("continue", summary.go_on)
        return ("resume", summary.resume)
    return ("continue", "every planned row is trained; start a new run.name with more data or epochs")
