"""Decides when a checkpoint is due, takes the state then, and writes it in the background while the loop trains."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from ray_ulysses.checkpoint import CheckpointError, CheckpointMeta, FencedError, Retention
from ray_ulysses.checkpoint.background import BackgroundSaver, not_begun
from ray_ulysses.checkpoint.errors import StorageFailedError
from ray_ulysses.checkpoint.notice import Notice, NoticedSave, notice_asks
from ray_ulysses.checkpoint.staging import Staging
from ray_ulysses.config.resume import resume_fingerprint, resume_settings
from ray_ulysses.elastic.causes import is_consequence, one_line
from ray_ulysses.engine.zero_state import state_source
from ray_ulysses.errors import FinalError, PeerError, UserError
from ray_ulysses.logging import get_logger
from ray_ulysses.run.checkpoint_store import keep_rules
from ray_ulysses.run.requests import RequestWatch
from ray_ulysses.run.settings import versions
from ray_ulysses.storage.retry import RetryPolicy
from ray_ulysses.trainer.step import Flags

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ray_ulysses.checkpoint.background import Saved
    from ray_ulysses.checkpoint.state import HeldInterval
    from ray_ulysses.config.running import CheckpointSection
    from ray_ulysses.data.plan.plan import Cursor
    from ray_ulysses.run.start_point import RunPosition
    from ray_ulysses.trainer.context import AttemptContext
    from ray_ulysses.trainer.record import Recorder
    from ray_ulysses.trainer.worker import Worker

Reason = Literal["steps", "minutes", "request", "preemption", "retry", "end", "stop", "resize", "stage", "memory"]
"""Why a checkpoint was saved."""


_ALLOWED_STALL_SHARE = 0.01
_ALLOWED_STALL_S = 0.01
_MOST_APART_S = 5.0
"""A transient failure, such as an agent that restarts, is over within seconds."""


def time_is_up(rules: CheckpointSection, *, last_save: float, now: float) -> bool:
    """Return whether a checkpoint is due by ``checkpoint.every_minutes`` (pure).

    ``last_save`` is when the last state was taken, or the attempt began, in monotonic seconds.
    """
    return rules.every_minutes is not None and now - last_save >= 60 * rules.every_minutes


def retry_pause_s(failures: int, max_failed_saves: int) -> float:
    """Return how long to wait after a failed save before the next try, in seconds (pure).

    Up to ``max_failed_saves`` are repeated immediately.
    """
    return 0.0 if failures <= max_failed_saves else min(2.0 ** min(failures - max_failed_saves - 1, 5), 30.0)


def steps_apart(step_s: float, stall_s: float, failures: int) -> int:
    """Return the number of steps between two saves to peer memory (pure).

    1, unless the copy stalls training for long (``stall_s``): then so many that the stall costs each step at most 10 ms
    or 1% of its time. A failed save is retried after the next step, since a dead agent is left out by then, and after
    further failures less and less often, up to every few seconds.
    """
    allowed_s = max(_ALLOWED_STALL_S, _ALLOWED_STALL_SHARE * step_s)
    rarest = math.ceil(_MOST_APART_S / step_s) if step_s > _MOST_APART_S / 2**16 else 2**16
    return max(math.ceil(stall_s / allowed_s), min(1 << min(max(failures - 1, 0), 16), rarest))


def due(
    section: CheckpointSection, flags: Flags, *, step: int, taken_step: int, last_step: int, ends_stage: bool = False
) -> Reason | None:
    """Return why a checkpoint is due after a step, or None (pure; equal on every rank).

    ``taken_step`` is the step whose state was taken last, or that was resumed from. With ``ends_stage`` another stage
    of the run follows the last step, which starts from its checkpoint.
    """
    # A failure counts once every rank's thread has finished: a rank that learns of it later would otherwise repeat a
    # save that the others have already begun.
    failed = flags.failed and not flags.saving and flags.retry_due
    # In the order of what a person would name as the reason.
    rules: tuple[tuple[Reason, bool], ...] = (
        ("preemption", flags.notice_due and not flags.saving),
        ("request", flags.save_requested),
        ("resize", flags.resize),
        ("stop", flags.stop and section.save_at_end),
        ("stage", step >= last_step and ends_stage),
        ("end", step >= last_step and section.save_at_end),
        ("steps", section.every_steps is not None and step % section.every_steps == 0),
        ("minutes", flags.time_is_up),
    )
    if step == taken_step:
        return "retry" if failed else None
    found = next((reason for reason, holds in rules if holds), None)
    return found or ("retry" if failed else None)


_RECENT_STEPS = 10


class NoticeWatch:
    """Remembers saves made for notices; every rank creates one and reports the same saves to it.

    ``notice`` is this rank's notice at the last look.
    """

    def __init__(self, worker: Worker, requests: RequestWatch | None) -> None:
        self.notice: Notice | None = None
        self._worker, self._requests = worker, requests
        self._last: NoticedSave | None = None
        self._committed: tuple[int, float] | None = None
        self._looked_at: float | None = None
        self._steps_s: deque[float] = deque(maxlen=_RECENT_STEPS)

    def look(self, *, failed: bool) -> bool:
        """Look for notices, and return whether one makes a checkpoint due; called once per step.

        ``failed`` says that the newest save has ended without a commit.
        """
        clock = self._worker.clock
        now = clock.monotonic()
        if self._looked_at is not None:
            self._steps_s.append(now - self._looked_at)
        self._looked_at = now
        last, committed = self._last, self._committed
        if last is not None and last.took_s is None:
            if committed is not None and committed[0] == last.step:
                self._last = replace(last, took_s=committed[1])
            elif failed:
                self._last = None
        self.notice = notice = self._present_notice()
        if notice is None:
            return False
        left_s = None if notice.deadline is None else notice.deadline - clock.now()
        return notice_asks(self._last, left_s=left_s, now=now, step_s=max(self._steps_s, default=0.0))

    def taken(self, step: int) -> None:
        """Note that a state was taken during a notice, for any reason."""
        self._last = NoticedSave(step=step, taken_at=self._worker.clock.monotonic())

    def committed(self, step: int, seconds: float) -> None:
        """Note a commit and the time from its request; any thread may call."""
        self._committed = (step, seconds)

    def _present_notice(self) -> Notice | None:
        """Return this worker's notice with the earliest deadline; rank 0 also reads those that people leave."""
        found = [self._worker.notice()]
        if self._requests is not None:
            self._requests.look()
            found.append(self._requests.notice())
        notices = [notice for notice in found if notice is not None]
        deadlines = [notice.deadline for notice in notices if notice.deadline is not None]
        return Notice(deadline=min(deadlines, default=None)) if notices else None


