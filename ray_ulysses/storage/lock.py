"""File locks that the kernel releases when their process ends, and notes that identify the holder.

All file locking in the package goes through this module. It uses the kernel's `flock`, which a slow or stopped process
never loses. Runs are protected by `storage.claim` instead, which also works in object stores.
"""

from __future__ import annotations

import datetime
import errno
import fcntl
import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from ray_ulysses.clock import Clock
from ray_ulysses.storage.regular import open_inside, read_regular
from ray_ulysses.validation import ContentError, Seconds, Whole, read_json


class NoLocksError(OSError):
    """The file system does not support locks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LockOwner:
    """The process that holds a lock or claim, as recorded in its note."""

    host: str
    pid: Whole
    since: Seconds
    """Time of acquisition, in seconds since the epoch."""

    def __str__(self) -> str:
        when = datetime.datetime.fromtimestamp(self.since, datetime.UTC)
        return f"process {self.pid} on host {self.host} since {when:%Y-%m-%d %H:%M:%S} UTC"

    @classmethod
    def this_process(cls, clock: Clock) -> LockOwner:
        """Return the owner for this process, with the current time as the time of acquisition."""
        return cls(host=socket.gethostname(), pid=os.getpid(), since=clock.now())

    def to_note(self, **more: Any) -> bytes:
        """Return the note as JSON, with additional fields."""
        return json.dumps({**asdict(self), **more}).encode()


_OWNER = TypeAdapter(LockOwner)


def lock(descriptor: int, *, wait: bool = False) -> None:
    """Lock an open file exclusively, or ``wait`` until another process releases it.

    Raises:
        BlockingIOError: Another process holds the lock.
        NoLocksError: The file system does not support locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise BlockingIOError(errno.EWOULDBLOCK, error.strerror) from error
        raise NoLocksError(error.errno, error.strerror) from error


def lock_file(path: Path, within: Path | None = None) -> int:
    """Create a file if it is missing, lock it, and return a descriptor that holds the lock.

    Args:
        path: The path of the file, which must not be a symbolic link.
        within: The folder below which no symbolic link is followed; None for the file's own folder.

    Raises:
        BlockingIOError: Another process holds the lock.
        NoLocksError: The file system does not support locks.
        OSError: The file can't be opened.
    """
    while True:
        descriptor = open_inside(path, within or path.parent, os.O_RDWR | os.O_CREAT)
        try:
            lock(descriptor)
            if os.path.samestat(os.fstat(descriptor), os.lstat(path)):
                return descriptor
        except FileNotFoundError:
            # Another process deleted the file before this process locked it.
            pass
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)


def write_note(descriptor: int, note: bytes) -> None:
    """Replace the content of a locked file through the descriptor that holds the lock."""
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, note, 0)
    os.fsync(descriptor)


def read_owner(path: Path) -> LockOwner | None:
    """Return the owner recorded in a lock file, or None if the file is missing, unreadable or damaged."""
    try:
        return read_json(_OWNER, read_regular(path, path.parent))
    except (OSError, ContentError):
        return None
