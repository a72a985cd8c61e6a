"""Resolves references to checkpoints in a store or in MLflow, and pins the checkpoint that a new run starts from."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic_core import from_json

from ray_ulysses.checkpoint import Manifest
from ray_ulysses.checkpoint.choice import Damage, examine, is_committed
from ray_ulysses.checkpoint.retention import Committed, best_of, nameable, unreadable
from ray_ulysses.config import Config
from ray_ulysses.config.reference_to_checkpoint import SETTING, MlflowReference, Which, parse_reference
from ray_ulysses.config.resume import resume_fingerprint, setting, settings_that_differ
from ray_ulysses.data.plan.plan import Cursor, Plan
from ray_ulysses.errors import RunError, UserError, without_secret
from ray_ulysses.run.checkpoint_store import named_by, storage_answers, stored_checkpoints
from ray_ulysses.run.secrets_file import stored_config
from ray_ulysses.run_names import CONFIG_FILE, ORIGIN_FILE
from ray_ulysses.storage.location import sqlite_path
from ray_ulysses.storage.place import is_file, open_store, place_of, refuse_server
from ray_ulysses.tracking.mlflow_models import MlflowRuns, TrackedCheckpoint, best_tracked, usable

_MOST_CANDIDATES = 10
_WAY_OUT = f"name the store itself in {SETTING}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Another run's checkpoint that this run starts from."""

    reference: str
    """Value of ``model.resume_from`` at the time of the lookup."""
    location: str
    """Path or URI of the checkpoint store's root."""
    step: int

    def __str__(self) -> str:
        return f"{self.location}@{self.step}"


def find_origin(config: Config) -> Origin | None:
    """Look up the checkpoint that ``model.resume_from`` refers to. Return None if this setting is not set.

    Raises:
        UserError: The checkpoint does not exist.
        RunError: MLflow or the checkpoint storage does not respond.
    """
    text = config.model.resume_from
    if text is None:
        return None
    reference = parse_reference(text)
    if isinstance(reference, MlflowReference):
        uri = config.tracking_uri
        if uri is None:
            raise UserError(f"{SETTING}={text!r} requires MLflow, but tracking.enabled is false; set tracking.uri")
        tracked = find_tracked(reference.run, reference.which, uri=uri, allow_http=config.tracking.allow_http)
        refuse_server(tracked.store, f"{SETTING}={text!r}: store", named_by(config), _WAY_OUT)
        return Origin(reference=text, location=tracked.store, step=tracked.step)
    # The reference is a run's directory, whose config.yaml may specify another checkpoint store, or a store's root.
    location, where = reference.location, place_of(reference.location)
    if is_file(where / CONFIG_FILE):
        location = stored_checkpoints(stored_config(where), where, named=named_by(config), way_out=_WAY_OUT)
    with storage_answers(location):
        step = choose_step(nameable(open_store(location)), reference.which, f"{SETTING}={text!r}")
    return Origin(reference=text, location=location, step=step)


def check_origin(origin: Origin, config: Config, plan: Plan) -> Manifest:
    """Check, without reading weights, that the run can start from an origin, and return the origin's manifest.

    Raises:
        UserError: The checkpoint is missing, damaged or incompatible with the run's settings or data.
    """
    with storage_answers(origin.location):
        store = open_store(origin.location)
        if not is_there(origin):
            there = listed(tuple(nameable(store))) or "none"
            raise UserError(
                f"{SETTING}={origin.reference!r}: {origin.location} does not contain the checkpoint of step "
                f"{origin.step} (available steps: {there}); mount or restore that location, or specify the run's "
                f"current location, for example /path/of/the/run@{origin.step}"
            )
        found = examine(store, origin.step, "sizes")
    if isinstance(found, Damage):
        raise UserError(f"{SETTING}={origin.reference!r}: {found}; specify another step")
    if config.model.resume_state != "all":
        _check_trained(found, origin, config)
        return found
    other = "set model.resume_state to weights or optimizer to start a separate run from the checkpoint"
    differences = settings_that_differ(found.meta.extra.get("settings", {}), config)
    if differences or found.meta.config_fingerprint != resume_fingerprint(config):
        raise UserError(
            f"{SETTING}={origin.reference!r}: the checkpoint of step {found.step} of run {found.meta.run!r} was "
            f"written with different settings ({differences}), so this run can't continue from it; restore those "
            f"settings, or {other}"
        )
    try:
        plan.check_cursor(Cursor.from_json(dict(found.meta.cursor)))
    except UserError as error:
        why = f"this run can't continue from the checkpoint's data position ({str(error).partition('; ')[0]})"
        hint = f"use the data, seed and context of run {found.meta.run!r}, or {other}"
        raise UserError(f"{SETTING}={origin.reference!r}: {why}; {hint}") from error
    return found


