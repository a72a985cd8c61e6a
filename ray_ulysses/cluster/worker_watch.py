"""Watches over the number of workers: what is awaited is said, and the wait for them ends in time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ray_ulysses.clock import Clock
from ray_ulysses.cluster.capacity import Demand, Node, hint, shortfall
from ray_ulysses.errors import RunError

_QUIET_S = 2.0
"""Workers that are started again are missing for a moment, without a node being lost."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterView:
    """What is there at a moment.

    Attributes:
        nodes: Nodes that are alive and stay, with all that they have.
        workers: Training workers of this command that have started.
    """

    nodes: tuple[Node, ...]
    workers: int


class WorkersMissing(RunError):
    """Workers have been missing for too long.

    Attributes:
        reason: How many are there, and what they lack.
        hint: What a person can do about it.
    """

    def __init__(self, reason: str, hint: str) -> None:
        super().__init__(f"{reason}; {hint}")
        self.reason, self.hint = reason, hint


class WorkerWatch:
    """Tells whether all workers are there, and for how long they have not been.

    Attributes:
        there: How many there were at the last look; ``None`` before the first.
    """

    def __init__(
        self,
        demand: Demand,
        *,
        limit_s: float,
        look: Callable[[], ClusterView | None],
        say: Callable[[str], object],
        clock: Clock,
        every_s: float = 1.0,
    ) -> None:
        """Prepare; the wait for the first workers begins now.

        Args:
            demand: What was asked for.
            limit_s: Longest wait for all workers, in seconds (``elastic.worker_start_timeout_s``).
            look: Returns what is there; ``None`` if the cluster does not say it now.
            say: Shows a line to the user.
            clock: Where the time comes from.
            every_s: Seconds between two looks.
        """
        self._demand, self._limit_s, self._look, self._say, self._clock = demand, limit_s, look, say, clock
        self._every_s, self._looked_at, self._said = every_s, -float("inf"), ""
        self._missing_since: float | None = clock.monotonic()
        self.there: int | None = None

    @property
    def is_whole(self) -> bool:
        """Whether every worker was there at the last look."""
        return self._missing_since is None

    def check(self) -> None:
        """Look, if it is time for it, and say what is awaited.

        Raises:
            WorkersMissing: They have been for too long.
        """
        now = self._clock.monotonic()
        if now - self._looked_at < self._every_s:
            return
        self._looked_at = now
        view = self._look()
        if view is None:
            return
        self.there = view.workers
        if view.workers >= self._demand.workers:
            self._missing_since, self._said = None, ""
            return
        if self._missing_since is None:
            self._missing_since = now
        waited_s = now - self._missing_since
        lack = shortfall(self._demand, view.nodes)
        if waited_s >= self._limit_s:
            raise self._end(view, lack)
        if lack is not None and waited_s >= _QUIET_S and lack != self._said:
            self._said = lack
            self._say(f"waiting up to {self._limit_s - waited_s:.0f} s for nodes: {lack}")

    def _end(self, view: ClusterView, lack: str | None) -> WorkersMissing:
        there = f"{view.workers} of cluster.workers={self._demand.workers} workers are there"
        reason = f"{there} after {self._limit_s:g} s (elastic.worker_start_timeout_s)"
        if lack is not None:
            return WorkersMissing(f"{reason}: {lack}", hint(self._demand, view.nodes))
        return WorkersMissing(
            f"{reason}: the nodes hold them all, so others use these places (`ray status` shows it), or the workers "
            "start too slowly",
            "end what else runs there, or raise the limit",
        )
