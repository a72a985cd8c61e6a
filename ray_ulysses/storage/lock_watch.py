"""Watches in a background thread whether this process still holds its run."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import Protocol, Self

from ray_ulysses.errors import RunError

LOOK_EVERY_S = 1.0


class Hold(Protocol):
    """An exclusive hold of a run by this process."""

    @property
    def lost(self) -> bool:
        """Return whether another process certainly holds it."""
        ...

    def check(self) -> None:
        """Raise `RunError`, which says who has it, if this process does not."""
        ...


class LockWatch:
    """Checks holds periodically in a thread of its own, for the duration of a ``with`` block.

    It is a thread so that a file system that hangs does not block the caller as well.
    """

    def __init__(self, holds: Sequence[Hold], *, every_s: float = LOOK_EVERY_S) -> None:
        """Store the holds; the thread starts with the ``with`` block.

        Args:
            holds: Holds to watch.
            every_s: Time between two checks, in seconds.
        """
        self._holds, self._every_s = tuple(holds), every_s
        self._problem: RunError | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep_looking, name="lock-watch", daemon=True)

    @property
    def problem(self) -> RunError | None:
        """The error that names the new owner, once another process has taken the run; no I/O."""
        return self._problem

    def look(self) -> None:
        """Check once; a hold that can't be checked at the moment does not count as lost."""
        for hold in self._holds:
            if self._problem is None and hold.lost:
                try:
                    hold.check()
                except RunError as error:
                    self._problem = error

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(self._every_s)

    def _keep_looking(self) -> None:
        while self._problem is None and not self._stop.wait(self._every_s):
            with contextlib.suppress(OSError):
                self.look()
