"""Decides when checkpoints are due, captures the state, and saves it in the background during training."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from ray_ulysses.checkpoint import CheckpointError, CheckpointMeta, FencedError, Retention
from ray_ulysses.checkpoint.background import BackgroundSaver, Saved, not_begun
from ray_ulysses.checkpoint.errors import StorageFailedError
from ray_ulysses.checkpoint.notice import Notice, NoticedSave, notice_asks
from ray_ulysses.checkpoint.staging import Staging
from ray_ulysses.checkpoint.state import HeldInterval
from ray_ulysses.config.resume import resume_fingerprint, resume_settings
from ray_ulysses.config.running import CheckpointSection
from ray_ulysses.data.plan.plan import Cursor
from ray_ulysses.elastic.causes import is_consequence, one_line
from ray_ulysses.engine.zero_state import state_source
from ray_ulysses.errors import FinalError, PeerError, UserError
from ray_ulysses.logging import get_logger
from ray_ulysses.run.checkpoint_store import keep_rules
from ray_ulysses.run.requests import RequestWatch
from ray_ulysses.run.settings import versions
from ray_ulysses.run.start_point import RunPosition
from ray_ulysses.storage.retry import RetryPolicy
from ray_ulysses.trainer.context import AttemptContext
from ray_ulysses.trainer.record import Recorder
from ray_ulysses.trainer.step import Flags
from ray_ulysses.trainer.worker import Worker

Reason = Literal["steps", "minutes", "request", "preemption", "retry", "end", "stop", "resize", "stage", "memory"]
"""The event that triggered a checkpoint."""


_ALLOWED_STALL_SHARE = 0.01
_ALLOWED_STALL_S = 0.01
_MOST_APART_S = 5.0
"""Maximum time between retries, in seconds. Transient failures, such as an agent restart, last only seconds."""


def time_is_up(rules: CheckpointSection, *, last_save: float, now: float) -> bool:
    """Return whether a checkpoint is due according to ``checkpoint.every_minutes``.

    ``last_save`` is the time at which the last state was captured or the attempt started, in monotonic seconds.
    """
    return rules.every_minutes is not None and now - last_save >= 60 * rules.every_minutes


def retry_pause_s(failures: int, max_failed_saves: int) -> float:
    """Return how long to wait before retrying a failed save, in seconds.

    The first ``max_failed_saves`` failures are retried immediately.
    """
    return 0.0 if failures <= max_failed_saves else min(2.0 ** min(failures - max_failed_saves - 1, 5), 30.0)


def steps_apart(step_s: float, stall_s: float, failures: int) -> int:
    """Return the number of steps between two saves to peer memory.

    The result is 1 unless copying the state stalls training for a long time (``stall_s``). In that case, the interval
    is long enough that the stall costs at most 10 ms or 1% of the time per step. The first failed save is retried after
    the next step, because a dead agent is excluded by then. After further failures, the interval doubles, up to a few
    seconds.
    """
    allowed_s = max(_ALLOWED_STALL_S, _ALLOWED_STALL_SHARE * step_s)
    rarest = math.ceil(_MOST_APART_S / step_s) if step_s > _MOST_APART_S / 2**16 else 2**16
    return max(math.ceil(stall_s / allowed_s), min(1 << min(max(failures - 1, 0), 16), rarest))


def due(
    section: CheckpointSection, flags: Flags, *, step: int, taken_step: int, last_step: int, ends_stage: bool = False
) -> Reason | None:
    """Return the reason why a checkpoint is due after a step, or None. The result is identical on every rank.

    ``taken_step`` is the last step whose state was captured, or the step from which the attempt resumed. ``ends_stage``
    means that another stage of the run follows the last step and starts from its checkpoint.
    """
    # Consider a failure only after the saving threads of all ranks have finished. Otherwise a rank that learns of the
    # failure later would repeat a save that the other ranks have already started.
    failed = flags.failed and not flags.saving and flags.retry_due
    # If several rules hold, report the reason that is most informative to the user.
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
    """Tracks preemption notices and the saves made for them. Every rank creates one and notes the same saves.

    ``notice`` is this rank's notice at the last check, or None.
    """

    def __init__(self, worker: Worker, requests: RequestWatch | None) -> None:
        self.notice: Notice | None = None
        self._worker, self._requests = worker, requests
        self._last: NoticedSave | None = None
        self._committed: tuple[int, float] | None = None
        self._looked_at: float | None = None
        self._steps_s: deque[float] = deque(maxlen=_RECENT_STEPS)

    def look(self, *, failed: bool) -> bool:
        """Check for notices, and return whether a notice makes a checkpoint due. Call this method once per step.

        ``failed`` indicates whether the newest save ended without a commit.
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
        """Record that a state was captured, for any reason, while a notice is in effect."""
        self._last = NoticedSave(step=step, taken_at=self._worker.clock.monotonic())

    def committed(self, step: int, seconds: float) -> None:
        """Record a commit and the duration of the save, in seconds. Any thread may call this method."""
        self._committed = (step, seconds)

    def _present_notice(self) -> Notice | None:
        """Return this rank's notice, with the earliest deadline. Rank 0 includes notices that users have requested."""
        found = [self._worker.notice()]
        if self._requests is not None:
            self._requests.look()
            found.append(self._requests.notice())
        notices = [notice for notice in found if notice is not None]
        deadlines = [notice.deadline for notice in notices if notice.deadline is not None]
        return Notice(deadline=min(deadlines, default=None)) if notices else None


