"""When and how the loop saves: asks whether a checkpoint is due, takes the state, and lets it be written behind it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any

from ray_ulysses.checkpoint import CheckpointError, CheckpointMeta, FencedError, Retention
from ray_ulysses.checkpoint.background import BackgroundSaver
from ray_ulysses.checkpoint.errors import StorageFailedError
from ray_ulysses.checkpoint.staging import Staging
from ray_ulysses.checkpoint.triggers import Flags, Triggers, due, retry_pause_s, time_is_up
from ray_ulysses.config.resume import resume_fingerprint, resume_settings
from ray_ulysses.engine.zero_state import state_source
from ray_ulysses.errors import PeerError
from ray_ulysses.logging import get_logger
from ray_ulysses.run.checkpoint_store import checkpoint_location, keep_rules
from ray_ulysses.run.requests import stop_requested, take_save_request
from ray_ulysses.run.settings import versions
from ray_ulysses.trainer.notice_watch import NoticeWatch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ray_ulysses.checkpoint.background import Saved
    from ray_ulysses.checkpoint.triggers import Reason
    from ray_ulysses.data.plan.cursor import Cursor
    from ray_ulysses.trainer.context import AttemptContext
    from ray_ulysses.trainer.progress import Progress
    from ray_ulysses.trainer.record import Recorder

_log = get_logger(__name__)
_PAUSES_S = (1.0, 5.0, 15.0)
"""Between tries of the last save of an attempt, in seconds."""
_LAST_WORD_S = 20.0
"""Longest wait for a save that is under way when an attempt has failed: its peers may be gone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutcome:
    """What a step left for its checkpoint.

    Attributes:
        progress: How far the run has come.
        metrics: The step's numbers.
        flags: What all ranks have agreed on.
    """

    progress: Progress
    metrics: Mapping[str, float]
    flags: Flags


