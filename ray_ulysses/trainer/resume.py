"""Chooses and loads the state that an attempt starts from: the run's newest whole one, another run's, or none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ray_ulysses.checkpoint import (
    CheckpointError,
    Damage,
    DamagedCheckpointError,
    FencedError,
    Manifest,
    load_parts,
    set_aside,
)
from ray_ulysses.checkpoint.errors import UnreadableCheckpointError
from ray_ulysses.checkpoint.fence import is_overtaken, start_attempt
from ray_ulysses.checkpoint.load import verify_rest
from ray_ulysses.checkpoint.state import begun_anew
from ray_ulysses.config.reference_to_checkpoint import SETTING
from ray_ulysses.config.resume import resume_fingerprint, settings_that_differ
from ray_ulysses.config.stages import stage_config
from ray_ulysses.data.plan.plan import Cursor
from ray_ulysses.engine.zero_state import import_state
from ray_ulysses.errors import UlyssesError, UserError
from ray_ulysses.logging import get_logger
from ray_ulysses.planner.stages import stage_at
from ray_ulysses.run.recovery import OtherRun, OwnCheckpoints, PeerMemory, RunPosition
from ray_ulysses.run.start_point import start_of
from ray_ulysses.run_names import CONFIG_FILE
from ray_ulysses.storage.patience import Patience

if TYPE_CHECKING:
    from ray_ulysses.checkpoint import TensorPart
    from ray_ulysses.checkpoint.state import StateDescription
    from ray_ulysses.config import Config
    from ray_ulysses.data.plan.plan import Plan
    from ray_ulysses.planner.stages import Stage
    from ray_ulysses.run.recovery import Candidate, RecoverySource
    from ray_ulysses.storage.patience import Waiting
    from ray_ulysses.trainer.context import AttemptContext
    from ray_ulysses.trainer.record import Recorder

T = TypeVar("T")
_log = get_logger(__name__)


class AnotherStageError(CheckpointError):
    """What a stage was to start from is damaged and set aside: the next attempt goes on in a stage before it.

    ``step`` is that of the state that it starts from.
    """

    def __init__(self, stage: str, step: int) -> None:
        super().__init__(
            f"the state that stage {stage!r} was to start from is damaged; the next attempt starts from step {step}, "
            "in the stage before"
        )
        self.step = step


@dataclass(frozen=True, kw_only=True, slots=True)
class StartingState:
    """The state that an attempt starts from, chosen before there is a model, and where to look if it is damaged."""

    plan: Plan
    """The run's whole plan."""
    stage: Stage
    """The stage that follows the state."""
    own: Sequence[RecoverySource]
    """Sources of the run's own states, the nearest first."""
    other: RecoverySource
    """The source for a run that has none."""
    memory: PeerMemory | None
    """The one of `own` that offers states in the memory of peers, if there is such memory."""
    passed: tuple[Damage, ...]
    """Checkpoints that were passed over."""
    chosen: Candidate | None
    """The state; None for a start at step 0 with initial weights."""

    @property
    def step(self) -> int:
        """Completed steps of the run once the state is loaded."""
        return 0 if self.chosen is None else self.chosen.position.step

    @property
    def description(self) -> StateDescription | None:
        """The description of the state, which names every weight of the model that it fills."""
        return None if self.chosen is None else self.chosen.state


def find_state(plan: Plan, context: AttemptContext, recorder: Recorder) -> StartingState:
    """Choose the newest whole state, of which nothing is read yet but the manifest; every rank must call.

    Raises:
        UserError: The checkpoint belongs to another configuration or plan.
        CheckpointError: None can be used, and there should be one.
    """
    recorder.phase("looking for a checkpoint", "load")
    memory = None if context.vault is None else PeerMemory(run=context.run, store=context.vault.store)
    stored = OwnCheckpoints(run=context.run, patience=_patience(context))
    own: tuple[RecoverySource, ...] = (stored,) if memory is None else (memory, stored)
    first, other = stage_at(context.run.config, plan, 0), OtherRun(run=context.run, plan=plan)
    start = StartingState(plan=plan, stage=first, own=own, other=other, memory=memory, passed=(), chosen=None)
    passed: list[Damage] = []
    chosen = _choose_fitting(start, context, passed)
    start = replace(start, passed=tuple(passed), chosen=chosen)
    return replace(start, stage=stage_at(context.run.config, plan, start.step))


