"""Where an attempt starts: the run's newest whole checkpoint, another run's, or the beginning."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

from ray_ulysses.checkpoint import (
    CheckpointError,
    Damage,
    DamagedCheckpointError,
    FencedError,
    Manifest,
    load_parts,
    newest_committed,
    set_aside,
)
from ray_ulysses.checkpoint.choice import committed_steps
from ray_ulysses.checkpoint.errors import UnreadableCheckpointError
from ray_ulysses.checkpoint.fence import is_overtaken, start_attempt
from ray_ulysses.checkpoint.load import verify_rest
from ray_ulysses.checkpoint.state import begun_anew
from ray_ulysses.config.reference_to_checkpoint import SETTING
from ray_ulysses.config.resume import resume_fingerprint, settings_that_differ
from ray_ulysses.data.plan.cursor import Cursor
from ray_ulysses.engine.zero_state import import_state
from ray_ulysses.errors import UserError
from ray_ulysses.logging import get_logger
from ray_ulysses.run.origin import check_origin, pinned_origin
from ray_ulysses.run.start_point import why_no_start
from ray_ulysses.run_names import CONFIG_FILE
from ray_ulysses.storage.opening import open_store
from ray_ulysses.tracking.events import TakenOver
from ray_ulysses.trainer.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ray_ulysses.checkpoint import Choice, TensorPart
    from ray_ulysses.config import Config
    from ray_ulysses.data.plan.plan import Plan
    from ray_ulysses.trainer.context import AttemptContext
    from ray_ulysses.trainer.record import Recorder

_log = get_logger(__name__)
_PAUSES_S = (1.0, 4.0)
"""Between two looks at checkpoints of which one can't be read, in seconds."""


def resume(engine: Any, plan: Plan, context: AttemptContext, recorder: Recorder) -> Progress:
    """Put the newest whole checkpoint into the engine and say where the attempt starts; every rank must call.

    Only sizes are looked at beforehand, since every byte is verified while it is loaded. A checkpoint that turns out to
    be damaged is set aside with its reason and the one before is taken. A run of which no checkpoint is whole does not
    begin anew, and nothing of it is changed.

    Raises:
        UserError: The checkpoint belongs to another configuration or plan.
        CheckpointError: None could be loaded, and there should be one.
        FencedError: A newer attempt has taken the run over.
    """
    recorder.phase("looking for a checkpoint")
    passed: list[Damage] = []
    tries = 0
    while True:
        manifest = _choose(context, passed)
        if manifest is None:
            progress = _begin(engine, plan, context, recorder)
            break
        _check_origin(manifest, context.config, plan)
        recorder.phase(f"loading step {manifest.step}")
        try:
            _load(engine, manifest, context)
        except DamagedCheckpointError as error:
            _pass_over(context, passed, Damage(step=manifest.step, reason=str(error), attempt=manifest.attempt))
            continue
        except UnreadableCheckpointError as error:
            if tries < len(_PAUSES_S):
                time.sleep(_PAUSES_S[tries])
                tries += 1
                continue
            if not _has_older(context, manifest.step):
                raise
            damage = Damage(step=manifest.step, reason=str(error), kind="unreadable", attempt=manifest.attempt)
            _pass_over(context, passed, damage)
            continue
        progress = _progress_of(manifest, manifest.ref.folder)
        break
    _start(context, recorder, progress.step, passed)
    return progress


def _load(engine: Any, manifest: Manifest, context: AttemptContext) -> None:
    """Load a checkpoint, and see that the rest of it is whole, too; every rank must call.

    Raises:
        DamagedCheckpointError: A byte of it is not what was written; the engine may hold some of it by now.
        UnreadableCheckpointError: The storage does not give all of it.
    """
    store, exchange = context.store, context.exchange
    loaded: set[str] = set()

    def fill(parts: Sequence[TensorPart]) -> int:
        loaded.update(part.key for part in parts)
        return load_parts(store, manifest, parts, exchange=exchange)

    import_state(engine, manifest.state, fill)
    verify_rest(store, manifest, loaded, rank=context.rank, world_size=len(context.nodes), exchange=exchange)


def _choose(context: AttemptContext, passed: list[Damage]) -> Manifest | None:
    """Return rank 0's choice on every rank; on rank 0, what it passes over is added to what was passed over before.

    Raises:
        CheckpointError: The storage does not give what is there, or there is nothing whole where there should be;
            every rank raises it.
    """
    chosen: Manifest | None = None
    problem: str | None = None
    if context.rank == 0:
        try:
            choice = _patient_choice(context, [damage.step for damage in passed])
            chosen = choice.manifest
            for damage in choice.damaged:
                _pass_over(context, passed, damage)
            problem = why_no_start(context.config, context.store, chosen, passed)
        except OSError as error:
            problem = f"the checkpoints of the run can't be read ({error}); repair the storage, then start again"
    # The file and not the object: a large world's takes longer to pickle than to read.
    content, problem = context.exchange.broadcast((chosen.to_bytes() if chosen is not None else None, problem))
    if problem is not None:
        raise CheckpointError(problem)
    if content is None or chosen is not None:
        return chosen
    return Manifest.from_bytes(content)


def _has_older(context: AttemptContext, step: int) -> bool:
    """Whether a checkpoint before a step is whole, as far as sizes tell; the same on every rank.

    Raises:
        CheckpointError: The storage does not say; every rank raises it.
    """
    older: bool | None = None
    problem: str | None = None
    if context.rank == 0:
        try:
            newer = [one for one in committed_steps(context.store) if one >= step]
            older = newest_committed(context.store, "sizes", unless=newer).manifest is not None
        except OSError as error:
            problem = f"the checkpoints of the run can't be read ({error}); repair the storage, then start again"
    older, problem = context.exchange.broadcast((older, problem))
    if problem is not None:
        raise CheckpointError(problem)
    return bool(older)


