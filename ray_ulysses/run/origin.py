"""Resolves references to checkpoints, in a store or in MLflow, and pins the one that another run starts from."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic_core import from_json

from ray_ulysses.checkpoint import Manifest
from ray_ulysses.checkpoint.choice import Damage, committed_steps, examine
from ray_ulysses.checkpoint.retention import Committed, best_of, nameable, unreadable
from ray_ulysses.config.reference_to_checkpoint import SETTING, MlflowReference, Which, parse_reference
from ray_ulysses.config.resume import resume_fingerprint, setting, settings_that_differ
from ray_ulysses.data.plan.plan import Cursor
from ray_ulysses.errors import RunError, UserError, without_secret
from ray_ulysses.run.checkpoint_store import named_by, storage_answers, stored_checkpoints
from ray_ulysses.run.secrets_file import stored_config
from ray_ulysses.run_names import CONFIG_FILE, ORIGIN_FILE
from ray_ulysses.storage.location import sqlite_path
from ray_ulysses.storage.place import is_file, open_store, place_of, refuse_server
from ray_ulysses.tracking.mlflow_models import MlflowRuns, TrackedCheckpoint, best_tracked, usable

if TYPE_CHECKING:
    from ray_ulysses.config import Config
    from ray_ulysses.data.plan.plan import Plan

_MOST_CANDIDATES = 10
_WAY_OUT = f"name the store itself in {SETTING}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """The other run's checkpoint from which a run starts."""

    reference: str
    """``model.resume_from`` as it was when the checkpoint was found."""
    location: str
    """Root of its store, a path or a URI."""
    step: int

    def __str__(self) -> str:
        return f"{self.location}@{self.step}"


def find_origin(config: Config) -> Origin | None:
    """Return the checkpoint that ``model.resume_from`` currently names; ``None`` if it is not set.

    Raises:
        UserError: There is no such checkpoint, or it is damaged.
        RunError: MLflow does not answer.
    """
    text = config.model.resume_from
    if text is None:
        return None
    reference = parse_reference(text)
    if isinstance(reference, MlflowReference):
        uri = config.tracking_uri
        if uri is None:
            raise UserError(f"{SETTING}={text!r}: tracking.enabled is false, so no MLflow is named; set tracking.uri")
        tracked = find_tracked(reference.run, reference.which, uri=uri, allow_http=config.tracking.allow_http)
        refuse_server(tracked.store, f"{SETTING}={text!r}: store", named_by(config), _WAY_OUT)
        return Origin(reference=text, location=tracked.store, step=tracked.step)
    # A run's directory, whose configuration may place the checkpoints elsewhere, or the root of a store itself.
    location, where = reference.location, place_of(reference.location)
    if is_file(where / CONFIG_FILE):
        location = stored_checkpoints(stored_config(where), where, named=named_by(config), way_out=_WAY_OUT)
    with storage_answers(location):
        step = choose_step(nameable(open_store(location)), reference.which, f"{SETTING}={text!r}")
    return Origin(reference=text, location=location, step=step)


def check_origin(origin: Origin, config: Config, plan: Plan) -> Manifest:
    """Return the manifest of an origin, if the run may start from it; reads no weights.

    Raises:
        UserError: It is missing or not whole, or ``resume_state=all`` and its run has other settings or data.
    """
    with storage_answers(origin.location):
        store = open_store(origin.location)
        if not is_there(origin):
            there = listed(tuple(nameable(store))) or "none"
            raise UserError(
                f"{SETTING}={origin.reference!r}: the checkpoint of step {origin.step} is missing in "
                f"{origin.location} (there: {there}); mount or restore that location, or name the run's present one, "
                f"as in /path/of/the/run@{origin.step}"
            )
        found = examine(store, origin.step, "sizes")
    if isinstance(found, Damage):
        raise UserError(f"{SETTING}={origin.reference!r}: {found}; name another step")
    if config.model.resume_state != "all":
        _check_adapter(found, origin, config)
        return found
    other = "set model.resume_state to weights or optimizer to start a separate run from it"
    if found.meta.config_fingerprint != resume_fingerprint(config):
        differences = settings_that_differ(found.meta.extra.get("settings", {}), config)
        raise UserError(
            f"{SETTING}={origin.reference!r}: the checkpoint of step {found.step} of run {found.meta.run!r} was "
            f"written under other settings ({differences}), so the run "
            f"can't continue from it; restore them, or {other}"
        )
    try:
        plan.check_cursor(Cursor.from_json(dict(found.meta.cursor)))
    except UserError as error:
        raise UserError(f"{SETTING}={origin.reference!r}: {error}; or {other}") from error
    return found