_log = get_logger(__name__)
CLOSE_TIMEOUT_S = 20.0
"""Longest wait for a save that is being written at the end of an attempt."""

ABANDON_TIMEOUT_S = 1.0
"""Longest wait for a save that is being written when an attempt has failed: its peers may be gone."""

_BUFFER_S = 5.0
"""Longest wait of training for a free host buffer. After that, the storage hangs or is slower than the steps between
two checkpoints, and the checkpoint is postponed until every rank has a free buffer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutcome:
    """A step's outcome, as its checkpoint needs it."""

    position: RunPosition
    """Where the run is after the step."""
    metrics: Mapping[str, float]
    """The step's metrics."""
    flags: Flags
    """The flags on which all ranks have agreed."""


class CheckpointKeeper:
    """Saves a run's state in the background, and deletes superseded checkpoints.

    Every rank creates one and calls the same methods after the same steps.
    """

    def __init__(self, context: AttemptContext, recorder: Recorder, *, ends_stage: bool = False) -> None:
        config, worker = context.run.config, context.worker
        self._context, self._config, self._worker, self._recorder = context, config, worker, recorder
        self._ends_stage = ends_stage
        self._retention = Retention(context.run.store, keep_rules(config))
        self.staging = Staging(config.checkpoint.host_buffers, worker.device)
        self._taken_at = worker.clock.monotonic()
        self._taken_step = -1
        self._noticed = False
        # The save that waits for a free buffer, and since when.
        self._postponed: tuple[Reason, float] | None = None
        self.requests = RequestWatch(config.run_dir, worker.session) if worker.rank == 0 else None
        self._notices = NoticeWatch(worker, self.requests)
        self._is_reserved = False
        self._no_room: CheckpointError | None = None
        self._saver = BackgroundSaver(
            context.run.store,
            attempt=context.attempt,
            rank=worker.rank,
            world_size=worker.world_size,
            messenger=context.save_messenger,
            staging=self.staging,
            clock=worker.clock,
            on_saved=self._on_saved,
            on_failed=self._on_failed,
        )

    def resumed(self, step: int) -> None:
        """Note the step that the attempt starts from: its state needs no saving."""
        self._taken_step = step

    def flags(self) -> Flags:
        """Return this rank's flags about saving after a step."""
        saver, is_first = self._saver, self._worker.rank == 0
        saving = saver.is_saving
        failure = saver.failure
        notice_due = self._notices.look(failed=failure is not None and not saving)
        pause_s = retry_pause_s(saver.failures, self._config.checkpoint.max_failed_saves)
        now = self._worker.clock.monotonic()
        return Flags(
            notice=self._notices.notice is not None,
            notice_due=notice_due,
            time_is_up=is_first and time_is_up(self._config.checkpoint, last_save=self._taken_at, now=now),
            saving=saving,
            buffers_busy=not saver.wait_for_buffer(0.0),
            failed=failure is not None,
            retry_due=is_first and saver.failed_for_s >= pause_s,
            ended=is_final(failure)
            or (not saving and self._is_out_of_patience())
            or self._recorder.storage_failure() is not None,
        )

    def after_step(self, engine: Any, outcome: StepOutcome, cursor: Cursor, last_step: int) -> None:
        """Save if a checkpoint is due; every rank must call after every step.

        Raises:
            StorageFailedError: Too many consecutive saves have failed, or the journal could not be written, for too
                long.
            CheckpointError: The storage accepts nothing, or there is no memory for a copy of the state.
            PeerError: Another rank has ended for one of these reasons.
            FencedError: A newer attempt has taken the run over.
        """
        flags, step = outcome.flags, outcome.position.step
        if not self._is_reserved:
            # After the first step, which creates the optimizer's moments; reserving many gigabytes takes seconds.
            self._saver.prepare(partial(self._reserve, state_source(engine).intervals))
            self._is_reserved = True
        if self._no_room is not None:
            raise self._no_room
        if flags.gone:
            self._leave(engine, outcome, cursor)
        if flags.ended:
            failure = self._recorder.storage_failure() or self._saver.failure
            # Another rank's failure ends this one too; this rank's thread may not have seen it yet.
            other = PeerError("another rank could not save; see its log for the reason")
            raise other if failure is None else _final_error(failure)
        if flags.failed and flags.retry_due and not flags.saving:
            # The journal has the failure, and a warning would repeat it.
            _log.info("%s; trying again now", self._saver.failure)
        if flags.notice != self._noticed:
            self._noticed = flags.notice
            if flags.notice:
                notice = self._notices.notice
                self._recorder.preemption_noticed(step, notice.deadline if notice is not None else None)
        reason = due(
            self._config.checkpoint, flags, step=step, taken_step=self._taken_step, last_step=last_step,
            ends_stage=self._ends_stage,
        )  # fmt: skip
        if reason is None and self._postponed is not None:
            reason = self._postponed[0]
        if reason is not None:
            is_last = flags.stop or flags.resize or step >= last_step
            if is_last or not flags.buffers_busy or self._comes_free(reason, step):
                self._postponed = None
                self._save(engine, outcome, cursor, reason, is_last=is_last)

    def finish(self) -> None:
        """Wait until everything is committed; every rank must call, at the end of an attempt.

        Raises:
            CheckpointError: The last save failed: the state is not on storage.
        """
        with self._recorder.time.saving():
            self._wait()
            self._saver.close(CLOSE_TIMEOUT_S)
        if self.requests is not None:
            self.requests.close()
        failure = self._saver.failure
        if failure is not None:
            raise _final_error(failure)

    def abandon(self, error: BaseException, *, is_in_memory: bool) -> None:
        """Wait briefly for a save in progress when the attempt has failed; never raises.

        With ``is_in_memory`` the next attempt finds a state in peer memory, and need not wait for this one unless the
        run ends here.
        """
        if self.requests is not None:
            self.requests.close()
        if not self._saver.is_saving or (is_in_memory and not isinstance(error, UserError | FinalError)):
            self._saver.close(ABANDON_TIMEOUT_S)
            return
        if not is_consequence(error):
            _log.warning(
                "the attempt has failed (%s); the checkpoint of step %d is being written and has %.0f s to be complete",
                one_line(error), self._taken_step, CLOSE_TIMEOUT_S,
            )  # fmt: skip
        self._saver.close(CLOSE_TIMEOUT_S)

    def _reserve(self, intervals: Sequence[HeldInterval]) -> None:
        try:
            self.staging.reserve(intervals)
        except CheckpointError as error:
            self._no_room = error

    def _comes_free(self, reason: Reason, step: int) -> bool:
        """Wait a little until every rank has a free buffer; else postpone the save. Every rank must call."""
        now = self._worker.clock.monotonic()
        if self._postponed is None:
            ranks = self._context.messenger.gather(self._saver.wait_for_buffer(_BUFFER_S))
            if self._context.messenger.broadcast(ranks is not None and all(ranks)):
                return True
            why = "previous one is still being written" if self._saver.is_saving else "memory for it is not there yet"
            _log.warning("the checkpoint of step %d is postponed, since the %s; training continues", step, why)
            self._postponed = reason, now
        # Rank 0 decides, since the ranks' clocks differ.
        elif self._context.messenger.broadcast(now - self._postponed[1] > self._config.checkpoint.save_timeout_s):
            raise not_begun(step, self._config.checkpoint.save_timeout_s)
        return False

    def _save(self, engine: Any, outcome: StepOutcome, cursor: Cursor, reason: Reason, *, is_last: bool) -> None:
        self._take(engine, outcome, cursor, reason)
        if is_last:
            # Nothing is left to do meanwhile, and no later step could try again.
            self._wait()
            waiting = RetryPolicy(
                wait_s=math.inf, first_pause_s=1.0, longest_pause_s=15.0, clock=self._worker.clock
            ).begin()
            while self._saver.failure is not None and not is_final(self._saver.failure):
                # Rank 0 decides, since the ranks' clocks differ: a save that some ranks don't join would wait for them.
                if self._context.messenger.broadcast(self._is_out_of_patience()):
                    break
                _log.warning("%s; trying again", self._saver.failure)
                waiting.pause()
                # Each try may take as long as a save.
                self._worker.beat("save", outcome.position.step)
                self._take(engine, outcome, cursor, reason)
                self._wait()
        elif self._config.checkpoint.host_buffers == 0:
            # The state is written from memory that the next step would change.
            self._wait()

    def _take(self, engine: Any, outcome: StepOutcome, cursor: Cursor, reason: Reason) -> None:
        """Take the state; it is written in the background."""
        worker, step = self._worker, outcome.position.step
        worker.on_event("save", step)
        meta = checkpoint_meta(self._context, self._recorder, outcome, cursor, reason)
        timeout_s = self._config.checkpoint.save_timeout_s
        if outcome.flags.notice:
            self._notices.taken(step)
        obstacle = partial(unwritten_journal, self._context, self._recorder)
        self._saver.save(step, state_source(engine), meta, timeout_s=timeout_s, obstacle=obstacle)
        self._taken_step, self._taken_at = step, worker.clock.monotonic()

    def _leave(self, engine: Any, outcome: StepOutcome, cursor: Cursor) -> None:
        """End an attempt whose run directory was deleted; its state is saved if checkpoints are stored elsewhere."""
        kept = "its checkpoints went with it. Start a new run"
        if self._config.checkpoint.storage is not None:
            self._take(engine, outcome, cursor, "stop")
            self._wait()
            if self._saver.failure is None:
                kept = (
                    f"the state of step {outcome.position.step} is saved. A new run.name continues with "
                    f"model.resume_from={self._context.run.location}"
                )
        raise StorageFailedError(
            f"the run's directory {self._config.run_dir} was deleted or moved away while the run was training; it is "
            f"not created again, and {kept}, or restore the directory"
        )

    def _wait(self) -> None:
        timeout_s = self._config.checkpoint.save_timeout_s
        if not self._saver.wait(timeout_s):
            raise CheckpointError(
                f"the checkpoint of step {self._taken_step} was not written within "
                f"checkpoint.save_timeout_s={timeout_s:g} s; the previous checkpoint is untouched. Repair the storage "
                "or raise that time, then start the same command again"
            )

    def _is_out_of_patience(self) -> bool:
        """Return whether saves have failed more often, and for longer, than they may."""
        section, saver = self._config.checkpoint, self._saver
        return saver.failures > section.max_failed_saves and saver.failing_s >= section.failed_saves_patience_s

    def _on_saved(self, saved: Saved) -> None:
        """Record a commit and delete superseded checkpoints, on rank 0's thread."""
        self._notices.committed(saved.ref.step, saved.save_s)
        if self._worker.rank == 0:
            self._recorder.checkpoint_committed(saved)
            try:
                for step in self._retention.apply(saved.ref):
                    self._recorder.checkpoint_deleted(step)
            except OSError as error:
                _log.warning("old checkpoints could not be deleted (%s); trying again after the next commit", error)
        self._worker.on_event("saved", saved.ref.step)

    def _on_failed(self, step: int, error: CheckpointError) -> None:
        if self._worker.rank == 0:
            self._retention.forget()
            self._recorder.checkpoint_failed(step, str(error))
        self._worker.on_event("not saved", step)


