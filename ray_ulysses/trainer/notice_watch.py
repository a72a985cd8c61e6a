"""Watches one rank's notices that nodes will be taken away, and decides when they make a checkpoint due."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

from ray_ulysses.checkpoint.notice import Notice, NoticedSave, notice_asks

if TYPE_CHECKING:
    from ray_ulysses.run.requests import RequestWatch
    from ray_ulysses.trainer.worker import Worker

_RECENT_STEPS = 10


class NoticeWatch:
    """Remembers the saves that were made for notices; every rank creates one and reports the same saves to it.

    Attributes:
        notice: This rank's notice at the last look.
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

        Args:
            failed: The newest save has ended without a commit.
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
