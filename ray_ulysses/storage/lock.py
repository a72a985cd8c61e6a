"""Locks of files, which end with their process, and notes that name a holder.

Everything that locks a file does it here. The lock is the kernel's `flock`, which is never taken from a slow or stopped
process. A run is held by `storage.claim` instead, which object stores know as well.
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
    """A file system refused a lock that nobody holds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LockOwner:
    """The holder of a lock, as recorded in its note."""

    host: str
    pid: Whole
    since: Seconds
    """When it was taken, since the Unix epoch."""

    def __str__(self) -> str:
        when = datetime.datetime.fromtimestamp(self.since, datetime.UTC)
        return f"process {self.pid} on host {self.host} since {when:%Y-%m-%d %H:%M:%S} UTC"

    @classmethod
    def this_process(cls, clock: Clock) -> LockOwner:
        """Return this process, from now on."""
        return cls(host=socket.gethostname(), pid=os.getpid(), since=clock.now())

    @classmethod
    def from_note(cls, note: bytes) -> LockOwner | None:
        """Return the owner in a note; None if it is torn or empty."""
        try:
            return read_json(_OWNER, note)
        except ContentError:
            return None

    def to_note(self, **more: Any) -> bytes:
        """Return the note, with more fields."""
        return json.dumps({**asdict(self), **more}).encode()


_OWNER = TypeAdapter(LockOwner)


def lock(descriptor: int, *, wait: bool = False) -> None:
    """Take the lock of an open file; wait while somebody else holds it, or raise.

    Raises:
        BlockingIOError: Somebody else holds it.
        NoLocksError: Its file system has no locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise BlockingIOError(errno.EWOULDBLOCK, error.strerror) from error
        raise NoLocksError(error.errno, error.strerror) from error


def lock_file(path: Path, within: Path | None = None) -> int:
    """Return a descriptor that holds the lock of a file, which is created if it is missing.

    Args:
        path: The file; a link in its place is not followed.
        within: The folder below which no other link is followed either; None for the file's own folder.

    Raises:
        BlockingIOError: Somebody else holds it.
        NoLocksError: Its file system has no locks.
        OSError: It can't be opened.
    """
    while True:
        descriptor = open_inside(path, within or path.parent, os.O_RDWR | os.O_CREAT)
        try:
            lock(descriptor)
            if os.path.samestat(os.fstat(descriptor), os.lstat(path)):
                return descriptor
        except FileNotFoundError:
            # Somebody deleted it in between.
            pass
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)


def write_note(descriptor: int, note: bytes) -> None:
    """Replace the content of a lock file, through the descriptor that holds the lock."""
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, note, 0)
    os.fsync(descriptor)


def read_owner(path: Path) -> LockOwner | None:
    """Return the owner that the note names; None where there is no note."""
    try:
        return LockOwner.from_note(read_regular(path, path.parent))
    except OSError:
        return None
