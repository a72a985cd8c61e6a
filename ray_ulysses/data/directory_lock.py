"""One ``prepare`` a directory: an advisory lock that dies with its process."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from ray_ulysses.clock import Clock, SystemClock
from ray_ulysses.errors import UserError
from ray_ulysses.storage import LockOwner

LOCK_FILE = ".prepare.lock"


@contextmanager
def directory_lock(directory: Path, clock: Clock | None = None) -> Iterator[None]:
    """Hold a directory for one preparation; its lock file is gone afterwards.

    The kernel's ``flock`` decides, so a process that died holds nothing.

    Raises:
        UserError: Another process prepares there (the text says which), or the directory can't be written.
    """
    path = directory / LOCK_FILE
    descriptor = _take(path)
    try:
        now = (clock if clock is not None else SystemClock()).now()
        owner = LockOwner(host=socket.gethostname(), pid=os.getpid(), since=now)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(asdict(owner)).encode(), 0)
        yield
    finally:
        # Unlinked while it is held: whoever opened it meanwhile finds, once it has the lock, that the name is gone.
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _take(path: Path) -> int:
    """Return the descriptor that holds the lock of the file which has the name."""
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise UserError(
                f"out={path.parent}: can't be written ({error.strerror}); choose a directory you may write"
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            raise _refusal(path, error) from error
        if _is_named(path, descriptor):
            return descriptor
        os.close(descriptor)


def _is_named(path: Path, descriptor: int) -> bool:
    try:
        named = path.stat()
    except FileNotFoundError:
        return False
    return os.path.samestat(named, os.fstat(descriptor))


def _refusal(path: Path, error: OSError) -> UserError:
    if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
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
