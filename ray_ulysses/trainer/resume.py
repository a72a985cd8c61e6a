"""Where an attempt starts: the run's newest whole checkpoint, another run's, or the beginning."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

from ray_ulysses.checkpoint import (
    CheckpointError,
    Damage,
    DamagedCheckpointError,
    Manifest,
    load_pieces,
    newest_committed,
    set_aside,
)
from ray_ulysses.checkpoint.choice import committed_steps
from ray_ulysses.checkpoint.errors import UnreadableCheckpointError
from ray_ulysses.checkpoint.fence import start_attempt
from ray_ulysses.checkpoint.manifest import CHECKPOINT_FOLDER
from ray_ulysses.config.resume import resume_fingerprint
from ray_ulysses.data.cursor import Cursor
from ray_ulysses.engine.zero_state import import_state
from ray_ulysses.errors import RunError, UserError
from ray_ulysses.logging import get_logger
from ray_ulysses.trainer.progress import Progress
from ray_ulysses.trainer.warm_start import warm_start

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ray_ulysses.checkpoint import Choice
    from ray_ulysses.config import Config
    from ray_ulysses.data.plan import Plan
    from ray_ulysses.trainer.record import Recorder

_log = get_logger(__name__)
_PAUSES_S = (1.0, 4.0)
"""Between two looks at checkpoints of which one can't be read, in seconds."""


def resume(engine: Any, config: Config, plan: Plan, recorder: Recorder) -> Progress:
    """Put the newest whole checkpoint into the engine and say where the attempt starts; every rank must call.

    Only sizes are looked at beforehand, since every byte is verified while it is loaded. A checkpoint that turns out to
    be damaged is set aside with its reason and the one before is taken.

    Raises:
        UserError: The checkpoint belongs to another configuration or plan.
        RunError: None could be loaded; the text says whether to start the command again.
    """
    known: list[int] = []
    tries = 0
    while True:
        choice = _choose(recorder, known)
        manifest = choice.manifest
        if manifest is None:
            progress = _begin(engine, config, plan, recorder, is_touched=bool(known))
            break
        _check_origin(manifest, config, plan)
        try:
            import_state(
                engine, manifest.state, partial(load_pieces, recorder.store, manifest, exchange=recorder.exchange)
            )
        except DamagedCheckpointError as error:
            known.append(manifest.step)
            _pass_over(recorder, Damage(step=manifest.step, reason=str(error)))
            continue
        except UnreadableCheckpointError as error:
            if tries < len(_PAUSES_S):
                time.sleep(_PAUSES_S[tries])
                tries += 1
                continue
            if not _has_older(recorder, manifest.step):
                raise
            known.append(manifest.step)
            _pass_over(recorder, Damage(step=manifest.step, reason=str(error), kind="unreadable"))
            continue
        progress = _progress_of(manifest, manifest.ref.folder)
        break
    if recorder.rank == 0:
        start_attempt(recorder.store, recorder.attempt, progress.step)
        recorder.checkpoints_found()
    return progress


def _choose(recorder: Recorder, known: Sequence[int]) -> Choice:
    """Return rank 0's choice on every rank; whatever it passes over is recorded.

    Raises:
        CheckpointError: The storage does not give what is there; every rank raises it.
    """
    chosen: Choice | None = None
    problem: str | None = None
    if recorder.rank == 0:
        try:
            chosen = _patient_choice(recorder, known)
            problem = _why_not(recorder, chosen)
            if problem is None:
                for damage in chosen.damaged:
                    _pass_over(recorder, damage)
        except OSError as error:
            problem = f"the checkpoints of the run can't be read ({error}); repair the storage, then start again"
    choice, problem = recorder.exchange.broadcast((chosen, problem))
    if problem is not None:
        raise CheckpointError(problem)
    assert choice is not None
    found: Choice = choice
    return found


def _why_not(recorder: Recorder, chosen: Choice) -> str | None:
    """Return why the run may not go on from a choice; to begin anew must not give up a run whose state is there."""
    foreign = [damage for damage in chosen.damaged if damage.kind == "foreign"]
    if foreign:
        return f"{foreign[0]}; nothing was changed"
    if chosen.manifest is not None:
        return None
    unread = [damage for damage in chosen.damaged if damage.kind == "unreadable"]
    if unread:
        return f"no checkpoint of the run can be read: {unread[0]}; repair the storage, then start again"
    if recorder.committed_before() and not recorder.store.list(CHECKPOINT_FOLDER):
        return (
            "the journal knows of committed checkpoints, but where they should be there are none; mount or correct "
            "the storage of the run (checkpoint.storage), or start a new run under another run.name"
        )
    return None


def _has_older(recorder: Recorder, step: int) -> bool:
    """Whether a checkpoint before a step is whole, as far as sizes tell; the same on every rank."""
    older: bool | None = None
    if recorder.rank == 0:
        newer = [one for one in committed_steps(recorder.store) if one >= step]
        older = newest_committed(recorder.store, "sizes", unless=newer).manifest is not None
    return bool(recorder.exchange.broadcast(older))


def _patient_choice(recorder: Recorder, known: Sequence[int]) -> Choice:
    """Choose, and choose again a few times while something newer can't be read: an outage may be short."""
    for pause_s in _PAUSES_S:
        chosen = newest_committed(recorder.store, "sizes", unless=known)
        if not any(damage.kind == "unreadable" for damage in chosen.damaged):
            return chosen
        _log.warning("%s; looking again in %g s", chosen.damaged[0], pause_s)
        time.sleep(pause_s)
    return newest_committed(recorder.store, "sizes", unless=known)


def _pass_over(recorder: Recorder, damage: Damage) -> None:
    """Set a checkpoint aside on rank 0, and say so."""
    if recorder.rank != 0:
        return
    _log.warning("%s", damage)
    set_aside(recorder.store, damage, attempt=recorder.attempt)
    recorder.checkpoint_set_aside(damage)


def _check_origin(manifest: Manifest, config: Config, plan: Plan) -> None:
    """Refuse a checkpoint of another run.

    Raises:
        UserError: It was written under another configuration, or its place is not in the plan.
    """
    if manifest.meta.config_fingerprint != resume_fingerprint(config):
        raise UserError(
            f"the checkpoint of step {manifest.step} was written under another configuration than "
            f"{config.run_dir / 'config.yaml'} says; restore that file, or start a new run under another run.name"
        )
    plan.check_cursor(Cursor.from_json(dict(manifest.meta.cursor)))


def _begin(engine: Any, config: Config, plan: Plan, recorder: Recorder, *, is_touched: bool) -> Progress:
    """Start without a checkpoint of the run's own: from another run's, or at the beginning.

    Raises:
        RunError: A damaged checkpoint has been read into the engine already, and there is no other.
    """
    if config.model.resume_from is not None:
        return warm_start(engine, config, plan, recorder)
    if is_touched:
        raise RunError(
            "no checkpoint of the run is whole, and weights have been overwritten by one that is not; what was "
            "damaged is set aside. The next attempt begins at the first step: start the same command again"
        )
    return Progress()


def _progress_of(manifest: Manifest, origin: str) -> Progress:
    return Progress(
        step=manifest.step,
        digest=int(manifest.meta.digest, 16),
        tokens=manifest.meta.tokens,
        resumed_from=origin,
    )
