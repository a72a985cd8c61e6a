"""Files that are being written: their names, who still writes them, and the sweep of those whose writer died.

A writer holds an `flock` on its temporary file from before the first byte until the file has its name. The kernel
(on NFS the server) gives a dead writer's lock back, and never a stopped or slow one's. So whoever gets the lock knows
that nobody writes any more; a file's age alone would not tell.
"""

from __future__ import annotations

import os
import time
import uuid
from contextlib import suppress
from pathlib import Path

from ray_ulysses.storage.file_lock import lock
from ray_ulysses.storage.regular import opened_folder

TEMPORARY_PREFIX = ".writing-"
# A writer has its file for an instant before it has the lock; only younger files can be in that instant.
SETTLE_S = 600.0


def temporary_name() -> str:
    """Return a new name for a file that is being written."""
    return f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}"


def left_temporaries(folder: Path) -> list[Path]:
    """Return what writers that were killed have left in a folder, and what others may be writing there."""
    return list(folder.glob(f"{TEMPORARY_PREFIX}*"))


def mark_as_written(descriptor: int) -> None:
    """Take the writer's lock on a temporary file; a file system without locks leaves it unmarked, and unswept."""
    with suppress(OSError):
        lock(descriptor)


def sweep_temporaries(folder: Path, within: Path | None = None, *, settle_s: float = SETTLE_S) -> tuple[Path, ...]:
    """Delete what dead writers left at or below a folder; what a live writer holds stays, however old it is.

    Args:
        folder: Where to look; an absent folder is an empty one.
        within: A folder that holds it, below which no link is followed; None for the folder itself.
        settle_s: Files changed within this time stay too, in seconds.

    Returns:
        What was deleted, sorted. A file that can't be inspected or deleted is left.
    """
    swept = []
    with suppress(OSError), opened_folder(folder, within or folder) as top:
        for parent, _, names, descriptor in os.fwalk(".", dir_fd=top):
            found = (name for name in names if name.startswith(TEMPORARY_PREFIX))
            swept += [folder / parent / name for name in found if _sweep(name, descriptor, settle_s)]
    return tuple(sorted(swept))


def _sweep(name: str, folder: int, settle_s: float) -> bool:
    """Delete one file if nobody writes it; return whether it was deleted."""
    try:
        # Open for writing: NFS gives an exclusive lock on nothing less.
        descriptor = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except OSError:
        return False
    try:
        if time.time() - os.fstat(descriptor).st_mtime < settle_s:
            return False
        lock(descriptor)
        os.unlink(name, dir_fd=folder)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True