def _patient_choice(context: AttemptContext, known: Sequence[int]) -> Choice:
    """Choose, and choose again a few times while something newer can't be read: an outage may be short."""
    for pause_s in _PAUSES_S:
        chosen = newest_committed(context.store, "sizes", unless=known)
        if not any(damage.kind == "unreadable" for damage in chosen.damaged):
            return chosen
        _log.warning("%s; looking again in %g s", chosen.damaged[0], pause_s)
        time.sleep(pause_s)
    return newest_committed(context.store, "sizes", unless=known)


def _pass_over(context: AttemptContext, passed: list[Damage], damage: Damage) -> None:
    """Note that a checkpoint is not used; it is set aside once another one is, or nothing has to be."""
    passed.append(damage)
    if context.rank == 0:
        _log.warning("%s", damage)


def _start(context: AttemptContext, recorder: Recorder, step: int, passed: Sequence[Damage]) -> None:
    """Set aside what was passed over and announce from where the attempt starts; every rank must call.

    Raises:
        FencedError: A newer attempt has been claimed meanwhile; nothing was changed.
        CheckpointError: The storage could not be written.
    """
    problem: str | None = None
    is_fenced = False
    if context.rank == 0:
        try:
            is_fenced = is_overtaken(context.store, context.attempt)
            if not is_fenced:
                for damage in passed:
                    _set_aside(context, recorder, damage)
                start_attempt(context.store, context.attempt, step)
        except OSError as error:
            problem = (
                f"attempt {context.attempt} could not be announced ({error}); make room or repair the storage of the "
                "checkpoints, then start the same command again"
            )
    problem, is_fenced = context.exchange.broadcast((problem, is_fenced))
    if is_fenced:
        raise FencedError(
            f"a newer attempt than attempt {context.attempt} has taken the run over; nothing is to be done, this "
            "attempt ends"
        )
    if problem is not None:
        raise CheckpointError(problem)
    if context.rank == 0:
        try:
            recorder.checkpoints_found()
        except OSError as error:
            _log.warning("the tracker is not told which checkpoints there are: they can't be listed (%s)", error)


def _set_aside(context: AttemptContext, recorder: Recorder, damage: Damage) -> None:
    """Take a checkpoint out of the way, and say so."""
    try:
        set_aside(context.store, damage, attempt=context.attempt)
    except OSError as error:
        # Once the attempt has said where it starts, it is no longer part of the run all the same.
        _log.warning("the checkpoint of step %d can't be set aside (%s); it is passed over", damage.step, error)
    recorder.checkpoint_set_aside(damage)


def _check_origin(manifest: Manifest, config: Config, plan: Plan) -> None:
    """Refuse a checkpoint of another run.

    Raises:
        UserError: It was written under another configuration, or its place is not in the plan.
    """
    if manifest.meta.config_fingerprint != resume_fingerprint(config):
        differences = settings_that_differ(manifest.meta.extra.get("settings", {}), config)
        raise UserError(
            f"the checkpoint of step {manifest.step} was written under another configuration than "
            f"{config.run_dir / CONFIG_FILE} says ({differences or 'by a version that did not note its own'}); "
            "restore that file, or start a new run under another run.name"
        )
    plan.check_cursor(Cursor.from_json(dict(manifest.meta.cursor)))


def _begin(engine: Any, plan: Plan, context: AttemptContext, recorder: Recorder) -> Progress:
    """Start without a checkpoint of the run's own: from another run's, or at the beginning; every rank must call.

    Raises:
        UserError: It can't be used; the text names another way.
        CheckpointError: It can't be read.
    """
    config = context.config
    if config.model.resume_from is None:
        return Progress()
    origin = pinned_origin(config) if context.rank == 0 else None
    origin = context.exchange.broadcast(origin)
    if origin is None:
        raise UserError(f"{SETTING}={config.model.resume_from!r} was not looked up; start the run with `train`")
    recorder.phase(f"loading step {origin.step} of another run")
    store = open_store(origin.location)
    manifest = check_origin(origin, config, plan)
    state = manifest.state
    if config.model.resume_state != "all":
        state = begun_anew(state, with_optimizer=config.model.resume_state == "optimizer")
    try:
        import_state(engine, state, partial(load_parts, store, manifest, exchange=context.exchange))
    except DamagedCheckpointError as error:
        raise UserError(
            f"{SETTING}={origin.asked!r}: the checkpoint of step {origin.step} is damaged ({error}); name another step"
        ) from error
    if config.model.resume_state != "all":
        return Progress(resumed_from=str(origin))
    return Progress(
        step=manifest.step,
        digest=int(manifest.meta.digest, 16),
        tokens=manifest.meta.tokens,
        resumed_from=str(origin),
        taken_over=TakenOver(
            step=manifest.step,
            tokens=manifest.meta.tokens,
            rows=int(manifest.meta.cursor["next_row"]),
            digest=int(manifest.meta.digest, 16),
            origin=str(origin),
        ),
    )


def _progress_of(manifest: Manifest, origin: str) -> Progress:
    return Progress(
        step=manifest.step,
        digest=int(manifest.meta.digest, 16),
        tokens=manifest.meta.tokens,
        resumed_from=origin,
    )