_log = get_logger(__name__)
CLOSE_TIMEOUT_S = 20.0
"""Maximum time to wait for a save in progress at the end of an attempt, in seconds."""

ABANDON_TIMEOUT_S = 1.0
"""Maximum time to wait for a save in progress after an attempt has failed, in seconds; other ranks may be dead."""

_BUFFER_S = 5.0
"""Maximum time that training waits for a free host buffer, in seconds. A longer wait means that the storage hangs or
can't keep up with the checkpoint interval; the checkpoint is then postponed until every rank has a free buffer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutcome:
    """The parts of a step's result that a checkpoint needs."""

    position: RunPosition
    """The run's position after the step."""
    metrics: Mapping[str, float]
    flags: Flags
    """Flags that all ranks have agreed on."""


class CheckpointKeeper:
    """Saves a run's state in the background, and deletes superseded checkpoints.

    Every rank creates a keeper and calls the same methods after the same steps.
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
        # Steps and folders of commits not yet reported to the plugins; the saving thread adds to it.
        self.committed: deque[tuple[int, str]] = deque()
        # Reason and start time of a save that is waiting for a free buffer.
        self._postponed: tuple[Reason, float] | None = None
        self.requests = RequestWatch(config.run_dir, worker.session) if worker.rank == 0 else None
        # Step and time of the checkpoint request that was taken.
        self._requested: tuple[int, float] | None = None
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
        """Record the step that the attempt starts from; its state need not be saved again."""
        self._taken_step = step

    def flags(self) -> Flags:
        """Return this rank's flags that concern saving."""
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
        """Save the state if a checkpoint is due. All ranks must call this method after every step.

        Raises:
            StorageFailedError: Saves have failed repeatedly, or the journal has been unwritable, for too long.
            CheckpointError: A save did not start or finish in time, or there is no memory for a copy of the state.
            PeerError: Another rank raised one of these errors.
            FencedError: A newer attempt has taken over the run.
        """
        flags, step = outcome.flags, outcome.position.step
        if not self._is_reserved:
            # The first step has created the optimizer's moments, so the sizes are known. Reserve in the background,
            # because reserving many gigabytes takes seconds.
            self._saver.prepare(partial(self._reserve, state_source(engine).intervals))
            self._is_reserved = True
        if self._no_room is not None:
            raise self._no_room
        if flags.gone:
            self._leave(engine, outcome, cursor)
        if flags.ended:
            failure = self._recorder.storage_failure() or self._saver.failure
            # Another rank's failure ends this rank too, even if this rank's thread has not seen a failure yet.
            other = PeerError("another rank could not save a checkpoint; see its log for the reason")
            raise other if failure is None else _final_error(failure)
        if flags.failed and flags.retry_due and not flags.saving:
            # Log as info: the journal contains the failure, and a warning would repeat it there.
            _log.info("%s; retrying now", self._saver.failure)
        if flags.notice != self._noticed:
            self._noticed = flags.notice
            if flags.notice:
                notice = self._notices.notice
                self._recorder.preemption_noticed(step, notice.deadline if notice is not None else None)
        taken = None if self.requests is None else self.requests.taken
        if flags.save_requested and taken is not None:
            self._requested = step, taken
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
        """Wait until all saves are committed. All ranks must call this method at the end of an attempt.

        Raises:
            CheckpointError: The last save failed, so the state is not on storage.
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
        """Wait briefly for a save in progress after the attempt has failed. This method never raises.

        If ``is_in_memory`` is set, the next attempt resumes from peer memory, so this method waits only if ``error``
        ends the run.
        """
        waits = self._saver.is_saving and (not is_in_memory or isinstance(error, UserError | FinalError))
        if waits and not is_consequence(error):
            _log.warning(
                "the attempt has failed (%s); waiting up to %.0f s for the checkpoint of step %d to be written",
                one_line(error), CLOSE_TIMEOUT_S, self._taken_step,
            )  # fmt: skip
        self._saver.close(CLOSE_TIMEOUT_S if waits else ABANDON_TIMEOUT_S)
        if self.requests is not None:
            self.requests.close()

    def _reserve(self, intervals: Sequence[HeldInterval]) -> None:
        try:
            self.staging.reserve(intervals)
        except CheckpointError as error:
            self._no_room = error

    def _comes_free(self, reason: Reason, step: int) -> bool:
        """Wait briefly until every rank has a free buffer, or postpone the save. All ranks must call this method."""
        now = self._worker.clock.monotonic()
        if self._postponed is None:
            ranks = self._context.messenger.gather(self._saver.wait_for_buffer(_BUFFER_S))
            if self._context.messenger.broadcast(ranks is not None and all(ranks)):
                return True
            why = "previous save is in progress" if self._saver.is_saving else "memory for a copy is not reserved yet"
            _log.warning("the checkpoint of step %d is postponed because the %s; training continues", step, why)
            self._postponed = reason, now
        # Rank 0 decides, because the ranks' clocks differ.
        elif self._context.messenger.broadcast(now - self._postponed[1] > self._config.checkpoint.save_timeout_s):
            raise not_begun(step, self._config.checkpoint.save_timeout_s)
        return False

    def _save(self, engine: Any, outcome: StepOutcome, cursor: Cursor, reason: Reason, *, is_last: bool) -> None:
        self._take(engine, outcome, cursor, reason)
        if is_last:
            # There is nothing else to do meanwhile, and no later step to retry the save.
            self._wait()
            waiting = RetryPolicy(
                wait_s=math.inf, first_pause_s=1.0, longest_pause_s=15.0, clock=self._worker.clock
            ).begin()
            while self._saver.failure is not None and not is_final(self._saver.failure):
                # Rank 0 decides, because the ranks' clocks differ and a save waits for all ranks to join.
                if self._context.messenger.broadcast(self._is_out_of_patience()):
                    break
                _log.warning("%s; retrying", self._saver.failure)
                waiting.pause()
                # Send a heartbeat, because each retry may take as long as a save.
                self._worker.beat("save", outcome.position.step)
                self._take(engine, outcome, cursor, reason)
                self._wait()
        elif self._config.checkpoint.host_buffers == 0:
            # Without host buffers, the state is written from memory that the next step would change.
            self._wait()

    def _take(self, engine: Any, outcome: StepOutcome, cursor: Cursor, reason: Reason) -> None:
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
        """End an attempt whose run directory was deleted; first save the state if checkpoints are stored elsewhere."""
        kept = "its checkpoints were deleted with it. Start a new run"
        if self._config.checkpoint.storage is not None:
            self._take(engine, outcome, cursor, "stop")
            self._wait()
            if self._saver.failure is None:
                kept = (
                    f"the state of step {outcome.position.step} is saved. Continue under a new run.name with "
                    f"model.resume_from={self._context.run.location}"
                )
        raise StorageFailedError(
            f"the run's directory {self._config.run_dir} was deleted or moved during training; {kept}, or restore the "
            "directory"
        )

    def _wait(self) -> None:
        timeout_s = self._config.checkpoint.save_timeout_s
        if not self._saver.wait(timeout_s):
            raise CheckpointError(
                f"the checkpoint of step {self._taken_step} was not written within "
                f"checkpoint.save_timeout_s={timeout_s:g} s; the previous checkpoint is intact. Repair the storage or "
                "increase checkpoint.save_timeout_s, then run the same command again"
            )

    def _is_out_of_patience(self) -> bool:
        section, saver = self._config.checkpoint, self._saver
        return saver.failures > section.max_failed_saves and saver.failing_s >= section.failed_saves_patience_s

    def _on_saved(self, saved: Saved) -> None:
        """Record a commit and delete superseded checkpoints. Called on the saving thread."""
        self._notices.committed(saved.ref.step, saved.save_s)
        self.committed.append((saved.ref.step, saved.ref.folder))
        if self._worker.rank == 0:
            self._recorder.checkpoint_committed(saved)
            requested = self._requested
            if self.requests is not None and requested is not None and saved.ref.step >= requested[0]:
                self._requested = None
                self.requests.saved(requested[1])
            try:
                for step in self._retention.apply(saved.ref):
                    self._recorder.checkpoint_deleted(step)
            except OSError as error:
                _log.warning("old checkpoints can't be deleted (%s); retrying after the next commit", error)
        self._worker.on_event("saved", saved.ref.step)

    def _on_failed(self, step: int, error: CheckpointError) -> None:
        if self._worker.rank == 0:
            self._retention.forget()
            self._recorder.checkpoint_failed(step, str(error))
        self._worker.on_event("not saved", step)


def checkpoint_meta(
    context: AttemptContext, recorder: Recorder, outcome: StepOutcome, cursor: Cursor, reason: Reason
) -> CheckpointMeta:
    """Return the metadata that the training loop stores in a checkpoint."""
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
        # Random state is derived from run.seed for each row, so generator states are not saved.
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
    """Sync the journal to which a checkpoint refers. Return None, or the reason if the journal can't be written."""
    try:
        recorder.sync()
    except OSError as error:
        return f"the journal in {context.run.config.run_dir} can't be written ({error.strerror or error})"
    return None


def _final_error(failure: BaseException) -> BaseException:
    """Return the error that ends the attempt: a retryable failure becomes `StorageFailedError`, which ends the run."""
    return failure if is_final(failure) else StorageFailedError(str(failure))


def is_final(failure: BaseException | None) -> bool:
    """Return whether retrying a failed save is pointless because a newer attempt has taken over or there is a bug."""
    return failure is not None and (isinstance(failure, FencedError) or not isinstance(failure, CheckpointError))
