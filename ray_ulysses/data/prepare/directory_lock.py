"""Locks an output directory, so that only one preparation writes to it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ray_ulysses.errors import UserError
from ray_ulysses.storage.atomic import make_folders
from ray_ulysses.storage.lock import LockOwner, NoLocksError, lock_file, read_owner, write_note
from ray_ulysses.storage.patience import PATIENCE, Patience, is_transient

LOCK_FILE = ".prepare.lock"


@contextmanager
def directory_lock(directory: Path, patience: Patience = PATIENCE) -> Iterator[None]:
    """Lock a directory for one preparation; the lock file is removed afterwards.

    Raises:
        UserError: Another process, named in the text, prepares there, or the directory can't be written.
        StorageAwayError: Its storage did not answer in time.
    """
    path = directory / LOCK_FILE
    note = LockOwner.this_process(patience.clock).to_note()
    descriptor = patience.call(path, lambda: _take(path, note))
    try:
        yield
    finally:
        # Unlinked while locked: a process that opened it meanwhile finds, once it has the lock, that the name is gone.
        # If unlinking fails, the next preparation locks the same file.
        with suppress(OSError):
            path.unlink()
        # The lock is released with the descriptor, even if closing fails.
        with suppress(OSError):
            os.close(descriptor)


def _take(path: Path, note: bytes) -> int:
    """Return the descriptor that holds the lock, and write its owner into the file."""
    try:
        make_folders(path.parent)
        descriptor = lock_file(path)
        try:
            write_note(descriptor, note)
        except OSError:
            with suppress(OSError):
                os.close(descriptor)
            raise
    except BlockingIOError as error:
        owner = read_owner(path) or "another process that has not written its name yet"
        raise UserError(
            f"--out={path.parent}: is already being prepared by {owner}; wait for it or stop it, "
            "or choose another directory"
        ) from error
    except OSError as error:
        if is_transient(error):
            raise
        if isinstance(error, NoLocksError):
            raise UserError(
                f"--out={path.parent}: its file system does not support locks ({error.strerror}); mount it with locks, "
                "or choose another directory"
            ) from error
        raise UserError(
            f"--out={path.parent}: can't be written ({error.strerror}); choose a writable directory"
        ) from error
    return descriptor
