"""The lock that keeps two preparations from writing to one directory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ray_ulysses.errors import UserError
from ray_ulysses.storage.atomic import make_folders
from ray_ulysses.storage.file_lock import LockOwner, NoLocksError, lock_file
from ray_ulysses.storage.patience import PATIENCE, Patience, is_transient

LOCK_FILE = ".prepare.lock"


@contextmanager
def directory_lock(directory: Path, patience: Patience = PATIENCE) -> Iterator[None]:
    """Hold a directory for one preparation; its lock file is gone afterwards.

    Raises:
        UserError: Another process prepares there (the text says which), or the directory can't be written.
        StorageAwayError: Its storage was away for too long.
    """
    path = directory / LOCK_FILE
    note = LockOwner.this_process(patience.clock).to_note()
    descriptor = patience.call(path, lambda: _take(path, note))
    try:
        yield
    finally:
        # Unlinked while it is held: whoever opened it meanwhile finds, once it has the lock, that the name is gone.
        # A name that a failing storage keeps holds nobody back: the next preparation takes it over.
        with suppress(OSError):
            path.unlink()
        # The descriptor is gone, and the lock with it, also where closing fails.
        with suppress(OSError):
            os.close(descriptor)


def _take(path: Path, note: bytes) -> int:
    """Return the descriptor that holds the lock, and say in the file who holds it."""
    try:
        make_folders(path.parent)
        descriptor = lock_file(path)
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, note, 0)
        except OSError:
            with suppress(OSError):
                os.close(descriptor)
            raise
    except BlockingIOError as error:
        raise UserError(
            f"out={path.parent}: is being prepared already, by {_owner(path)}; wait for it or stop it, "
            "or choose another directory"
        ) from error
    except OSError as error:
        if is_transient(error):
            raise
        if isinstance(error, NoLocksError):
            raise UserError(
                f"out={path.parent}: its file system gives no locks ({error.strerror}); mount it with locks, "
                "or choose another directory"
            ) from error
        raise UserError(
            f"out={path.parent}: can't be written ({error.strerror}); choose a directory you may write"
        ) from error
    return descriptor


def _owner(path: Path) -> LockOwner | str:
    with suppress(OSError):
        return LockOwner.from_note(path.read_bytes()) or _UNNAMED
    return _UNNAMED


_UNNAMED = "another process that has not left its name yet"
