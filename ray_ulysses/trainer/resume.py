"""Selects and loads an attempt's starting state: the run's newest intact state, another run's state, or none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

from ray_ulysses.checkpoint import (
    CheckpointError,
    Damage,
    DamagedCheckpointError,
    FencedError,
    Manifest,
    TensorPart,
    load_parts,
    set_aside,
)
from ray_ulysses.checkpoint.errors import UnreadableCheckpointError
from ray_ulysses.checkpoint.fence import is_overtaken, start_attempt
from ray_ulysses.checkpoint.load import verify_rest
from ray_ulysses.checkpoint.state import StateDescription, begun_anew
from ray_ulysses.config.reference_to_checkpoint import SETTING
from ray_ulysses.data.plan.plan import Plan
from ray_ulysses.engine.zero_state import import_state
from ray_ulysses.errors import UlyssesError, UserError
from ray_ulysses.logging import get_logger
from ray_ulysses.planner.stages import Stage, stage_at
from ray_ulysses.run.early_stopping import EarlyStopping
from ray_ulysses.run.start_point import Candidate, RecoverySources, RunPosition, Source
from ray_ulysses.storage.retry import RetryPolicy, Waiting
from ray_ulysses.tracking.journal_reader import read_entries
from ray_ulysses.trainer.context import AttemptContext
from ray_ulysses.trainer.record import Recorder

T = TypeVar("T")
_log = get_logger(__name__)


class AnotherStageError(CheckpointError):
    """A stage's starting state is damaged and was set aside; the next attempt continues in an earlier stage.

    ``step`` is the step of the state from which the next attempt starts.
    """

    def __init__(self, stage: str, step: int) -> None:
        super().__init__(
            f"the starting state of stage {stage!r} is damaged; the next attempt resumes from step {step}, in an "
            "earlier stage"
        )
        self.step = step


@dataclass(frozen=True, kw_only=True, slots=True)
class StartingState:
    """An attempt's starting state, selected before the model is built, and alternatives if that state is damaged."""

    sources: RecoverySources
    """Candidate states and their locations."""
    stage: Stage
    """The stage to train from this state."""
    chosen: Candidate | None
    """The selected state, or None to start at step 0 with initial weights."""

    @property
    def step(self) -> int:
        """Number of steps completed in the selected state."""
        return 0 if self.chosen is None else self.chosen.position.step

    @property
    def description(self) -> StateDescription | None:
        """Description of the selected state, which lists all model weights, or None if no state is selected."""
        return None if self.chosen is None else self.chosen.state


def find_state(plan: Plan, context: AttemptContext, recorder: Recorder) -> StartingState:
    """Select the newest intact state; only its manifest is read. All ranks must call this function.

    Raises:
        UserError: The checkpoint belongs to a different configuration or plan.
        CheckpointError: The run has saved states, but none of them is usable.
    """
    recorder.phase("looking for a checkpoint", "load")
    memory = None if context.peer_memory is None else context.peer_memory.store
    retry = RetryPolicy(wait_s=5.0, first_pause_s=1.0, clock=context.worker.clock)
    sources = RecoverySources(run=context.run, plan=plan, memory=memory, retry=retry)
    chosen = _choose(sources, context)
    step = 0 if chosen is None else chosen.position.step
    return StartingState(sources=sources, stage=stage_at(context.run.config, plan, step), chosen=chosen)


