"""The trackers that a run is recorded with, as one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from ray_ulysses.tracking.checkpoint_updates import CheckpointUpdate
from ray_ulysses.tracking.delivery import RunStatus, SpooledTracker


class Trackers:
    """Records one attempt with each of several trackers, or with none.

    None of them waits for another: each has a spool and a thread of its own.
    """

    def __init__(self, trackers: Sequence[SpooledTracker] = ()) -> None:
        self._trackers = tuple(trackers)

    def __bool__(self) -> bool:
        """Return whether anything is recorded."""
        return bool(self._trackers)

    def start(
        self, params: Mapping[str, object], tags: Mapping[str, object], files: Mapping[str, str] | None = None
    ) -> None:
        """Open the run, or continue that of an earlier attempt, as `SpooledTracker.start` says."""
        for one in self._trackers:
            one.start(params, tags, files)

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record metrics of a completed optimizer step."""
        for one in self._trackers:
            one.log_step(step, metrics)

    def log_checkpoint(self, update: CheckpointUpdate) -> None:
        """Record an update of the run's checkpoints."""
        for one in self._trackers:
            one.log_checkpoint(update)

    def finish(self, status: RunStatus, step: int = 0, metrics: Mapping[str, float] | None = None) -> None:
        """Record how the attempt ended, and wait a bounded time for pending deliveries of all at once."""
        self._at_once(lambda one: one.finish(status, step, metrics))

    def catch_up(
        self,
        update: CheckpointUpdate | None = None,
        *,
        status: RunStatus | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        """Deliver what earlier processes left, as `SpooledTracker.catch_up` does.

        Raises:
            OSError: A spool can't be read or written.
        """
        self._at_once(lambda one: one.catch_up(update, status=status, tags=tags))

    def _at_once(self, call: Callable[[SpooledTracker], object]) -> None:
        if len(self._trackers) == 1:
            call(self._trackers[0])
        elif self._trackers:
            with ThreadPoolExecutor(len(self._trackers)) as pool:
                for done in [pool.submit(call, one) for one in self._trackers]:
                    done.result()
