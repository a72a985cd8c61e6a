"""One writer per run or directory: a lock that ends with its process, and a note that names its owner.

Everything that locks a file does it here. The lock is the kernel's `flock`, which is never taken from a slow or stopped
process. On NFS the server keeps it.
"""

from __future__ import annotations

import datetime
import errno
import fcntl
import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Self

from pydantic import TypeAdapter

from ray_ulysses.clock import Clock, SystemClock
from ray_ulysses.errors import RunError, UserError
from ray_ulysses.storage.regular import NotAPlainFileError, open_inside, read_regular
from ray_ulysses.validation import ContentError, Seconds, Whole, read_json

LOCK_FILE = "run.lock"
MOUNT_TABLE = Path("/proc/self/mountinfo")
_NFS = {"nfs", "nfs4"}
# nfs(5): with these each host keeps its own flocks, so that two hosts can hold the same lock.
_LOCAL_LOCKS = {"nolock", "local_lock=all", "local_lock=flock"}


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
        """Return whom a note names; a torn or empty one names nobody."""
        try:
            return read_json(_OWNER, note)
        except ContentError:
            return None

    def to_note(self, **more: Any) -> bytes:
        """Return the note, with what else it is to say."""
        return json.dumps({**asdict(self), **more}).encode()


_OWNER = TypeAdapter(LockOwner)


def lock(descriptor: int, *, shared: bool = False, wait: bool = False) -> None:
    """Take the lock of an open file, together with others if it is shared; wait while somebody else holds it, or raise.

    Raises:
        BlockingIOError: Somebody else holds it.
        NoLocksError: Its file system gives none.
    """
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise BlockingIOError(errno.EWOULDBLOCK, error.strerror) from error
        raise NoLocksError(error.errno, error.strerror) from error


