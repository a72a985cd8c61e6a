"""Watches the number of workers, reports what is waited for, and bounds the wait."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ray_ulysses.clock import Clock
from ray_ulysses.cluster.capacity import Demand, Node, displaced, hint, shortfall
from ray_ulysses.errors import RunError

_LOOK_EVERY_S = 1.0
_REMIND_EVERY_S = 60.0
_QUIET_S = 2.0
"""Workers that are restarted are missing for a moment, although no node was lost."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterView:
    """The cluster at one moment.

    Attributes:
        nodes: Nodes that are alive and not draining, with all of their resources.
        workers: Training workers of this command that have started.
    """

    nodes: tuple[Node, ...]
    workers: int


class WorkersMissing(RunError):
    """Workers have been missing for too long.

    Attributes:
        reason: How many have started, and what the nodes lack.
        hint: What a person can do about it.
    """

    def __init__(self, reason: str, hint: str) -> None:
        super().__init__(f"{reason}; {hint}")
        self.reason, self.hint = reason, hint


class WorkerWatch:
    """Knows whether all workers have started, and for how long some have been missing.

    Attributes:
        started: How many had started at the last look; ``None`` before the first.
    """

    def __init__(
        self,
        demand: Demand,
        *,
        limit_s: float,
        look: Callable[[], ClusterView | None],
        say: Callable[[str], object],
        clock: Clock,
        is_training: Callable[[], bool] = lambda: True,
    ) -> None:
        """Begin the wait for the first workers.

        Args:
            demand: The run's demand.
            limit_s: Longest wait for all workers, in seconds (``elastic.worker_start_timeout_s``).
            look: Returns the cluster's state; ``None`` if it does not answer now.
            say: Prints a line.
            clock: Time.
            is_training: Returns whether the workers' attempt has been heard of.
        """
        self._demand, self._limit_s, self._look, self._say, self._clock = demand, limit_s, look, say, clock
        self._is_training = is_training
        self._looked_at = -float("inf")
        self._said, self._said_at = "", -float("inf")
        self._displaced: str | None = None
        self._missing_since: float | None = clock.monotonic()
        self.started: int | None = None

    @property
    def is_whole(self) -> bool:
        """Whether every worker had started at the last look."""
        return self._missing_since is None

    def check(self) -> None:
        """Look if it is time to, and print what is waited for.

        Raises:
            WorkersMissing: Workers have been missing for too long.
        """
        now = self._clock.monotonic()
        if now - self._looked_at < _LOOK_EVERY_S:
            return
        self._looked_at = now
        view = self._look()
        if view is None:
            return
        self.started = view.workers
        wanted = self._demand.wanted
        # An elastic run may start with fewer workers than it could take: it has started when the attempt says so.
        if view.workers >= wanted.most or (view.workers >= wanted.least and self._is_training()):
            self._missing_since, self._said = None, ""
            lack = displaced(self._demand, view.nodes)
            if lack not in (None, self._displaced):
                self._displaced = lack
                self._say(f"warning: {lack}")
            return
        if self._missing_since is None:
            self._missing_since = now
        waited_s = now - self._missing_since
        lack = shortfall(self._demand, view.nodes)
        if waited_s >= self._limit_s:
            raise self._end(view, lack)
        is_news = lack != self._said or now - self._said_at >= _REMIND_EVERY_S
        if lack is not None and waited_s >= _QUIET_S and is_news:
            self._said, self._said_at = lack, now
            self._say(f"waiting up to {self._limit_s - waited_s:.0f} s for nodes: {lack}")

    def _end(self, view: ClusterView, lack: str | None) -> WorkersMissing:
        started = f"{view.workers} of {self._demand.setting}={self._demand.wanted.least} workers have started"
        reason = f"{started} after {self._limit_s:g} s (elastic.worker_start_timeout_s)"
        if lack is not None:
            return WorkersMissing(f"{reason}: {lack}", hint(self._demand, view.nodes))
        return WorkersMissing(
            f"{reason}: the nodes can hold them all, so other work occupies them (see `ray status`), or the workers "
            "start too slowly",
            "end the other work, or raise the limit",
        )
