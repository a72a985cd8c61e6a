"""One child as its supervisor knows it: what it was started with, what was heard of it, and whether it is stopped."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from ray_ulysses.supervision.launcher_process import StopTimer, process_state
from ray_ulysses.supervision.order import Order, Result
from ray_ulysses.supervision.shared_progress import SharedProgress

PROCESS_STOPPED = "its process was stopped (SIGSTOP)"
LAUNCHER_STOPPED = "its launcher was stopped (SIGSTOP)"
_STOPPED_S = 1.0
"""A process that is stopped (SIGSTOP) for this long is treated as failed."""


@dataclass
class WatchedChild:
    """The child of one generation."""

    order: Order
    progress: SharedProgress
    stacks: int
    started_at: float
    pid: int | None = None
    is_launcher: bool = False
    result: Result | None = None
    failure: str | None = None
    is_reported: bool = False
    stop_timer: StopTimer = field(default_factory=lambda: StopTimer(_STOPPED_S))
    kill_at: float | None = None
    stacks_at: float | None = None

    def find_stop(self, launcher: int, now: float) -> str | None:
        """Return what has been stopped for long: the process, or its launcher, which then says nothing of its end.

        Args:
            launcher: Process id of the launcher.
            now: Monotonic seconds.
        """
        assert self.pid is not None
        processes = {PROCESS_STOPPED: self.pid, LAUNCHER_STOPPED: launcher}
        stopped = next((text for text, pid in processes.items() if process_state(pid) == "T"), None)
        return stopped if self.stop_timer.is_up(now, is_stopped=stopped is not None) else None

    def close(self) -> None:
        """Give back what is shared with it."""
        self.progress.close()
        os.close(self.stacks)