def lock_file(path: Path, within: Path | None = None) -> int:
    """Return a descriptor that holds the lock of the file that has a name; the file is made where it is missing.

    Args:
        path: The file; a link in its place is not followed.
        within: The folder below which no other link is followed either; None for the file's own folder.

    Raises:
        BlockingIOError: Somebody else holds it.
        NoLocksError: Its file system gives none.
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


class RunLock:
    """Holds a run directory for this process until it is released or the process ends.

    The kernel's `flock` decides, never the note's age: a dead owner's lock is free at once, and a slow or stopped
    owner's lock is never taken away. On NFS the server decides: it frees the locks of a host that died when that
    host's lease ends (about 90 s with NFS 4; NFS 3 waits for the host to come back), and it may give away the lock of
    a host that it lost sight of, which `held` tells.

    Attributes:
        run_dir: The run's directory.
        taken_over_from: The owner that died without releasing, if the note names one.
    """

    def __init__(self, run_dir: Path | str, clock: Clock | None = None, *, setting: str = "run.storage") -> None:
        """Prepare a lock; nothing is touched yet.

        Args:
            run_dir: The directory.
            clock: The time, and how to wait.
            setting: The setting that gave it, for errors.
        """
        self.run_dir = Path(run_dir)
        self._setting = setting
        self.taken_over_from: LockOwner | None = None
        self._clock = clock if clock is not None else SystemClock()
        self._descriptor: int | None = None
        self._owner: LockOwner | None = None
        self._note = b""

    def acquire(self) -> None:
        """Take the run.

        Raises:
            UserError: Another live process holds it (the text says who and since when), or the directory can't be
                written, or its file system has no locks that hold between hosts.
        """
        assert self._descriptor is None, "the lock is held already"
        path = self.run_dir / LOCK_FILE
        self._descriptor = self._locked(path)
        self.taken_over_from = read_owner(path)
        self._owner = LockOwner.this_process(self._clock)
        self._note = self._owner.to_note()
        try:
            write_note(self._descriptor, self._note)
        except OSError as error:
            # A disk may be full, and without a note nobody could say who holds the run.
            os.close(self._descriptor)
            self._descriptor = None
            raise self._unwritable(error) from error

    @property
    def held(self) -> bool:
        """Return whether this process still holds the run, as far as the file system says."""
        if self._descriptor is None:
            return False
        try:
            named = os.stat(self.run_dir / LOCK_FILE)
            opened = os.fstat(self._descriptor)
            note = os.pread(self._descriptor, 4096, 0)
        except OSError:
            # A host that the NFS server lost sight of gets an error here.
            return False
        return os.path.samestat(named, opened) and note == self._note

    @property
    def lost(self) -> bool:
        """Return whether another process has recorded since that it holds the run.

        Unlike `held` being false, that is certain: a file system that does not answer, and a lock file that somebody
        has deleted, leave the run with this process for as long as nobody comes.
        """
        if self._descriptor is None:
            return False
        owner = read_owner(self.run_dir / LOCK_FILE)
        return owner is not None and owner != self._owner

    def check(self) -> None:
        """Raise `RunError` if this process holds the run no more."""
        if self.lost or not self.held:
            owner = read_owner(self.run_dir / LOCK_FILE)
            raise RunError(
                f"run {self.run_dir.name!r} is no longer held by this process: "
                + (f"it was taken over by {owner}" if owner is not None else f"its {LOCK_FILE} is gone")
            )

    def release(self) -> None:
        """Give the run back; releasing twice does nothing."""
        if self._descriptor is None:
            return
        # The file stays, so that a process that waits for it need not open another.
        try:
            if self.held:
                write_note(self._descriptor, b"")
        finally:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _locked(self, path: Path) -> int:
        """Return a descriptor that holds the lock of the file that has the name, and not of one that had it."""
        try:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            option = local_lock_option(self.run_dir.resolve(), read_mount_table())
        except OSError as error:
            raise self._unwritable(error) from error
        if option is not None:
            raise UserError(
                f"{self._setting}: {self.run_dir.parent} is mounted with {option}, so two hosts could write the same "
                f"run; mount it without that option or set another {self._setting}"
            )
        # Imported here, since it imports pyarrow, which readers of a configuration don't need.
        from ray_ulysses.storage.patience import Patience

        # `lock_owner` of a process that only inspects the run holds the lock for an instant.
        waiting = Patience(wait_s=0.75, first_pause_s=0.05, longest_pause_s=0.4, clock=self._clock).begin()
        while True:
            try:
                return lock_file(path)
            except BlockingIOError as error:
                if not waiting.pause():
                    raise self._held(path) from error
            except NoLocksError as error:
                raise UserError(
                    f"{self._setting}: the file system of {path.parent} gives no locks ({error.strerror}); mount it "
                    f"with locks or set another {self._setting}"
                ) from error
            except NotAPlainFileError:
                raise
            except OSError as error:
                raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> UserError:
        return UserError(
            f"{self._setting}: {self.run_dir} can't be written ({error.strerror}); make room or make it writable, or "
            f"set another {self._setting}"
        )

    def _held(self, path: Path) -> UserError:
        owner = read_owner(path)
        who = str(owner) if owner is not None else "another process that has not left its name yet"
        hint = ""
        if owner is not None and owner.host != socket.gethostname():
            # An NFS 3 server keeps a dead host's locks until that host is back.
            hint = f". If that host is gone for good and two minutes have passed, delete {path}"
        return UserError(
            f"run.name={self.run_dir.name!r} is already running in {self.run_dir.parent}: held by {who}; "
            f"wait for it, stop it, or set another run.name{hint}"
        )


def lock_owner(run_dir: Path | str) -> LockOwner | None:
    """Return who holds a run at the moment, or None if no live process does; takes nothing."""
    path = Path(run_dir) / LOCK_FILE
    try:
        descriptor = open_inside(path, path.parent)
    except (FileNotFoundError, NotAPlainFileError):
        # Nobody can hold a link or a pipe: taking the run refuses it.
        return None
    try:
        lock(descriptor, shared=True)
    except BlockingIOError:
        return read_owner(path) or LockOwner(host="unknown", pid=0, since=0.0)
    finally:
        os.close(descriptor)
    return None


def write_note(descriptor: int, note: bytes) -> None:
    """Replace what a lock file says, through the descriptor that holds the lock."""
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, note, 0)
    os.fsync(descriptor)


def read_owner(path: Path) -> LockOwner | None:
    """Return the owner that the note names; None where there is no note."""
    try:
        return LockOwner.from_note(read_regular(path, path.parent))
    except OSError:
        return None


def local_lock_option(path: Path, table: str) -> str | None:
    """Return the option by which a network mount keeps flocks to each host; None if it does not (pure).

    Args:
        path: An absolute path with no symbolic links.
        table: What ``/proc/self/mountinfo`` says; its format is described in proc_pid_mountinfo(5).
    """
    found: tuple[int, str, set[str]] = (-1, "", set())
    for line in table.splitlines():
        before, _, after = line.partition(" - ")
        fields, ends = before.split(), after.split()
        if len(fields) < 6 or len(ends) < 3:
            continue
        mount = PurePosixPath(fields[4].replace("\\040", " "))
        # A later line covers an earlier one at the same place.
        if path.is_relative_to(mount) and len(mount.parts) >= found[0]:
            found = (len(mount.parts), ends[0], set(ends[2].split(",")) | set(fields[5].split(",")))
    options = found[2] & _LOCAL_LOCKS if found[1] in _NFS else set()
    return min(options, default=None)


def read_mount_table() -> str:
    """Return the mounts that this process sees; nothing where the system does not say."""
    try:
        return MOUNT_TABLE.read_text()
    except OSError:
        return ""
