"""Atomic, durable file writes: write a temporary file in the target's folder, sync it, then rename or link it.

A writer holds an `flock` on its temporary file from the first byte until the file is published. The kernel (the server
on NFS) releases the lock when the writer dies, but not while the writer is slow or stopped. A process that acquires the
lock therefore knows that the writer is dead. The file's age alone would not prove that.
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
# A writer creates its file shortly before it locks the file, so a young unlocked file may have a live writer.
SETTLE_S = 600.0


def sweep_temporaries(folder: Path, within: Path | None = None, *, settle_s: float = SETTLE_S) -> tuple[Path, ...]:
    """Delete the temporary files of dead writers in a folder tree. Files of live writers are kept, however old.

    Args:
        folder: The root of the folder tree. A missing folder is treated as empty.
        within: An ancestor of ``folder`` below which no symbolic link is followed; None for ``folder`` itself.
        settle_s: Minimum time since a file's last modification, in seconds, before the file may be deleted.

    Returns:
        The deleted files, sorted. Files that can't be inspected or deleted are skipped.
    """
    swept = []
    with suppress(OSError), opened_folder(folder, within or folder) as top:
        for parent, _, names, descriptor in os.fwalk(".", dir_fd=top):
            found = (name for name in names if name.startswith(TEMPORARY_PREFIX))
            swept += [folder / parent / name for name in found if _sweep(name, descriptor, settle_s)]
    return tuple(sorted(swept))


def _sweep(name: str, folder: int, settle_s: float) -> bool:
    try:
        # NFS grants an exclusive lock only on a file that is open for writing.
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
    """Yield the path of an empty temporary file, and rename the file to ``path`` if the block ends without an error.

    Each call uses a new temporary name, because a retried task's predecessor may still be writing on another node.
    The file is synced before the rename, so readers see the complete file or no file, even after a power cut. The
    rename itself is durable only after the caller has synced the folder.

    Args:
        path: The final path.
        within: The folder below which no symbolic link is followed, created if missing; None for the file's folder.
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
    """Yield a temporary file's name and descriptor, and publish the file as ``name`` if the block succeeds.

    Args:
        name: The final file name.
        folder: A descriptor of the folder.
        is_new: If True, raise FileExistsError when ``name`` exists; otherwise replace the existing file.
    """
    temporary = f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}"
    descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=folder)
    try:
        # On a file system without locks the file stays unlocked, and `sweep_temporaries` never deletes it.
        with suppress(OSError):
            lock(descriptor)
        yield temporary, descriptor
        os.fsync(descriptor)
        # Unlike a rename, a hard link fails if the name exists.
        (os.link if is_new else os.replace)(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    finally:
        # A cleanup error must not mask the original error.
        with suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        with suppress(OSError):
            os.close(descriptor)


def write_text(path: Path, text: str, within: Path | None = None) -> None:
    """Write ``text`` to a file as UTF-8, atomically and durably; see `atomic_file`."""
    with atomic_file(path, within) as temporary:
        temporary.write_text(text, encoding="utf-8")
    sync(path.parent)


def write_all(stream: RawIOBase, chunk: Buffer) -> int:
    """Write a complete chunk and return its size in bytes. One ``write`` call may write less, and at most 2 GiB."""
    left = memoryview(chunk).cast("B")
    size = left.nbytes
    while left.nbytes:
        left = left[stream.write(left) :]
    return size


def make_folders(folder: Path) -> None:
    """Create a folder and its missing parents durably."""
    missing = []
    while not folder.is_dir():
        if folder.exists() and not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
        missing.append(folder)
        folder = folder.parent
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        sync(path.parent)
