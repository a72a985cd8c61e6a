"""A folder for what one process swaps out: nobody else's, and taken away when the process is gone."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from ray_ulysses.storage.file_lock import lock, lock_file

LOCK_FILE = "in-use"
_PREFIX = "process-"


class SwapFolder:
    """A new folder under a root on a local disk, locked until it is closed or the process ends.

    Two attempts of a run may live on one node for a while, the older one unaware that it was given up: sharing files,
    they would overwrite each other's state. What dead processes left behind is deleted first.

    Args:
        root: The directory that the run swaps to; it is made where it is missing.

    Raises:
        OSError: The root can't be written.
    """

    def __init__(self, root: Path) -> None:
        root.mkdir(parents=True, exist_ok=True)
        # One at a time: a folder that is being made is not locked yet.
        with open(root / LOCK_FILE, "w") as turn:
            lock(turn.fileno(), wait=True)
            for folder in root.glob(f"{_PREFIX}*"):
                _delete_if_dead(folder)
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))
            self._lock = lock_file(self.path / LOCK_FILE)

    def close(self) -> None:
        """Delete the folder, once; nothing may be swapped in any more."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _delete_if_dead(folder: Path) -> None:
    """Delete a folder unless the process that locked it still lives."""
    try:
        descriptor = lock_file(folder / LOCK_FILE)
    except (BlockingIOError, FileNotFoundError):
        # Its owner lives, or has just deleted it.
        return
    shutil.rmtree(folder, ignore_errors=True)
    os.close(descriptor)
