"""One ``prepare`` a directory: an advisory lock that dies with its process."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

from ray_ulysses.clock import Clock, SystemClock
from ray_ulysses.errors import UserError
from ray_ulysses.storage import LockOwner
from ray_ulysses.storage.local import make_folders
from ray_ulysses.storage.patience import Patience, is_transient

LOCK_FILE = ".prepare.lock"


@contextmanager
def directory_lock(directory: Path, clock: Clock | None = None, patience: Patience | None = None) -> Iterator[None]:
    """Hold a directory for one preparation; its lock file is gone afterwards.

    The kernel's ``flock`` decides, so a process that died holds nothing.

    Raises:
        UserError: Another process prepares there (the text says which), or the directory can't be written.
        StorageAwayError: Its storage was away for too long.
    """
    path = directory / LOCK_FILE
    now = (clock if clock is not None else SystemClock()).now()
    owner = LockOwner(host=socket.gethostname(), pid=os.getpid(), since=now)
    descriptor = (patience if patience is not None else Patience()).call(path, lambda: _take(path, owner))
    try:
        yield
    finally:
        # Unlinked while it is held: whoever opened it meanwhile finds, once it has the lock, that the name is gone.
        # A name that a failing storage keeps holds nobody back: the next preparation takes it over.
        with suppress(OSError):
            path.unlink()
        _close(descriptor)


def _take(path: Path, owner: LockOwner) -> int:
    """Return the descriptor that holds the lock of the file which has the name.

    Raises:
        OSError: The storage is away.
    """
    while True:
        try:
            make_folders(path.parent)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise _unwritable(path, error) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            _close(descriptor)
            raise _refusal(path, error) from error
        try:
            if _is_named(path, descriptor):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, json.dumps(asdict(owner)).encode(), 0)
                return descriptor
        except OSError as error:
            _close(descriptor)
            raise _unwritable(path, error) from error
        _close(descriptor)


def _close(descriptor: int) -> None:
    # The descriptor is gone, and the lock with it, also where closing fails.
    with suppress(OSError):
        os.close(descriptor)


def _unwritable(path: Path, error: OSError) -> Exception:
    if is_transient(error):
        return error
    return UserError(f"out={path.parent}: can't be written ({error.strerror}); choose a directory you may write")


def _is_named(path: Path, descriptor: int) -> bool:
    try:
        named = path.stat()
    except FileNotFoundError:
        return False
    return os.path.samestat(named, os.fstat(descriptor))


def _refusal(path: Path, error: OSError) -> Exception:
    if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
        if is_transient(error):
            return error
        return UserError(
            f"out={path.parent}: its file system gives no locks ({error.strerror}); mount it with locks, "
            "or choose another directory"
        )
    return UserError(
        f"out={path.parent}: is being prepared already, by {_owner(path)}; wait for it or stop it, "
        "or choose another directory"
    )


def _owner(path: Path) -> str:
    try:
        return str(LockOwner(**json.loads(path.read_text(encoding="utf-8"))))
    except (OSError, ValueError, TypeError):
        return "another process that has not left its name yet"
