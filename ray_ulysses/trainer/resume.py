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
from ray_ulysses.engine.zero_state import import_state
from ray_ulysses.errors import UlyssesError, UserError
from ray_ulysses.logging import get_logger
from ray_ulysses.planner.stages import stage_at
from ray_ulysses.run.start_point import RecoverySources, RunPosition
from ray_ulysses.storage.retry import RetryPolicy

if TYPE_CHECKING:
    from ray_ulysses.checkpoint import TensorPart
    from ray_ulysses.checkpoint.state import StateDescription
    from ray_ulysses.data.plan.plan import Plan
    from ray_ulysses.planner.stages import Stage
    from ray_ulysses.run.start_point import Candidate, Source
    from ray_ulysses.storage.retry import Waiting
    from ray_ulysses.trainer.context import AttemptContext
    from ray_ulysses.trainer.record import Recorder

T = TypeVar("T")
_log = get_logger(__name__)


class AnotherStageError(CheckpointError):
    """The starting state of a stage is damaged and set aside: the next attempt continues in an earlier stage.

    ``step`` is the step of the state that it starts from.
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

    sources: RecoverySources
    """The candidates."""
    stage: Stage
    """The stage that follows the state."""
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
    """Choose the newest whole state, reading only its manifest; every rank must call.

    Raises:
        UserError: The checkpoint belongs to another configuration or plan.
        CheckpointError: No state can be used, although the run has saved one.
    """
    recorder.phase("looking for a checkpoint", "load")
    memory = None if context.peer_memory is None else context.peer_memory.store
    retry = RetryPolicy(wait_s=5.0, first_pause_s=1.0, clock=context.worker.clock)
    sources = RecoverySources(run=context.run, plan=plan, memory=memory, retry=retry)
    chosen = _choose(sources, context)
    step = 0 if chosen is None else chosen.position.step
    return StartingState(sources=sources, stage=stage_at(context.run.config, plan, step), chosen=chosen)


def resume(engine: Any, start: StartingState, context: AttemptContext, recorder: Recorder) -> RunPosition:
    """Load the chosen state into the engine of its stage and return where the run is; every rank must call.

    Only sizes are checked beforehand, since every byte is verified while it is loaded. A checkpoint that turns out to
    be damaged is set aside with its reason and the previous one is taken. A run of which no checkpoint is whole does
    not restart from step 0, and nothing of it is changed.

    Raises:
        UserError: The checkpoint belongs to another configuration or plan.
        CheckpointError: No state could be loaded, although the run has saved one.
        AnotherStageError: The newest usable state belongs to a stage before the engine's.
        FencedError: A newer attempt has taken the run over.
    """
    sources, chosen = start.sources, start.chosen
    waiting: Waiting | None = None
    while chosen is not None:
        step, source = chosen.step, chosen.source
        place = {"storage": "", "peer memory": " from peer memory", "another run": " of another run"}[source]
        recorder.phase(f"loading step {step}{place}", "load")
        try:
            _load(engine, _as_stage_begins(chosen, start.stage), context, verify_all=source != "another run")
            break
        except DamagedCheckpointError as error:
            if source == "peer memory":
                sources.give_up_memory(step, str(error))
            elif source == "another run":
                reference = context.run.config.model.resume_from
                raise UserError(
                    f"{SETTING}={reference!r}: the checkpoint of step {step} is damaged ({error}); name another step"
                ) from error
            elif context.rank == 0:
                sources.pass_over(Damage(step=step, reason=str(error), attempt=chosen.manifest.attempt))
        except UnreadableCheckpointError as error:
            if source == "another run":
                raise
            waiting = waiting or sources.retry.begin()
            attempt = chosen.manifest.attempt
            if source == "peer memory":
                sources.give_up_memory(step, str(error))
            # Rank 0 waits for all, since the ranks' clocks differ.
            elif not _on_rank_0(context, waiting.pause) and context.rank == 0:
                sources.pass_over(Damage(step=step, reason=str(error), kind="unreadable", attempt=attempt))
        chosen = _choose(sources, context)
        if chosen is None:
            # The engine was built without weights, and holds a part of that state.
            raise CheckpointError(
                "the state in peer memory could not be loaded whole, and there is no checkpoint on storage yet; the "
                "next attempt starts from step 0"
            )
        if stage_at(context.run.config, sources.plan, chosen.position.step).number != start.stage.number:
            # What was found damaged is set aside, so that the next attempt does not choose it again.
            _start(context, recorder, chosen.step, sources.passed)
            raise AnotherStageError(start.stage.name, chosen.step)
    position = RunPosition() if chosen is None else chosen.position
    _start(context, recorder, position.step, sources.passed)
    return position


def _as_stage_begins(chosen: Candidate, stage: Stage) -> Candidate:
    """Return the state, without the optimizer's moments if a stage that resets them begins with it."""
    if not stage.begins_anew or chosen.position.step != stage.first_step:
        return chosen
    return replace(chosen, state=begun_anew(chosen.state, with_optimizer=False))


def _choose(sources: RecoverySources, context: AttemptContext) -> Candidate | None:
    """Return rank 0's choice on every rank, or None for a start at step 0; every rank must call."""

    def choose() -> tuple[Source, str, bytes] | None:
        found = sources.choose()
        # The file and not the object: a large world's takes longer to pickle than to read.
        return None if found is None else (found[0], found[1], found[2].to_bytes())

    found = _on_rank_0(context, choose)
    return None if found is None else sources.open(found[0], found[1], Manifest.from_bytes(found[2]))


def _on_rank_0(context: AttemptContext, do: Callable[[], T]) -> T:
    """Return rank 0's result, or raise its error, on every rank; every rank must call."""
    result: T | None = None
    failure: UlyssesError | None = None
    if context.rank == 0:
        try:
            result = do()
        except UlyssesError as error:
            failure = error
        except Exception as error:
            # Such as from a foreign manifest: the other ranks would wait for this one.
            failure = CheckpointError(f"rank 0 can't read the run's states ({type(error).__name__}: {error})")
    result, failure = context.messenger.broadcast((result, failure))
    if failure is not None:
        raise failure
    return cast("T", result)


def _load(engine: Any, chosen: Candidate, context: AttemptContext, *, verify_all: bool) -> None:
    """Load a state, and with ``verify_all`` verify the rest of its checkpoint; every rank must call."""
    store, manifest, messenger = chosen.store, chosen.manifest, context.messenger
    loaded: set[str] = set()

    def fill(parts: Sequence[TensorPart]) -> int:
        loaded.update(part.key for part in parts)
        return load_parts(store, manifest, parts, messenger=messenger)

    import_state(engine, chosen.state, fill)
    if verify_all:
        verify_rest(store, manifest, loaded, rank=context.rank, world_size=len(context.nodes), messenger=messenger)


def _start(context: AttemptContext, recorder: Recorder, step: int, passed: Sequence[Damage]) -> None:
    """Set aside unusable checkpoints and announce where the attempt starts; every rank must call."""
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
    try:
        set_aside(context.run.store, damage, attempt=context.attempt)
    except OSError as error:
        # Once the attempt has announced where it starts, the checkpoint is no longer part of the run anyway.
        _log.warning("the checkpoint of step %d can't be set aside (%s); it is passed over", damage.step, error)
    recorder.checkpoint_set_aside(damage)
