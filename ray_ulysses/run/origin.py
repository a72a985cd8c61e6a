"""The other run's checkpoint that a run starts from: found once by the driver and pinned in the run's directory."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic_core import from_json

from ray_ulysses.checkpoint import Manifest
from ray_ulysses.checkpoint.choice import Damage, committed_steps, examine
from ray_ulysses.checkpoint.resolve_reference import best_of, nameable, unreadable
from ray_ulysses.config.reference_to_checkpoint import SETTING, MlflowReference, RunReference, parse_reference
from ray_ulysses.config.resume import resume_fingerprint, settings_that_differ
from ray_ulysses.data.plan.cursor import Cursor
from ray_ulysses.errors import UserError
from ray_ulysses.run.checkpoint_store import checkpoints_of, storage_answers
from ray_ulysses.run_names import ORIGIN_FILE
from ray_ulysses.storage.local import LocalStore
from ray_ulysses.storage.opening import open_store
from ray_ulysses.storage.store import read_bytes
from ray_ulysses.tracking.checkpoint_lookup import find_checkpoint

if TYPE_CHECKING:
    from ray_ulysses.config import Config
    from ray_ulysses.data.plan.plan import Plan
    from ray_ulysses.storage import Store


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """The checkpoint that a run starts from.

    Attributes:
        asked: ``model.resume_from`` as it was when it was found.
        location: Root of its store, a path or a URI.
        step: Its step.
    """

    asked: str
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
    asked = config.model.resume_from
    if asked is None:
        return None
    reference = parse_reference(asked)
    if isinstance(reference, MlflowReference):
        uri = config.tracking_uri
        if uri is None:
            raise UserError(f"{SETTING}={asked!r}: tracking.enabled is false, so no MLflow is named; set tracking.uri")
        tracked = find_checkpoint(reference.run, reference.which, uri=uri)
        return Origin(asked=asked, location=tracked.store, step=tracked.step)
    location = checkpoints_of(reference.location)
    with storage_answers(location):
        return Origin(asked=asked, location=location, step=_step_of(open_store(location), reference, asked))


def check_origin(origin: Origin, config: Config, plan: Plan) -> Manifest:
    """Return the manifest of a checkpoint that a run may start from; reads no weights.

    Raises:
        UserError: It is not there or not whole, or ``resume_state=all`` and it is of a run of other settings or data.
    """
    with storage_answers(origin.location):
        store = open_store(origin.location)
        if not is_there(origin):
            there = _listed(tuple(nameable(store))) or "none"
            raise UserError(
                f"{SETTING}={origin.asked!r}: the checkpoint of step {origin.step} should be in {origin.location}, and "
                f"is not (there: {there}); mount or restore that place, or name where the run lies now, as in "
                f"/path/of/the/run@{origin.step}"
            )
        found = examine(store, origin.step, "sizes")
    if isinstance(found, Damage):
        raise UserError(f"{SETTING}={origin.asked!r}: {found}; name another step")
    if config.model.resume_state != "all":
        return found
    other = "set model.resume_state to weights or optimizer to begin a run of its own with it"
    if found.meta.config_fingerprint != resume_fingerprint(config):
        differences = settings_that_differ(found.meta.extra.get("settings", {}), config)
        raise UserError(
            f"{SETTING}={origin.asked!r}: the checkpoint of step {found.step} of run {found.meta.run!r} was written "
            f"under other settings ({differences or 'by a version that did not note them'}), so the run can't go on "
            f"with it; restore them, or {other}"
        )
    try:
        plan.check_cursor(Cursor.from_json(dict(found.meta.cursor)))
    except UserError as error:
        raise UserError(f"{SETTING}={origin.asked!r}: {error}; or {other}") from error
    return found


def is_there(origin: Origin) -> bool:
    """Return whether the checkpoint of an origin is committed where it should be.

    Raises:
        OSError: The storage can't be listed.
    """
    return origin.step in committed_steps(open_store(origin.location))


def pin_origin(config: Config, origin: Origin | None) -> None:
    """Write down what a run starts from, so that every attempt starts from the same; the driver calls it."""
    if origin is not None:
        text = json.dumps({"asked": origin.asked, "location": origin.location, "step": origin.step})
        LocalStore(config.run_dir).replace(ORIGIN_FILE, [text.encode()])


def pinned_origin(config: Config) -> Origin | None:
    """Return what was written down for the present ``model.resume_from``; ``None`` if nothing was."""
    try:
        found = Origin(**from_json(read_bytes(LocalStore(config.run_dir), ORIGIN_FILE)))
    except (OSError, ValueError, TypeError):
        return None
    return found if found.asked == config.model.resume_from else None


def _step_of(store: Store, reference: RunReference, asked: str) -> int:
    """Return the step that a reference means.

    Raises:
        UserError: The run has no such checkpoint.
    """
    committed = nameable(store)
    steps = tuple(committed)
    if not steps:
        raise UserError(f"{SETTING}={asked!r}: {reference.location} holds no checkpoint; name a run that does")
    if reference.which == "latest":
        return steps[-1]
    if reference.which == "best":
        unknown = unreadable(committed)
        if unknown:
            raise UserError(
                f"{SETTING}={asked!r}: the best checkpoint can't be told, since the numbers of step {_listed(unknown)} "
                f"can't be read; repair it, or name a step: {_listed(steps)}"
            )
        best = best_of(committed)
        if best is None:
            raise UserError(f"{SETTING}={asked!r}: none of its checkpoints has a loss; name a step: {_listed(steps)}")
        return best
    if reference.which not in steps:
        raise UserError(f"{SETTING}={asked!r}: there is no checkpoint of that step; there are {_listed(steps)}")
    return reference.which


def _listed(steps: tuple[int, ...]) -> str:
    return ", ".join(map(str, steps))
