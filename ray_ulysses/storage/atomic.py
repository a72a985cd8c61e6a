"""Files that appear whole or not at all and outlive a power cut: written beside their place, synced, published.

A writer holds an `flock` on its temporary file from before the first byte until the file has its name. The kernel
(on NFS the server) gives a dead writer's lock back, and never a stopped or slow one's. So a process that
gets the lock knows that the writer is gone; the age of the file alone would not tell.
"""

from __future__ import annotations

import errno
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import RawIOBase
from pathlib import Path

from ray_ulysses.storage.lock import lock
from ray_ulysses.storage.regular import opened_folder, sync
from ray_ulysses.storage.store import Buffer

TEMPORARY_PREFIX = ".writing-"
# A writer has its file for an instant before it has the lock; only younger files can be in that instant.
SETTLE_S = 600.0


def sweep_temporaries(folder: Path, within: Path | None = None, *, settle_s: float = SETTLE_S) -> tuple[Path, ...]:
    """Delete temporary files of dead writers at or below a folder; those of live writers stay, however old they are.

    Args:
        folder: Where to look; an absent folder is an empty one.
        within: A folder that holds it, below which no link is followed; None for the folder itself.
        settle_s: Files changed within this time stay too, in seconds.

    Returns:
        The deleted files, sorted. A file that can't be inspected or deleted is left.
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


@contextmanager
def atomic_file(path: Path, within: Path | None = None) -> Iterator[Path]:
    """Give an empty file beside ``path`` to write; give it its name when the block ends without an error.

    Its temporary name is new each time, so that a retried task and its predecessor, which may still be writing on
    another node, never write into one file. The file is synced before it is published: a reader sees the whole file or
    none, also after a power cut; which of the two is settled when its folder is synced.

    Args:
        path: The file.
        within: The folder below which no link is followed; None for the file's own folder. It is made if it is missing.
    """
    within = within or path.parent
    make_folders(within)
    with (
        opened_folder(path.parent, within, make=True) as folder,
        unpublished_file(path.name, folder) as (temporary, _),
    ):
        yield path.parent / temporary


@contextmanager
def unpublished_file(name: str, folder: int, *, is_new: bool = False) -> Iterator[tuple[str, int]]:
    """Like `atomic_file`, in an opened folder; yield the temporary name, and a descriptor of the file.

    Args:
        name: The file's name.
        folder: A descriptor of its folder.
        is_new: Whether a file that is there already is an error (FileExistsError); otherwise it is replaced.
    """
    temporary = f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}"
    descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=folder)
    try:
        # A file system without locks leaves it unmarked, and unswept.
        with suppress(OSError):
            lock(descriptor)
        yield temporary, descriptor
        os.fsync(descriptor)
        # A rename would silently replace a file that has to be new.
        (os.link if is_new else os.replace)(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    finally:
        # An error of the clean-up must not hide the first one.
        with suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        with suppress(OSError):
            os.close(descriptor)


def write_text(path: Path, text: str, within: Path | None = None) -> None:
    """Write ``text`` as UTF-8, whole or not at all; it is there after a power cut, too. See `atomic_file`."""
    with atomic_file(path, within) as temporary:
        temporary.write_text(text, encoding="utf-8")
    sync(path.parent)


def write_all(stream: RawIOBase, chunk: Buffer) -> int:
    """Write a whole chunk and return its size in bytes; the kernel may take less at a time (2 GiB at most)."""
    left = memoryview(chunk).cast("B")
    size = left.nbytes
    while left.nbytes:
        left = left[stream.write(left) :]
    return size


def make_folders(folder: Path) -> None:
    """Create a folder and its parents so that they outlive a power cut."""
    missing = []
    while not folder.is_dir():
        if folder.exists() and not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
        missing.append(folder)
        folder = folder.parent
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        sync(path.parent)