def checkpoint_meta(
    context: AttemptContext, recorder: Recorder, outcome: StepOutcome, cursor: Cursor, reason: Reason
) -> CheckpointMeta:
    """Return the loop's metadata for a checkpoint of the state after a step."""
    config, layout, position = context.run.config, context.run.layout, outcome.position
    return CheckpointMeta(
        sp_size=layout.sp_size,
        ring_size=layout.ring_size,
        zero_stage=config.zero_stage,
        cursor=cursor.to_json(),
        digest=f"{position.digest:016x}",
        tokens=position.tokens,
        config_fingerprint=resume_fingerprint(config),
        versions=versions(),
        metrics={name: value for name, value in outcome.metrics.items() if math.isfinite(value)},
        reason=reason,
        written_at=context.worker.clock.now(),
        run=config.run.name,
        # Each row has its own random state, so no rank's generator is saved.
        extra={
            "random_state": "run.seed and row",
            "settings": resume_settings(config),
            "journal": recorder.journal_position(),
            "parent": position.resumed_from,
            "measured": context.measured,
            **({"stage": context.stage} if context.stage else {}),
        },
    )


def unwritten_journal(context: AttemptContext, recorder: Recorder) -> str | None:
    """Return why the journal lacks the steps that a checkpoint relies on, if it does; syncs it."""
    try:
        recorder.sync()
    except OSError as error:
        return f"the journal in {context.run.config.run_dir} could not be written ({error.strerror or error})"
    return None


def _final_error(failure: BaseException) -> BaseException:
    """Return the error that ends an attempt whose last save has failed: another attempt's saves would fail as well."""
    return failure if is_final(failure) else StorageFailedError(str(failure))


def is_final(failure: BaseException | None) -> bool:
    """Return whether retrying a failed save is pointless: another attempt has the run, or it is a bug."""
    return failure is not None and (isinstance(failure, FencedError) or not isinstance(failure, CheckpointError))
