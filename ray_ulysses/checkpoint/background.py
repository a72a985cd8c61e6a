"""Writes checkpoints while training continues: one thread per rank, with a process group of its own."""

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
    """A checkpoint that was committed."""

    ref: CheckpointRef
    meta: CheckpointMeta
    """What the loop added to it."""
    stall_s: float
    """How long this rank's training stood still for it, in seconds."""
    save_s: float
    """From the request to the commit, in seconds."""


class BackgroundSaver:
    """Saves states one at a time, in the order of the requests.

    Every rank makes one and asks it for the same saves in the same order. A save that fails is reported by `failure`,
    on every rank, and changes nothing of those before it.

    Args:
        store: Where checkpoints are kept.
        attempt: The attempt's number.
        rank: This rank.
        world_size: All ranks.
        messenger: Joins the ranks' threads: over a group that nothing else uses, since training's collectives continue.
        staging: Host buffers.
        clock: Time.
        on_saved: Called on this rank's thread after each commit, before the next save begins.
        on_failed: Called there when a save has failed.
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
        """True if something is being saved."""
        with self._lock:
            return self._pending > 0

    @property
    def is_idle(self) -> bool:
        """True if nothing is being saved or prepared."""
        return self._calls.is_idle

    @property
    def failures(self) -> int:
        """Number of consecutive failed saves up to now."""
        with self._lock:
            return self._failures

    @property
    def failing_s(self) -> float:
        """Seconds since the end of the first of the consecutive failed saves."""
        with self._lock:
            return self._clock.monotonic() - self._failing_since if self._failures else 0.0

    @property
    def failed_for_s(self) -> float:
        """Seconds since the last save failed; 0 if it did not fail."""
        with self._lock:
            return self._clock.monotonic() - self._failed_at if self._failures else 0.0

    @property
    def failure(self) -> BaseException | None:
        """Error of the last save; None if it did not fail."""
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
        """Take a state and save it in the background; returns when training may continue.

        If every buffer holds a state that is still being written, this waits for one.

        Args:
            step: Completed optimizer steps.
            state: Live views; on a GPU they must not change before `Staging.before_update`.
            meta: What the loop adds.
            timeout_s: Longest wait for a buffer.
            obstacle: Called before anything is written, on the thread that writes; returns why nothing may be
                committed now, if this rank knows a reason: the save fails on every rank.

        Returns:
            How long it took, in seconds.

        Raises:
            CheckpointError: No buffer became free in time: the storage takes nothing.
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
        """Run a task for later saves in the background; its error counts as a failed save.

        No state is taken before it is done.
        """
        with self._lock:
            self._preparing += 1
        self._calls.ask(partial(self._carry_out, task, None))

    def wait_for_buffer(self, timeout_s: float) -> bool:
        """Wait until a state can be taken; return whether one can."""
        with self._lock:
            is_prepared = self._lock.wait_for(lambda: self._preparing == 0, timeout=timeout_s)
        return is_prepared and self._staging.wait_for_buffer(timeout_s)

    def wait(self, timeout_s: float) -> bool:
        """Wait until nothing is being saved or prepared; return whether that happened in time."""
        return self._calls.wait(timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Finish all requests and end the thread; return whether that happened in time."""
        self._calls.close()
        return self._calls.wait(timeout_s)

    def _carry_out(self, task: Callable[[], None], buffer: int | None) -> None:
        """Save a state and release its buffer, or prepare something, for which there is none."""
        failure: BaseException | None = None
        try:
            choose_device(self._staging.device)
            task()
        except BaseException as error:
            failure = error
        is_save = buffer is not None
        if buffer is not None:
            self._staging.release(buffer)
        # What was staged may be large, and its buffer may have to make room for another.
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
            # The group of the threads: a rank died, or took longer than its timeout.
            raise PeerError(
                f"the checkpoint of step {step} was given up, since not every rank finished ({error}); the "
                "checkpoint before it is untouched. Check the other ranks' logs; if a storage is slow, raise "
                "checkpoint.save_timeout_s"
            ) from error
        self._on_saved(Saved(ref=ref, meta=meta, stall_s=stall_s, save_s=self._clock.monotonic() - asked_at))


def not_begun(step: int, timeout_s: float) -> CheckpointError:
    """Return the error of a save for which no buffer became free in time."""
    return CheckpointError(
        f"the checkpoint of step {step} could not be begun: the one before it has not been written within "
        f"checkpoint.save_timeout_s={timeout_s:g} s; repair the storage, raise that time, or save less often"
    )
