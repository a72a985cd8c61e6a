"""One writer per run directory, a file lock on a path or a lease in an object store, and a watch over it."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, Self

from ray_ulysses.errors import RunError
from ray_ulysses.storage.lease import RunLease, living_holder
from ray_ulysses.storage.lock import LockOwner, RunLock, lock_owner
from ray_ulysses.storage.place import Place, RemotePath, place_of

_RETRY_S = 10.0
LOOK_EVERY_S = 1.0


def run_hold(run_dir: Place) -> RunLock | RunLease:
    """Return a hold of a run's directory for this process; nothing is taken before it is entered."""
    if isinstance(run_dir, Path):
        return RunLock(run_dir)
    return RunLease(run_dir.open_store(_RETRY_S), run=run_dir.name, setting="run.storage")


def current_owner(run_dir: str | os.PathLike[str] | RemotePath) -> LockOwner | None:
    """Return who holds a run at the moment, or None if no live process does; takes nothing.

    In an object store, whoever was killed within the last minutes is watched for half a lease's time.
    """
    place = place_of(run_dir)
    return lock_owner(place) if isinstance(place, Path) else living_holder(place.open_store(_RETRY_S))


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
