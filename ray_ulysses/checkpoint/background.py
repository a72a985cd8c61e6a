"""Background checkpoint writes: one thread per rank, with a process group that training does not use."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from ray_ulysses.checkpoint.errors import CheckpointError, FencedError
from ray_ulysses.checkpoint.manifest import CheckpointMeta, CheckpointRef
from ray_ulysses.checkpoint.messenger import RankMessenger
from ray_ulysses.checkpoint.save import save_checkpoint
from ray_ulysses.checkpoint.staging import StagedState, Staging
from ray_ulysses.checkpoint.state import StateSource
from ray_ulysses.clock import Clock
from ray_ulysses.errors import PeerError
from ray_ulysses.logging import get_logger
from ray_ulysses.parallel.device import choose_device
from ray_ulysses.storage import Store
from ray_ulysses.storage.background import BackgroundCalls

_log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """A committed checkpoint, with the duration of its save."""

    ref: CheckpointRef
    meta: CheckpointMeta
    stall_s: float
    """Seconds for which the save blocked training on this rank."""
    save_s: float
    """Seconds from the call to `BackgroundSaver.save` until the commit."""


class BackgroundSaver:
    """Saves training states in the background, one at a time, in the order of the calls.

    Each rank creates one saver, and all ranks must request the same saves in the same order. If a save fails, `failure`
    is set on every rank, and earlier checkpoints are unaffected.

    Args:
        messenger: Connects the saver threads of all ranks. Its process group must not be used for anything else,
            because training runs collectives at the same time.
        on_saved: Called on the saver's thread after each commit, before the next save starts.
        on_failed: Called on the saver's thread after each failed save.
        read_back: See `save_checkpoint`.
    """

    def __init__(
        self,
        store: Store,
        *,
        attempt: int,
        rank: int,
        world_size: int,
        messenger: RankMessenger,
        staging: Staging,
        clock: Clock,
        on_saved: Callable[[Saved], Any],
        on_failed: Callable[[int, CheckpointError], Any],
        read_back: bool = True,
    ) -> None:
        self._store, self._attempt, self._rank, self._world_size = store, attempt, rank, world_size
        self._messenger, self._staging, self._clock = messenger, staging, clock
        self._on_saved, self._on_failed, self._read_back = on_saved, on_failed, read_back
        self._calls = BackgroundCalls("checkpoint-save")
        self._lock = threading.Condition()
        self._pending = self._preparing = 0
        self._failures = 0
        self._failing_since = self._failed_at = 0.0
        self._failure: BaseException | None = None
        self._tries: dict[int, int] = {}

    @property
    def is_saving(self) -> bool:
        """Whether a save is queued or in progress."""
        with self._lock:
            return self._pending > 0

    @property
    def is_idle(self) -> bool:
        """Whether neither a save nor a preparation task is queued or in progress."""
        return self._calls.is_idle

    @property
    def failures(self) -> int:
        """Number of failed saves since the last successful save."""
        with self._lock:
            return self._failures

    @property
    def failing_s(self) -> float:
        """Seconds since the first failed save after the last successful save, or 0 if the last save succeeded."""
        with self._lock:
            return self._clock.monotonic() - self._failing_since if self._failures else 0.0

    @property
    def failed_for_s(self) -> float:
        """Seconds since the most recent failed save, or 0 if the last save succeeded."""
        with self._lock:
            return self._clock.monotonic() - self._failed_at if self._failures else 0.0

    @property
    def failure(self) -> BaseException | None:
        """Error of the last save, or None if the last save succeeded."""
        with self._lock:
            return self._failure

    def save(
        self,
        step: int,
        state: StateSource,
        meta: CheckpointMeta,
        *,
        timeout_s: float,
        obstacle: Callable[[], str | None] = lambda: None,
    ) -> float:
        """Copy a state, queue the copy for a background save, and return the seconds for which this call blocked.

        If all buffers are in use, this call waits until a buffer is free, for at most `timeout_s`. The state consists
        of live views. On a GPU, it must not change until `Staging.before_update` is called. `obstacle` is called on the
        saver's thread before this rank writes its shard. If it returns a reason, the save fails with that reason on
        every rank.

        Raises:
            CheckpointError: No buffer became free in time, or the host has too little memory for a buffer.
        """
        asked_at = self._clock.monotonic()
        if not self.wait_for_buffer(timeout_s):
            raise not_begun(step, timeout_s)
        staged = self._staging.stage(state)
        stall_s = self._clock.monotonic() - asked_at
        retry = self._tries.get(step, 0)
        self._tries[step] = retry + 1
        with self._lock:
            self._pending += 1
        save = partial(self._save, step, staged, meta, retry, obstacle, asked_at=asked_at, stall_s=stall_s)
        self._calls.ask(partial(self._carry_out, save, staged.buffer))
        return stall_s

    def prepare(self, task: Callable[[], None]) -> None:
        """Run a background task on which later saves depend; an exception in the task counts as a failed save.

        `save` waits until the task has finished.
        """
        with self._lock:
            self._preparing += 1
        self._calls.ask(partial(self._carry_out, task, None))

    def wait_for_buffer(self, timeout_s: float) -> bool:
        """Wait until a buffer is free and all preparation tasks have finished; return False on timeout."""
        with self._lock:
            is_prepared = self._lock.wait_for(lambda: self._preparing == 0, timeout=timeout_s)
        return is_prepared and self._staging.wait_for_buffer(timeout_s)

    def wait(self, timeout_s: float) -> bool:
        """Wait until all saves and preparation tasks have finished; return False on timeout."""
        return self._calls.wait(timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Finish all queued saves and tasks, and stop the thread; return False on timeout."""
        self._calls.close()
        return self._calls.wait(timeout_s)

    def _carry_out(self, task: Callable[[], None], buffer: int | None) -> None:
        """Run a save and release its buffer, or run a preparation task, which has no buffer."""
        failure: BaseException | None = None
        try:
            choose_device(self._staging.device)
            task()
        except BaseException as error:
            failure = error
        is_save = buffer is not None
        if buffer is not None:
            self._staging.release(buffer)
        # References to the staged state would keep its memory alive while a replacement buffer is allocated.
        del task
        raised = failure
        while raised is not None:
            traceback.clear_frames(raised.__traceback__)
            raised = raised.__cause__ or raised.__context__
        with self._lock:
            if is_save or failure is not None:
                self._failure = failure
                self._failures = self._failures + 1 if failure is not None else 0
                self._failed_at = self._clock.monotonic()
                self._failing_since = self._failed_at if self._failures == 1 else self._failing_since
            self._pending, self._preparing = self._pending - is_save, self._preparing - (not is_save)
            self._lock.notify_all()

    def _save(
        self,
        step: int,
        staged: StagedState,
        meta: CheckpointMeta,
        retry: int,
        obstacle: Callable[[], str | None],
        *,
        asked_at: float,
        stall_s: float,
    ) -> None:
        staged.wait()
        try:
            ref = save_checkpoint(
                self._store,
                step=step,
                attempt=self._attempt,
                rank=self._rank,
                world_size=self._world_size,
                state=staged.state,
                meta=meta,
                messenger=self._messenger,
                retry=retry,
                obstacle=obstacle(),
                read_back=self._read_back,
            )
        except CheckpointError as error:
            if not isinstance(error, FencedError):
                self._on_failed(step, error)
            raise
        except RuntimeError as error:
            # The messenger's process group failed: a rank died or exceeded the group's timeout.
            raise PeerError(
                f"the checkpoint of step {step} was abandoned because some ranks did not finish ({error}); the "
                "previous checkpoint is intact. Check the other ranks' logs; if the storage is slow, increase "
                "checkpoint.save_timeout_s"
            ) from error
        self._on_saved(Saved(ref=ref, meta=meta, stall_s=stall_s, save_s=self._clock.monotonic() - asked_at))


def not_begun(step: int, timeout_s: float) -> CheckpointError:
    """Return the error for a save that found no free buffer in time."""
    return CheckpointError(
        f"the checkpoint of step {step} could not be started: the previous checkpoint was not written within "
        f"checkpoint.save_timeout_s={timeout_s:g} s; repair the storage, increase this timeout, or save less often"
    )