def resume(engine: Any, start: StartingState, context: AttemptContext, recorder: Recorder) -> RunPosition:
    """Load the chosen state into the engine of its stage and return where the run is; every rank must call.

    Only sizes are checked beforehand, since every byte is verified while it is loaded. A checkpoint that turns out to
    be damaged is set aside with its reason and the previous one is taken. A run of which no checkpoint is whole does
    not restart from step 0, and nothing of it is changed.

    Raises:
        UserError: The checkpoint belongs to another configuration or plan.
        CheckpointError: None could be loaded, and there should be one.
        AnotherStageError: The one that could be is of a stage before the engine's.
        FencedError: A newer attempt has taken the run over.
    """
    patience = _patience(context)
    chosen, passed = start.chosen, list(start.passed)
    waiting: Waiting | None = None
    while chosen is not None:
        step, is_own = chosen.step, chosen.source != start.other.name
        in_memory = start.memory if start.memory is not None and chosen.source == start.memory.name else None
        place = " from peer memory" if in_memory else "" if is_own else " of another run"
        recorder.phase(f"loading step {step}{place}", "load")
        try:
            _load(engine, _as_stage_begins(chosen, start.stage), context, verify_all=is_own)
            break
        except DamagedCheckpointError as error:
            if in_memory is not None:
                in_memory.give_up(step, str(error))
            elif not is_own:
                reference = context.run.config.model.resume_from
                raise UserError(
                    f"{SETTING}={reference!r}: the checkpoint of step {step} is damaged ({error}); name another step"
                ) from error
            else:
                _pass_over(context, passed, Damage(step=step, reason=str(error), attempt=chosen.manifest.attempt))
        except UnreadableCheckpointError as error:
            if not is_own:
                raise
            waiting = waiting or patience.begin()
            attempt = chosen.manifest.attempt
            if in_memory is not None:
                in_memory.give_up(step, str(error))
            # Rank 0 waits for all, since the ranks' clocks differ.
            elif not _on_rank_0(context, waiting.pause):
                _pass_over(context, passed, Damage(step=step, reason=str(error), kind="unreadable", attempt=attempt))
        chosen = _choose_fitting(start, context, passed)
        if chosen is None:
            # The engine was built without weights, and holds a part of that state.
            raise CheckpointError(
                "the state in peer memory could not be loaded whole, and there is no checkpoint on storage yet; the "
                "next attempt starts from step 0"
            )
        if stage_at(context.run.config, start.plan, chosen.position.step).number != start.stage.number:
            # What was found damaged is set aside, so that the next attempt does not choose it again.
            _start(context, recorder, chosen.step, passed)
            raise AnotherStageError(start.stage.name, chosen.step)
    position = RunPosition() if chosen is None else chosen.position
    _start(context, recorder, position.step, passed)
    return position


def _as_stage_begins(chosen: Candidate, stage: Stage) -> Candidate:
    """Return a state without the optimizer's moments where a stage begins with it and has none of them."""
    if not stage.begins_anew or chosen.position.step != stage.first_step:
        return chosen
    return replace(chosen, state=begun_anew(chosen.state, with_optimizer=False))


def _patience(context: AttemptContext) -> Patience:
    return Patience(wait_s=5.0, first_pause_s=1.0, clock=context.worker.clock)


def _choose_fitting(start: StartingState, context: AttemptContext, passed: list[Damage]) -> Candidate | None:
    """Choose as `_choose` does; a state in peer memory that does not fit the configuration is passed over."""
    while True:
        chosen = _choose(start.own, start.other, context, passed)
        if chosen is None or chosen.source == start.other.name:
            return chosen
        try:
            _check_own(chosen, context.run.config, start.plan)
            return chosen
        except UserError as error:
            if start.memory is None or chosen.source != start.memory.name:
                raise
            start.memory.pass_over(chosen.step, str(error))


