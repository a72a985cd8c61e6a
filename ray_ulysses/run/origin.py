"""Finds the other run's checkpoint from which a run starts, once, and pins it in the run's directory."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic_core import from_json

from ray_ulysses.checkpoint import Manifest
from ray_ulysses.checkpoint.choice import Damage, committed_steps, examine
from ray_ulysses.checkpoint.retention import best_of, nameable, unreadable
from ray_ulysses.config.reference_to_checkpoint import SETTING, MlflowReference, RunReference, parse_reference
from ray_ulysses.config.resume import resume_fingerprint, setting, settings_that_differ
from ray_ulysses.data.plan.plan import Cursor
from ray_ulysses.errors import UserError
from ray_ulysses.run.checkpoint_store import named_by, storage_answers, stored_checkpoints
from ray_ulysses.run.stored_run import stored_config
from ray_ulysses.run_names import CONFIG_FILE, ORIGIN_FILE
from ray_ulysses.storage.place import open_store, place_of, refuse_server, store_at
from ray_ulysses.storage.store import read_bytes
from ray_ulysses.tracking.checkpoint_lookup import find_checkpoint

if TYPE_CHECKING:
    from ray_ulysses.config import Config
    from ray_ulysses.data.plan.plan import Plan
    from ray_ulysses.storage import Store

_WAY_OUT = f"name the store itself in {SETTING}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """The other run's checkpoint from which a run starts.

    Attributes:
        reference: ``model.resume_from`` as it was when the checkpoint was found.
        location: Root of its store, a path or a URI.
        step: Its step.
    """

    reference: str
    location: str
    step: int

    def __str__(self) -> str:
        return f"{self.location}@{self.step}"


def find_origin(config: Config) -> Origin | None:
    """Return the checkpoint that ``model.resume_from`` names now; ``None`` if it is not set.

    Raises:
        UserError: There is none of that name, or it is damaged.
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
        tracked = find_checkpoint(reference.run, reference.which, uri=uri, allow_http=config.tracking.allow_http)
        refuse_server(tracked.store, f"{SETTING}={text!r}: store", named_by(config), _WAY_OUT)
        return Origin(reference=text, location=tracked.store, step=tracked.step)
    # A run's directory, whose configuration may place the checkpoints elsewhere, or the root of a store itself.
    location, where = reference.location, place_of(reference.location)
    if (where / CONFIG_FILE).is_file():
        location = stored_checkpoints(stored_config(where), where, named=named_by(config), way_out=_WAY_OUT)
    with storage_answers(location):
        return Origin(reference=text, location=location, step=_step_of(open_store(location), reference, text))


def check_origin(origin: Origin, config: Config, plan: Plan) -> Manifest:
    """Return the manifest of an origin, if the run may start from it; reads no weights.

    Raises:
        UserError: It is missing or not whole, or ``resume_state=all`` and its run has other settings or data.
    """
    with storage_answers(origin.location):
        store = open_store(origin.location)
        if not is_there(origin):
            there = _listed(tuple(nameable(store))) or "none"
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
            f"written under other settings ({differences or 'by a version that did not record them'}), so the run "
            f"can't continue from it; restore them, or {other}"
        )
    try:
        plan.check_cursor(Cursor.from_json(dict(found.meta.cursor)))
    except UserError as error:
        raise UserError(f"{SETTING}={origin.reference!r}: {error}; or {other}") from error
    return found


def _check_adapter(found: Manifest, origin: Origin, config: Config) -> None:
    """Refuse weights that were trained beside others, whose names and sizes do not fit.

    Raises:
        UserError: Names the two adapters.
    """
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
        store_at(config.run_dir).replace(ORIGIN_FILE, [text.encode()])


def pinned_origin(config: Config) -> Origin | None:
    """Return the origin that was recorded for the present ``model.resume_from``; ``None`` if none was.

    Raises:
        UnnamedServerError: It is on a server that only the record names.
    """
    try:
        fields = from_json(read_bytes(store_at(config.run_dir), ORIGIN_FILE))
        found = Origin(reference=fields["asked"], location=fields["location"], step=fields["step"])
    except (OSError, ValueError, TypeError, KeyError):
        return None
    if found.reference != config.model.resume_from:
        return None
    refuse_server(found.location, f"location of {config.run_dir / ORIGIN_FILE}", named_by(config), _WAY_OUT)
    return found


def _step_of(store: Store, reference: RunReference, text: str) -> int:
    """Return the step that a reference means, or raise `UserError`."""
    committed = nameable(store)
    steps = tuple(committed)
    if not steps:
        raise UserError(f"{SETTING}={text!r}: {reference.location} holds no checkpoint; name a run that does")
    if reference.which == "latest":
        return steps[-1]
    if reference.which == "best":
        unknown = unreadable(committed)
        if unknown:
            raise UserError(
                f"{SETTING}={text!r}: the best checkpoint can't be determined, since the metrics of step "
                f"{_listed(unknown)} can't be read; repair it, or name a step: {_listed(steps)}"
            )
        best = best_of(committed)
        if best is None:
            raise UserError(f"{SETTING}={text!r}: none of its checkpoints has a loss; name a step: {_listed(steps)}")
        return best
    if reference.which not in steps:
        raise UserError(f"{SETTING}={text!r}: there is no checkpoint of that step; there are {_listed(steps)}")
    return reference.which


def _listed(steps: tuple[int, ...]) -> str:
    return ", ".join(map(str, steps))
