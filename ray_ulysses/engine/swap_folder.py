"""A private swap folder per process, which is deleted after the process ends."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from ray_ulysses.storage.lock import lock, lock_file
from ray_ulysses.storage.regular import NotAPlainFileError, open_inside

LOCK_FILE = "in-use"
_PREFIX = "process-"


class SwapFolder:
    """A new folder under a root on a local disk, locked until it is closed or the process ends.

    Two attempts of a run may be alive on one node for a while, the older one unaware that it was given up. If they
    shared files, they would overwrite each other's state. Folders of dead processes are deleted first.

    Args:
        root: The run's swap directory, created if missing.

    Raises:
        OSError: The root is not writable.
    """

    def __init__(self, root: Path) -> None:
        root.mkdir(parents=True, exist_ok=True)
        # One process at a time, since a new folder is not locked yet.
        with os.fdopen(open_inside(root / LOCK_FILE, root, os.O_RDWR | os.O_CREAT)) as turn:
            lock(turn.fileno(), wait=True)
            for folder in root.glob(f"{_PREFIX}*"):
                _delete_if_dead(folder)
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))
            self._lock = lock_file(self.path / LOCK_FILE)

    def close(self) -> None:
        """Delete the folder; call once, after the last swap."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _delete_if_dead(folder: Path) -> None:
    """Delete a folder unless the process that locked it is alive."""
    try:
        descriptor = lock_file(folder / LOCK_FILE, folder.parent)
    except (BlockingIOError, FileNotFoundError, NotAPlainFileError):
        # Its owner is alive, or has just deleted it; or it is a link, which is not ours.
        return
    shutil.rmtree(folder, ignore_errors=True)
    os.close(descriptor)