def resume(engine: Any, start: StartingState, context: AttemptContext, recorder: Recorder) -> RunPosition:
    """Load the selected state into the engine, and return the run's position. All ranks must call this function.

    Selection checks only file sizes; loading verifies every byte. If a checkpoint turns out to be damaged, it is set
    aside together with the reason, and the previous checkpoint is loaded. If every checkpoint of the run is damaged,
    the run does not restart from step 0, and its files are not changed.

    Raises:
        UserError: The checkpoint belongs to a different configuration or plan.
        CheckpointError: The run has saved states, but none of them could be loaded.
        AnotherStageError: The newest usable state belongs to an earlier stage than the engine.
        FencedError: A newer attempt has taken over the run.
    """
    sources, chosen = start.sources, start.chosen
    waiting: Waiting | None = None
    while chosen is not None:
        step, source = chosen.step, chosen.source
        place = {"storage": "", "peer memory": " from peer memory", "another run": " of another run"}[source]
        recorder.phase(f"loading step {step}{place}", "load")
        try:
            # A stage that resets the optimizer begins without its moments.
            is_reset = start.stage.begins_anew and chosen.position.step == start.stage.first_step
            state = begun_anew(chosen.state, with_optimizer=False) if is_reset else chosen.state
            _load(engine, replace(chosen, state=state), context, verify_all=source != "another run")
            break
        except DamagedCheckpointError as error:
            if source == "peer memory":
                sources.give_up_memory(step, str(error))
            elif source == "another run":
                reference = context.run.config.model.resume_from
                raise UserError(
                    f"{SETTING}={reference!r}: the checkpoint of step {step} is damaged ({error}); use another step"
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
            # Rank 0 waits on behalf of all ranks, because their clocks differ.
            elif not _on_rank_0(context, waiting.pause) and context.rank == 0:
                sources.pass_over(Damage(step=step, reason=str(error), kind="unreadable", attempt=attempt))
        chosen = _choose(sources, context)
        if chosen is None:
            # The engine was built without weights, and is now partially filled.
            raise CheckpointError(
                "the state in peer memory could not be loaded completely, and no checkpoint has been saved yet; the "
                "next attempt starts from step 0"
            )
        if stage_at(context.run.config, sources.plan, chosen.position.step).number != start.stage.number:
            # Set damaged checkpoints aside, so that the next attempt does not select them again.
            _start(context, recorder, chosen.step, sources.passed)
            raise AnotherStageError(start.stage.name, chosen.step)
    position = RunPosition() if chosen is None else chosen.position
    _start(context, recorder, position.step, sources.passed)
    return position


def _choose(sources: RecoverySources, context: AttemptContext) -> Candidate | None:
    """Return rank 0's selection on every rank, or None to start at step 0. All ranks must call this function."""
    memory = None if context.peer_memory is None else context.peer_memory.store

    def choose() -> tuple[Source, str, bytes, Mapping[str, tuple[str, ...]]] | None:
        found = sources.choose()
        if found is None:
            return None
        source, location, manifest = found
        # Without the holders, each rank would ask the agents one after another for each shard that it reads.
        holders = memory.holders(manifest.ref.folder) if memory is not None and source == "peer memory" else {}
        # Send the manifest's bytes: for a large world size, pickling the object takes longer than parsing the bytes.
        return source, location, manifest.to_bytes(), holders

    found = _on_rank_0(context, choose)
    if found is None:
        return None
    if memory is not None:
        memory.learn(found[3])
    return sources.open(found[0], found[1], Manifest.from_bytes(found[2]))


def read_early_stopping(context: AttemptContext, plan: Plan, step: int) -> EarlyStopping:
    """Return the run's early stopping with the evaluations up to ``step``. All ranks must call this function."""
    config = context.run.config
    stopping = EarlyStopping(config.run.early_stopping)
    if config.run.early_stopping is None:
        return stopping
    return _on_rank_0(context, lambda: stopping.recall(read_entries(config.run_dir), plan, step))


def _on_rank_0(context: AttemptContext, do: Callable[[], T]) -> T:
    """Call ``do`` on rank 0; return its result or raise its error on every rank. All ranks must call this function."""
    result: T | None = None
    failure: UlyssesError | None = None
    if context.rank == 0:
        try:
            result = do()
        except UlyssesError as error:
            failure = error
        except Exception as error:
            # Convert any error, such as one from a foreign manifest, because the other ranks wait for the broadcast.
            failure = CheckpointError(f"rank 0 can't read the run's states ({type(error).__name__}: {error})")
    result, failure = context.messenger.broadcast((result, failure))
    if failure is not None:
        raise failure
    return cast("T", result)


def _load(engine: Any, chosen: Candidate, context: AttemptContext, *, verify_all: bool) -> None:
    """Load a state; verify the rest of the checkpoint if ``verify_all`` is set. All ranks must call this function."""
    store, manifest, messenger = chosen.store, chosen.manifest, context.messenger
    loaded: set[str] = set()

    def fill(parts: Sequence[TensorPart]) -> int:
        loaded.update(part.key for part in parts)
        return load_parts(store, manifest, parts, messenger=messenger)

    import_state(engine, chosen.state, fill)
    if verify_all:
        verify_rest(store, manifest, loaded, rank=context.rank, world_size=len(context.nodes), messenger=messenger)


def _start(context: AttemptContext, recorder: Recorder, step: int, passed: Sequence[Damage]) -> None:
    """Set unusable checkpoints aside, and announce the attempt's starting step. All ranks must call this function."""
    store, attempt = context.run.store, context.attempt

    def announce() -> None:
        try:
            if is_overtaken(store, attempt):
                raise FencedError(
                    f"a newer attempt has taken over the run, so attempt {attempt} ends; no action is needed"
                )
            for damage in passed:
                _set_aside(context, recorder, damage)
            start_attempt(store, attempt, step)
        except OSError as error:
            raise CheckpointError(
                f"the start of attempt {attempt} can't be recorded in the checkpoint storage ({error}); free space or "
                "repair the storage, then run the same command again"
            ) from error

    _on_rank_0(context, announce)
    if context.rank == 0:
        try:
            recorder.checkpoints_found()
        except OSError as error:
            _log.warning("the checkpoints can't be listed for the trackers (%s)", error)


def _set_aside(context: AttemptContext, recorder: Recorder, damage: Damage) -> None:
    try:
        set_aside(context.run.store, damage, attempt=context.attempt)
    except OSError as error:
        # The announced starting step excludes the checkpoint from the run in any case.
        _log.warning("the checkpoint of step %d can't be set aside (%s); it is ignored", damage.step, error)
    recorder.checkpoint_set_aside(damage)
