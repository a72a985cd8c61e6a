"""Whether a run is still this process's, asked all the time while others work for it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self

from ray_ulysses.errors import RunError

LOOK_EVERY_S = 1.0


class Hold(Protocol):
    """What keeps others from a run while this process has it."""

    @property
    def lost(self) -> bool:
        """Whether another process has it for certain."""
        ...

    def check(self) -> None:
        """Raise `RunError`, which says who has it, if this process does not."""
        ...


class LockWatch:
    """Looks at holds from a thread of its own, between ``with`` and the end of its block.

    A thread, because a file system that hangs must not take with it who waits for other things, too.
    """

    def __init__(self, holds: Sequence[Hold], *, every_s: float = LOOK_EVERY_S) -> None:
        """Prepare.

        Args:
            holds: What is to be held.
            every_s: Time between two looks, in seconds.
        """
        self._holds, self._every_s = tuple(holds), every_s
        self._problem: RunError | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep_looking, name="lock-watch", daemon=True)

    @property
    def problem(self) -> RunError | None:
        """Return who has the run now, once another process has; asks nobody."""
        return self._problem

    def look(self) -> None:
        """Look once; what only can't be asked at the moment is not lost."""
        for hold in self._holds:
            if self._problem is None and hold.lost:
                try:
                    hold.check()
                except RunError as error:
                    self._problem = error

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(self._every_s)

    def _keep_looking(self) -> None:
        while self._problem is None and not self._stop.wait(self._every_s):
            with contextlib.suppress(OSError):
                self.look()
