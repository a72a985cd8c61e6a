"""Finds a checkpoint through MLflow alone: which run, which of its checkpoints, and where that lies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, TypeVar

from ray_ulysses.errors import RunError, UserError, without_secret
from ray_ulysses.tracking.commits import TrackedCheckpoint
from ray_ulysses.tracking.mlflow_runs import MlflowRun, MlflowRuns

_MOST_CANDIDATES = 10
_BEST_BY = ("eval_loss", "loss")
_Answer = TypeVar("_Answer")


def find_checkpoint(
    run: str, which: int | Literal["latest", "best"], *, uri: str, setting: str = "model.resume_from"
) -> TrackedCheckpoint:
    """Return a checkpoint of a run that MLflow knows and that is still there, as far as MLflow knows.

    Args:
        run: Id or name of the MLflow run.
        which: A step, the newest one, or the one of the lowest loss: of evaluation where there is any, else of
            training.
        uri: Tracking URI.
        setting: The setting that asks, for the text of an error.

    Raises:
        UserError: There is no such run or checkpoint, or several; the text lists what there is.
        RunError: MLflow does not answer; it is asked once more and not for long.
    """
    asked, shown = f"{setting}='mlflow:{run}/{which}'", without_secret(uri)
    database = uri.removeprefix("sqlite:///")
    if database != uri and not Path(database).is_file():
        raise UserError(f"{asked}: tracking.uri={shown!r} is no database that exists; set tracking.uri to where it is")
    runs = _ask(asked, shown, lambda: MlflowRuns(uri))
    found = _ask(asked, shown, lambda: runs.find(run))
    if not found:
        raise UserError(_unknown_run(asked, shown, _ask(asked, shown, lambda: runs.newest(_MOST_CANDIDATES))))
    if len(found) > 1:
        lines = "".join(f"\n  - mlflow:{one.run_id}/{which}  {one}" for one in found[:_MOST_CANDIDATES])
        raise UserError(f"{asked}: {len(found)} MLflow runs have that name; name one of them by its id:{lines}")
    (only,) = found
    return choose(_ask(asked, shown, lambda: runs.checkpoints(only)), which, asked=asked)


def choose(
    tracked: Sequence[TrackedCheckpoint], which: int | Literal["latest", "best"], *, asked: str
) -> TrackedCheckpoint:
    """Return the checkpoint that is meant (pure).

    Args:
        tracked: All checkpoints of a run, whatever became of them.
        which: As in `find_checkpoint`.
        asked: The setting and its value, for the text of an error.

    Raises:
        UserError: None of them is meant; the text says what became of the one that was, and lists the others.
    """
    live = sorted(
        (one for one in tracked if one.is_complete and one.state == "committed"),
        key=lambda one: (one.attempt or 0, one.step),
    )
    if not live:
        gone = f"; {len(tracked)} that it had are deleted or damaged" if tracked else ""
        raise UserError(f"{asked}: MLflow knows of no checkpoint of that run that is still there{gone}; name another")
    if which == "latest":
        return live[-1]
    if which == "best":
        return _best(live, asked)
    of_step = [one for one in live if one.step == which]
    if of_step:
        return of_step[-1]
    fate = next((one.state for one in tracked if one.step == which and one.state != "committed"), None)
    was = f"the checkpoint of step {which} is {fate}" if fate else f"that run has no checkpoint of step {which}"
    steps = ", ".join(str(step) for step in sorted({one.step for one in live}))
    raise UserError(f"{asked}: {was}; there are {steps}")


def _best(live: Sequence[TrackedCheckpoint], asked: str) -> TrackedCheckpoint:
    """Return the one of the lowest loss, the newest of several; a loss that is no number is none."""
    for name in _BEST_BY:
        rated = [one for one in live if name in one.metrics and abs(one.metrics[name]) < float("inf")]
        if rated:
            # A loss of training and one of evaluation are not compared: one that was not evaluated is left out.
            return min(reversed(rated), key=lambda one: one.metrics[name])
    steps = ", ".join(str(one.step) for one in live)
    raise UserError(f"{asked}: none of the run's checkpoints has a loss; name a step: {steps}")


def _unknown_run(asked: str, uri: str, newest: Sequence[MlflowRun]) -> str:
    if not newest:
        return f"{asked}: MLflow at {uri} has no run with that id or name, nor any other run of ray-ulysses"
    lines = "".join(f"\n  - {one.name}  {one.run_id}  {one}" for one in newest)
    return f"{asked}: MLflow at {uri} has no run with that id or name; its newest runs are:{lines}"


def _ask(asked: str, uri: str, question: Callable[[], _Answer]) -> _Answer:
    try:
        return question()
    except Exception as error:
        reason = f"{type(error).__name__}: {without_secret(str(error)).partition(chr(10))[0][:300]}"
        raise RunError(
            f"{asked}: MLflow at {uri} does not answer ({reason}); start it again, correct tracking.uri, or name the "
            "run's directory in place of the MLflow run"
        ) from error
