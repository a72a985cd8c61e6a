"""One writer per run: an advisory lock that ends with its process, and a note that names its owner."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Self

from ray_ulysses.clock import Clock, SystemClock
from ray_ulysses.errors import RunError, UserError
from ray_ulysses.storage.file_lock import LockOwner, NoLocksError, lock, lock_file
from ray_ulysses.storage.mounts import local_lock_option, read_mount_table
from ray_ulysses.storage.regular import NotAPlainFileError, open_inside, read_regular

LOCK_FILE = "run.lock"


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
        self.taken_over_from = _read_owner(path)
        self._owner = LockOwner.this_process(self._clock)
        try:
            self._write_note(self._owner.to_note())
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
        owner = _read_owner(self.run_dir / LOCK_FILE)
        return owner is not None and owner != self._owner

    def check(self) -> None:
        """Raise `RunError` if this process holds the run no more."""
        if self.lost or not self.held:
            owner = _read_owner(self.run_dir / LOCK_FILE)
            raise RunError(
                f"run {self.run_dir.name!r} is no longer held by this process: "
                + (f"it was taken over by {owner}" if owner is not None else f"its {LOCK_FILE} is gone")
            )

    def release(self) -> None:
        """Give the run back; releasing twice does nothing."""
        if self._descriptor is None:
            return
        # The file stays: whoever waits for it need not find a new one.
        try:
            if self.held:
                self._write_note(b"")
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
        owner = _read_owner(path)
        who = str(owner) if owner is not None else "another process that has not left its name yet"
        hint = ""
        if owner is not None and owner.host != socket.gethostname():
            # An NFS 3 server keeps a dead host's locks until that host is back.
            hint = f". If that host is gone for good and two minutes have passed, delete {path}"
        return UserError(
            f"run.name={self.run_dir.name!r} is already running in {self.run_dir.parent}: held by {who}; "
            f"wait for it, stop it, or set another run.name{hint}"
        )

    def _write_note(self, note: bytes) -> None:
        """Replace what the lock file says, through the descriptor that holds the lock."""
        assert self._descriptor is not None
        self._note = note
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, note, 0)
        os.fsync(self._descriptor)


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
        return _read_owner(path) or LockOwner(host="unknown", pid=0, since=0.0)
    finally:
        os.close(descriptor)
    return None


def _read_owner(path: Path) -> LockOwner | None:
    """Return the owner that the note names; None where there is no note."""
    try:
        return LockOwner.from_note(read_regular(path, path.parent))
    except OSError:
        return None