def _check_trained(found: Manifest, origin: Origin, config: Config) -> None:
    """Refuse a checkpoint with different adapters, frozen weights or, if they are loaded, optimizer moments."""
    settings = found.meta.extra.get("settings", {})
    for name in (
        "model.freeze",
        "model.base_dtype",
        *(["optimizer.kind"] if config.model.resume_state == "optimizer" else []),
    ):
        theirs, own = settings.get(name), setting(config, name)
        if theirs is not None and theirs != own:
            raise UserError(
                f"{SETTING}={origin.reference!r}: the checkpoint of step {found.step} of run {found.meta.run!r} was "
                f"trained with {name}={theirs} and this run has {own}, so the states are incompatible; use the same "
                "value, or export that run and set model.path to the exported directory"
            )
    theirs, own = settings.get("model.adapter"), setting(config, "model.adapter")
    if theirs != own:
        named = ["no adapter" if one is None else f"model.adapter={one}" for one in (theirs, own)]
        raise UserError(
            f"{SETTING}={origin.reference!r}: the checkpoint of step {found.step} of run {found.meta.run!r} has "
            f"{named[0]} and this run has {named[1]}, so the weights are incompatible; use the same adapter, or export "
            "that run (with --merge if it has an adapter) and set model.path to the exported directory"
        )


def is_there(origin: Origin) -> bool:
    """Return whether an origin's checkpoint still exists at its location.

    Raises:
        OSError: The storage can't be listed.
    """
    return is_committed(open_store(origin.location), origin.step)


def pin_origin(config: Config, origin: Origin | None) -> None:
    """Store a run's origin so that every attempt starts from the same checkpoint. Called only by the driver."""
    if origin is not None:
        text = json.dumps({"asked": origin.reference, "location": origin.location, "step": origin.step})
        open_store(config.run_dir).replace(ORIGIN_FILE, [text.encode()])


def pinned_origin(config: Config) -> Origin | None:
    """Return the stored origin if it matches the current value of ``model.resume_from``, or None otherwise.

    Raises:
        UnnamedServerError: The origin's server is specified only by the stored file.
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
    """Return the step of the requested checkpoint.

    Args:
        committed: The run's checkpoints by step, from `nameable`.
        which: A step, ``latest``, or ``best`` for the lowest loss.
        asked: The setting or option with its value, for errors.

    Raises:
        UserError: The checkpoint does not exist, or the best checkpoint can't be determined.
    """
    steps = tuple(sorted(committed))
    if not steps:
        raise UserError(f"{asked}: the run has no checkpoint; specify a run with a checkpoint")
    if which == "latest":
        return steps[-1]
    if which != "best":
        if which not in committed:
            raise UserError(f"{asked}: the run has no checkpoint of that step; use one of {listed(steps)}")
        return which
    if unknown := unreadable(committed):
        raise UserError(
            f"{asked}: the best checkpoint can't be determined, since the metrics of step {listed(unknown)} can't be "
            f"read; repair that checkpoint, or specify a step: {listed(steps)}"
        )
    best = best_of(committed)
    if best is None:
        raise UserError(f"{asked}: none of the run's checkpoints has a loss; specify a step: {listed(steps)}")
    return best


def listed(steps: Sequence[int]) -> str:
    """Format steps for an error message."""
    return ", ".join(map(str, steps))


def find_tracked(run: str, which: Which, *, uri: str, allow_http: bool = False) -> TrackedCheckpoint:
    """Return the requested checkpoint of a run from MLflow's list of usable checkpoints.

    Args:
        run: Id or name of the MLflow run.
        which: A step, ``latest``, or ``best`` for the lowest evaluation loss, or training loss without evaluations.
        uri: MLflow tracking URI.
        allow_http: See `open_client`.

    Raises:
        UserError: The run or checkpoint does not exist, or several runs have this name.
        RunError: MLflow does not respond.
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
            f"{reference}: MLflow at {shown} does not respond ({reason}); start the server, correct tracking.uri, or "
            "specify the run's directory instead of the MLflow run"
        ) from error
    if not found:
        have = "its newest runs are:" if newest else "it has no ray-ulysses runs"
        lines = [f"{one.name}  {one.run_id}  {one}" for one in newest]
        raise UserError(f"{reference}: MLflow at {shown} has no run with that id or name; {have}", *lines)
    if len(found) > 1:
        candidates = [f"mlflow:{one.run_id}/{which}  {one}" for one in found[:_MOST_CANDIDATES]]
        rule = f"{reference}: {len(found)} MLflow runs have that name; use the id of one of them:"
        raise UserError(rule, *candidates)
    return choose_tracked(tracked, which, reference=reference)


def choose_tracked(tracked: Sequence[TrackedCheckpoint], which: Which, *, reference: str) -> TrackedCheckpoint:
    """Return the requested checkpoint of an MLflow run.

    Args:
        tracked: All of the run's checkpoints, including deleted and damaged ones.
        which: See `find_tracked`.
        reference: The setting and its value, for errors.

    Raises:
        UserError: The checkpoint does not exist or is not usable.
    """
    if not (live := usable(tracked)):
        gone = f"; all {len(tracked)} of its checkpoints are deleted or damaged" if tracked else ""
        raise UserError(f"{reference}: MLflow lists no usable checkpoint of that run{gone}; choose another run")
    if which == "latest":
        return live[-1]
    if which == "best":
        best = best_tracked(live)
        if best is None:
            steps = listed([one.step for one in live])
            raise UserError(f"{reference}: none of the run's checkpoints has a loss; specify a step: {steps}")
        return best
    of_step = [one for one in live if one.step == which]
    if of_step:
        return of_step[-1]
    state = next((one.state for one in tracked if one.step == which and one.state != "committed"), None)
    problem = f"the checkpoint of step {which} is {state}" if state else f"that run has no checkpoint of step {which}"
    raise UserError(f"{reference}: {problem}; available steps: {listed(sorted({one.step for one in live}))}")
