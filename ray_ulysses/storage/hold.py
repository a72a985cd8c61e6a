"""One writer per run directory: a file lock on a path, a lease in an object store."""

from __future__ import annotations

import os
from pathlib import Path

from ray_ulysses.storage.file_lock import LockOwner
from ray_ulysses.storage.lease import RunLease, living_holder
from ray_ulysses.storage.lock import RunLock, lock_owner
from ray_ulysses.storage.place import Place, RemotePath, place_of

_RETRY_S = 10.0


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