def _choose(
    own: Sequence[RecoverySource], other: RecoverySource, context: AttemptContext, passed: list[Damage]
) -> Candidate | None:
    """Return rank 0's choice on every rank, or None for a start at step 0; every rank must call.

    ``own`` has the nearest source first, and rank 0 adds to ``passed`` what it passes over.

    Raises:
        CheckpointError: The storage can't be read, or there is nothing whole where there should be.
        UserError: The other run's state can't be used.
    """

    def choose() -> tuple[str, str, bytes] | None:
        candidates: list[Candidate] = []
        try:
            for source in own:
                offered, damaged = source.candidates([damage.step for damage in passed])
                candidates += offered
                for damage in damaged:
                    _pass_over(context, passed, damage)
            start = start_of(context.run, [candidate.step for candidate in candidates], passed)
        except OSError as error:
            raise CheckpointError(
                f"the checkpoints of the run can't be read ({error}); repair the storage, then start again"
            ) from error
        if start.refusal is not None:
            raise CheckpointError(start.refusal)
        fitting = [candidate for candidate in candidates if candidate.step == start.resumes_from]
        chosen = next(iter(fitting or other.candidates(())[0]), None)
        # The file and not the object: a large world's takes longer to pickle than to read.
        return None if chosen is None else (chosen.source, chosen.location, chosen.manifest.to_bytes())

    found = _on_rank_0(context, choose)
    if found is None:
        return None
    name, location, content = found
    source = next(source for source in (*own, other) if source.name == name)
    return source.open(location, Manifest.from_bytes(content))


def _on_rank_0(context: AttemptContext, do: Callable[[], T]) -> T:
    """Return rank 0's result on every rank, and raise there what it raises; every rank must call."""
    result: T | None = None
    failure: UlyssesError | None = None
    if context.rank == 0:
        try:
            result = do()
        except UlyssesError as error:
            failure = error
    result, failure = context.exchange.broadcast((result, failure))
    if failure is not None:
        raise failure
    return cast("T", result)


def _load(engine: Any, chosen: Candidate, context: AttemptContext, *, verify_all: bool) -> None:
    """Load a state, and verify the rest of its checkpoint if asked to; every rank must call."""
    store, manifest, exchange = chosen.store, chosen.manifest, context.exchange
    loaded: set[str] = set()

    def fill(parts: Sequence[TensorPart]) -> int:
        loaded.update(part.key for part in parts)
        return load_parts(store, manifest, parts, exchange=exchange)

    import_state(engine, chosen.state, fill)
    if verify_all:
        verify_rest(store, manifest, loaded, rank=context.rank, world_size=len(context.nodes), exchange=exchange)


def _pass_over(context: AttemptContext, passed: list[Damage], damage: Damage) -> None:
    """Note that a checkpoint is not used; it is set aside once the attempt has a state to start from."""
    passed.append(damage)
    if context.rank == 0:
        _log.warning("%s", damage)


def _start(context: AttemptContext, recorder: Recorder, step: int, passed: Sequence[Damage]) -> None:
    """Set aside what was passed over and announce where the attempt starts; every rank must call."""
    store, attempt = context.run.store, context.attempt

    def announce() -> None:
        try:
            if is_overtaken(store, attempt):
                raise FencedError(
                    f"a newer attempt than attempt {attempt} has taken the run over; nothing needs to be done, this "
                    "attempt ends"
                )
            for damage in passed:
                _set_aside(context, recorder, damage)
            start_attempt(store, attempt, step)
        except OSError as error:
            raise CheckpointError(
                f"attempt {attempt} could not be announced ({error}); free space or repair the storage of the "
                "checkpoints, then start the same command again"
            ) from error

    _on_rank_0(context, announce)
    if context.rank == 0:
        try:
            recorder.checkpoints_found()
        except OSError as error:
            _log.warning("the checkpoints could not be listed for the trackers (%s)", error)


def _set_aside(context: AttemptContext, recorder: Recorder, damage: Damage) -> None:
    """Move a checkpoint out of the way, and record it."""
    try:
        set_aside(context.run.store, damage, attempt=context.attempt)
    except OSError as error:
        # Once the attempt has announced where it starts, it is no longer part of the run all the same.
        _log.warning("the checkpoint of step %d can't be set aside (%s); it is passed over", damage.step, error)
    recorder.checkpoint_set_aside(damage)


def _check_own(chosen: Candidate, config: Config, plan: Plan) -> None:
    """Refuse a state that was saved under other settings."""
    meta = chosen.manifest.meta
    if config.stages:
        # That of the stage whose last step the state holds.
        config = stage_config(config, plan.stage_of_step(max(chosen.step, 1)))
    if meta.config_fingerprint != resume_fingerprint(config):
        differences = settings_that_differ(meta.extra.get("settings", {}), config)
        raise UserError(
            f"the checkpoint of step {chosen.step} was written under another configuration than "
            f"{config.run_dir / CONFIG_FILE} ({differences}); "
            "restore that file, or start a new run under another run.name"
        )
    plan.check_cursor(Cursor.from_json(dict(meta.cursor)))
