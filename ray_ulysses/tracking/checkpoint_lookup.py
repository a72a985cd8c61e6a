"""Finds a checkpoint of a run through MLflow alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

from ray_ulysses.errors import RunError, UserError, without_secret
from ray_ulysses.storage.location import sqlite_path
from ray_ulysses.tracking.checkpoint_updates import TrackedCheckpoint, best_of, usable
from ray_ulysses.tracking.mlflow_runs import MlflowRuns

_MOST_CANDIDATES = 10
_Answer = TypeVar("_Answer")


def find_checkpoint(
    run: str, which: int | Literal["latest", "best"], *, uri: str, allow_http: bool = False
) -> TrackedCheckpoint:
    """Return a checkpoint of a run that still exists according to MLflow.

    Args:
        run: Id or name of the MLflow run.
        which: A step, the newest one, or the one with the lowest loss (of the evaluation if there is any, else of
            training).
        uri: Tracking URI.
        allow_http: As of `open_client`.

    Raises:
        UserError: There is no such run or checkpoint, or several; the text lists the existing ones.
        RunError: MLflow does not answer.
    """
    reference, shown = f"model.resume_from='mlflow:{run}/{which}'", without_secret(uri)
    database = sqlite_path(uri)
    if database is not None and not database.is_file():
        raise UserError(f"{reference}: tracking.uri={shown!r} does not exist; set tracking.uri to an existing database")
    runs = _query(reference, shown, lambda: MlflowRuns(uri, allow_http=allow_http))
    found = _query(reference, shown, lambda: runs.find(run))
    if not found:
        newest = _query(reference, shown, lambda: runs.newest(_MOST_CANDIDATES))
        have = "its newest runs are:" if newest else "nor any other run of ray-ulysses"
        lines = [f"{one.name}  {one.run_id}  {one}" for one in newest]
        raise UserError(f"{reference}: MLflow at {shown} has no run with that id or name; {have}", *lines)
    if len(found) > 1:
        candidates = [f"mlflow:{one.run_id}/{which}  {one}" for one in found[:_MOST_CANDIDATES]]
        rule = f"{reference}: {len(found)} MLflow runs have that name; give the id of one of them:"
        raise UserError(rule, *candidates)
    (only,) = found
    return choose(_query(reference, shown, lambda: runs.checkpoints(only)), which, reference=reference)


def choose(
    tracked: Sequence[TrackedCheckpoint], which: int | Literal["latest", "best"], *, reference: str
) -> TrackedCheckpoint:
    """Return the requested checkpoint (pure).

    Args:
        tracked: All checkpoints of a run, in any state.
        which: As in `find_checkpoint`.
        reference: The setting and its value, for the text of an error.

    Raises:
        UserError: There is no such checkpoint; the text gives the state of the requested one and lists the others.
    """
    live = usable(tracked)
    if not live:
        gone = f"; all {len(tracked)} of its checkpoints are deleted or damaged" if tracked else ""
        raise UserError(f"{reference}: MLflow has no usable checkpoint of that run{gone}; choose another run")
    if which == "latest":
        return live[-1]
    if which == "best":
        best = best_of(live)
        if best is None:
            steps = ", ".join(str(one.step) for one in live)
            raise UserError(f"{reference}: none of the run's checkpoints has a loss; give a step: {steps}")
        return best
    of_step = [one for one in live if one.step == which]
    if of_step:
        return of_step[-1]
    state = next((one.state for one in tracked if one.step == which and one.state != "committed"), None)
    problem = f"the checkpoint of step {which} is {state}" if state else f"that run has no checkpoint of step {which}"
    steps = ", ".join(str(step) for step in sorted({one.step for one in live}))
    raise UserError(f"{reference}: {problem}; available steps: {steps}")


def _query(reference: str, uri: str, request: Callable[[], _Answer]) -> _Answer:
    try:
        return request()
    except UserError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {without_secret(str(error)).partition(chr(10))[0][:300]}"
        raise RunError(
            f"{reference}: MLflow at {uri} does not answer ({reason}); start it, correct tracking.uri, or give the "
            "run's directory instead of the MLflow run"
        ) from error