class CheckpointKeeper:
    """Saves a run's state in the background, and deletes what that makes superfluous.

    Every rank makes one and calls the same methods after the same steps.
    """

    def __init__(self, context: AttemptContext, recorder: Recorder) -> None:
        config, worker = context.config, context.worker
        self._context, self._config, self._worker, self._recorder = context, config, worker, recorder
        section = config.checkpoint
        self._triggers = Triggers(
            every_steps=section.every_steps,
            every_s=None if section.every_minutes is None else 60 * section.every_minutes,
            at_end=section.save_at_end,
        )
        self._retention = Retention(context.store, keep_rules(config))
        self.staging = Staging(section.host_buffers, worker.device)
        self._taken_at = worker.clock.monotonic()
        self._taken_step = -1
        self._noticed = False
        self._notices = NoticeWatch(worker, config.run_dir)
        self._is_reserved = False
        self._saver = BackgroundSaver(
            context.store,
            attempt=context.attempt,
            rank=worker.rank,
            world_size=worker.world_size,
            exchange=context.save_exchange,
            staging=self.staging,
            clock=worker.clock,
            on_saved=self._on_saved,
            on_failed=self._on_failed,
        )

    def resumed(self, step: int) -> None:
        """Note the step that the attempt starts from: its state needs no saving."""
        self._taken_step = step

    def flags(self) -> Flags:
        """Return what this rank has to say after a step."""
        worker, run_dir, saver = self._worker, self._config.run_dir, self._saver
        saving = not saver.is_idle
        failure = saver.failure
        asks = self._notices.look(failed=failure is not None and not saving)
        own = Flags(
            notice=self._notices.notice is not None,
            notice_asks=asks,
            failed=failure is not None,
            saving=saving,
            ended=_ends(failure) or (not saving and self._is_out_of_patience()),
        )
        if worker.rank != 0:
            return own
        stop = stop_requested(run_dir, worker.session)
        return replace(
            own,
            time_is_up=time_is_up(self._triggers, last_save=self._taken_at, now=worker.clock.monotonic()),
            save_requested=take_save_request(run_dir),
            retry_asks=saver.failed_for_s >= retry_pause_s(saver.failures, self._config.checkpoint.max_failed_saves),
            gone=self._recorder.is_gone(),
            stop=stop is not None,
            resize=stop == "resize",
        )

    def after_step(self, engine: Any, outcome: StepOutcome, cursor: Cursor, last_step: int) -> None:
        """Save if a checkpoint is due; every rank must call after every step.

        Raises:
            StorageFailedError: Too many saves in a row have failed, for too long.
            CheckpointError: The storage takes nothing.
            PeerError: Another rank has ended for such a reason.
            FencedError: A newer attempt has taken the run over.
        """
        flags, step = outcome.flags, outcome.progress.step
        if not self._is_reserved:
            # After the first step, since the optimizer's moments are made in it.
            self.staging.reserve(state_source(engine).intervals)
            self._is_reserved = True
        if flags.gone:
            self._leave(engine, outcome, cursor)
        if flags.ended:
            failure = self._saver.failure
            # Another rank's failure ends this one, too; its own thread may not have heard of it.
            other = PeerError("another rank could not save; its log says why")
            raise other if failure is None else _last_word(failure)
        if flags.failed and flags.retry_asks and not flags.saving:
            # The journal has the failure, and a warning of it would say it twice.
            _log.info("%s; it is tried again now", self._saver.failure)
        if flags.notice != self._noticed:
            self._noticed = flags.notice
            if flags.notice:
                heard = self._notices.notice
                self._recorder.preemption_noticed(step, heard.deadline if heard is not None else None)
        reason = due(self._triggers, flags, step=step, taken_step=self._taken_step, last_step=last_step)
        if reason is not None:
            is_last = flags.stop or flags.resize or step >= last_step
            self._save(engine, outcome, cursor, reason, is_last=is_last)

    def finish(self) -> None:
        """Wait until everything is committed; every rank must call, at the end of an attempt.

        Raises:
            CheckpointError: The last save failed: the state is not on storage.
        """
        with self._recorder.time.saving():
            self._wait()
            self._saver.close(_LAST_WORD_S)
        failure = self._saver.failure
        if failure is not None:
            raise _last_word(failure)

    def abandon(self) -> None:
        """Give a save that is under way a last chance, when the attempt has failed; never raises."""
        self._saver.close(_LAST_WORD_S)

    def _save(self, engine: Any, outcome: StepOutcome, cursor: Cursor, reason: Reason, *, is_last: bool) -> None:
        self._take(engine, outcome, cursor, reason)
        if is_last:
            # Nothing is left to do meanwhile, and no later step to try again with.
            self._wait()
            for pause_s in chain(_PAUSES_S, repeat(_PAUSES_S[-1])):
                if self._saver.failure is None or _ends(self._saver.failure):
                    break
                # Ranks' clocks differ, and a save that some of them don't join would wait for them.
                if self._context.exchange.broadcast(self._is_out_of_patience()):
                    break
                _log.warning("%s; trying again in %g s", self._saver.failure, pause_s)
                self._worker.clock.sleep(pause_s)
                self._take(engine, outcome, cursor, reason)
                self._wait()
        elif self._config.checkpoint.host_buffers == 0:
            # The state is written from where the next step would change it.
            self._wait()

    def _take(self, engine: Any, outcome: StepOutcome, cursor: Cursor, reason: Reason) -> None:
        """Take the state; it is written behind the loop's back."""
        worker, step = self._worker, outcome.progress.step
        worker.on_event("save", step)
        meta = self._meta(outcome, cursor, reason)
        timeout_s = self._config.checkpoint.save_timeout_s
        if outcome.flags.notice:
            self._notices.taken(step)
        self._saver.save(step, state_source(engine), meta, timeout_s=timeout_s, obstacle=self._obstacle())
        self._taken_step, self._taken_at = step, worker.clock.monotonic()

    def _leave(self, engine: Any, outcome: StepOutcome, cursor: Cursor) -> None:
        """End an attempt whose run directory was deleted; its state is saved where checkpoints lie elsewhere.

        Raises:
            StorageFailedError: Always.
        """
        step, storage = outcome.progress.step, self._config.checkpoint.storage
        kept = "its checkpoints went with it. Start a new run"
        if storage is not None:
            self._take(engine, outcome, cursor, "stop")
            self._wait()
            if self._saver.failure is None:
                where = checkpoint_location(self._config)
                kept = f"the state of step {step} is saved. A new run.name goes on with model.resume_from={where}"
        raise StorageFailedError(
            f"the run's directory {self._config.run_dir} was deleted or moved away while the run was training; it is "
            f"not made anew, and {kept}, or bring the directory back"
        )

    def _obstacle(self) -> str | None:
        """Return why the journal does not have the steps that a checkpoint counts on, if it does not."""
        try:
            self._recorder.sync()
        except OSError as error:
            return f"the journal in {self._config.run_dir} could not be written ({error.strerror or error})"
        return None

    def _wait(self) -> None:
        timeout_s = self._config.checkpoint.save_timeout_s
        if not self._saver.wait(timeout_s):
            raise CheckpointError(
                f"the checkpoint of step {self._taken_step} was not written within "
                f"checkpoint.save_timeout_s={timeout_s:g} s; the checkpoint before it is untouched. Repair the storage "
                "or raise that time, then start the same command again"
            )

    def _meta(self, outcome: StepOutcome, cursor: Cursor, reason: Reason) -> CheckpointMeta:
        progress = outcome.progress
        return CheckpointMeta(
            sp_size=self._context.layout.sp_size,
            ring_size=self._context.layout.ring_size,
            zero_stage=self._config.memory.zero_stage,
            cursor=cursor.to_json(),
            digest=f"{progress.digest:016x}",
            tokens=progress.tokens,
            config_fingerprint=resume_fingerprint(self._config),
            versions=versions(),
            metrics={name: value for name, value in outcome.metrics.items() if math.isfinite(value)},
            reason=reason,
            written_at=self._worker.clock.now(),
            run=self._config.run.name,
            # Each row draws from a state of its own, so that no rank's generator has to be kept.
            extra={
                "random_state": "run.seed and row",
                "settings": resume_settings(self._config),
                "journal": self._recorder.journal_position(),
                "parent": progress.resumed_from,
            },
        )

    def _is_out_of_patience(self) -> bool:
        """Whether saves have failed more often, and for longer, than they may."""
        section, saver = self._config.checkpoint, self._saver
        return saver.failures > section.max_failed_saves and saver.failing_s >= section.failed_saves_patience_s

    def _on_saved(self, saved: Saved) -> None:
        """Record a commit and let go of what it replaces, on rank 0's thread."""
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


def _last_word(failure: BaseException) -> BaseException:
    """Return what an attempt ends with whose last save has failed: another attempt's saves would fail as well."""
    return failure if _ends(failure) else StorageFailedError(str(failure))


def _ends(failure: BaseException | None) -> bool:
    """Whether a failed save can't be made good by another: the attempt is not the run's any more, or it is a bug."""
    return failure is not None and (isinstance(failure, FencedError) or not isinstance(failure, CheckpointError))