def _check_adapter(found: Manifest, origin: Origin, config: Config) -> None:
    """Refuse weights that were trained with another adapter: their names and sizes do not fit."""
    theirs, own = (
        found.meta.extra.get("settings", {}).get("model.adapter"),
        setting(config, "model.adapter"),
    )
    if theirs != own:
        named = ["no adapter" if one is None else f"model.adapter={one}" for one in (theirs, own)]
        raise UserError(
            f"{SETTING}={origin.reference!r}: the checkpoint of step {found.step} of run {found.meta.run!r} has "
            f"{named[0]} and this run {named[1]}, so its weights do not fit; set the same, or export that run (with "
            "--merge if it has an adapter) and give the directory as model.path"
        )


def is_there(origin: Origin) -> bool:
    """Return whether an origin's checkpoint is committed at its location.

    Raises:
        OSError: The storage can't be listed.
    """
    return origin.step in committed_steps(open_store(origin.location))


def pin_origin(config: Config, origin: Origin | None) -> None:
    """Record a run's origin, so that every attempt starts from the same one; the driver calls it."""
    if origin is not None:
        text = json.dumps({"asked": origin.reference, "location": origin.location, "step": origin.step})
        open_store(config.run_dir).replace(ORIGIN_FILE, [text.encode()])


def pinned_origin(config: Config) -> Origin | None:
    """Return the origin recorded for the present ``model.resume_from``; ``None`` if there is none.

    Raises:
        UnnamedServerError: Only the record names its server.
    """
    try:
        fields = from_json(open_store(config.run_dir).read_whole(ORIGIN_FILE))
        found = Origin(reference=fields["asked"], location=fields["location"], step=fields["step"])
    except (OSError, ValueError, TypeError, KeyError):
        return None
    if found.reference != config.model.resume_from:
        return None
    refuse_server(found.location, f"location of {config.run_dir / ORIGIN_FILE}", named_by(config), _WAY_OUT)
    return found


def choose_step(committed: Mapping[int, Committed], which: Which, asked: str) -> int:
    """Return the step of the requested checkpoint (pure).

    Args:
        committed: The checkpoints of the run, as `nameable` returns them.
        which: A step, the newest one, or the one with the lowest loss.
        asked: The setting or option and its value, for error messages.

    Raises:
        UserError: There is no such checkpoint, or the best one can't be determined; the text lists the steps.
    """
    steps = tuple(sorted(committed))
    if not steps:
        raise UserError(f"{asked}: there is no checkpoint; name a run that has one")
    if which == "latest":
        return steps[-1]
    if which != "best":
        if which not in committed:
            raise UserError(f"{asked}: there is no checkpoint of that step; give one of {listed(steps)}")
        return which
    if unknown := unreadable(committed):
        raise UserError(
            f"{asked}: the best checkpoint can't be determined, since the metrics of step {listed(unknown)} can't be "
            f"read; repair it, or give a step: {listed(steps)}"
        )
    best = best_of(committed)
    if best is None:
        raise UserError(f"{asked}: none of the run's checkpoints has a loss; give a step: {listed(steps)}")
    return best


def listed(steps: Sequence[int]) -> str:
    """Return steps as listed in an error."""
    return ", ".join(map(str, steps))


def find_tracked(run: str, which: Which, *, uri: str, allow_http: bool = False) -> TrackedCheckpoint:
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
    try:
        runs = MlflowRuns(uri, allow_http=allow_http)
        found = runs.find(run)
        newest = [] if found else runs.newest(_MOST_CANDIDATES)
        tracked = runs.checkpoints(found[0]) if len(found) == 1 else []
    except UserError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {without_secret(str(error)).partition(chr(10))[0][:300]}"
        raise RunError(
            f"{reference}: MLflow at {shown} does not answer ({reason}); start it, correct tracking.uri, or give the "
            "run's directory instead of the MLflow run"
        ) from error
    if not found:
        have = "its newest runs are:" if newest else "nor any other run of ray-ulysses"
        lines = [f"{one.name}  {one.run_id}  {one}" for one in newest]
        raise UserError(f"{reference}: MLflow at {shown} has no run with that id or name; {have}", *lines)
    if len(found) > 1:
        candidates = [f"mlflow:{one.run_id}/{which}  {one}" for one in found[:_MOST_CANDIDATES]]
        rule = f"{reference}: {len(found)} MLflow runs have that name; give the id of one of them:"
        raise UserError(rule, *candidates)
    return choose_tracked(tracked, which, reference=reference)


def choose_tracked(tracked: Sequence[TrackedCheckpoint], which: Which, *, reference: str) -> TrackedCheckpoint:
    """Return the requested checkpoint (pure).

    Args:
        tracked: All checkpoints of a run, in any state.
        which: As in `find_tracked`.
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
        best = best_tracked(live)
        if best is None:
            steps = listed([one.step for one in live])
            raise UserError(f"{reference}: none of the run's checkpoints has a loss; give a step: {steps}")
        return best
    of_step = [one for one in live if one.step == which]
    if of_step:
        return of_step[-1]
    state = next((one.state for one in tracked if one.step == which and one.state != "committed"), None)
    problem = f"the checkpoint of step {which} is {state}" if state else f"that run has no checkpoint of step {which}"
    raise UserError(f"{reference}: {problem}; available steps: {listed(sorted({one.step for one in live}))}")
