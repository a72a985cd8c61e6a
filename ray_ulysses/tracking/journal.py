"""Writes a run's journal: one JSON object per line and event, one file per attempt and writer.

``journal/attempt-0003.jsonl`` belongs to the third attempt, which claims its number by creating the file. A second
writer (the controller beside rank 0) appends to a file of its own, ``attempt-0003.controller.jsonl``, because two hosts
can't safely append to one file on NFS. The schema is documented in docs/journal.md.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ray_ulysses.clock import Clock, SystemClock
from ray_ulysses.run_names import JOURNAL_FOLDER, journal_file_name
from ray_ulysses.storage.place import Place
from ray_ulysses.storage.regular import make_folder, open_inside
from ray_ulysses.tracking.journal_files import attempt_numbers, claim_failed
from ray_ulysses.tracking.journal_lines import encode_record, is_durable

if TYPE_CHECKING:
    from ray_ulysses.tracking.segmented_journal import SegmentedJournal

    JournalWriter: TypeAlias = "AttemptJournal | SegmentedJournal"

# Unsynced records are also kept in memory: a few thousand steps at most.
_MAX_UNSYNCED_BYTES = 2**20


class AttemptJournal:
    """Appends events to one journal file of an attempt; each is handed to the kernel before `append` returns.

    A record that the disk does not accept is kept in memory and written before the next one. Every byte has a fixed
    offset: partial writes are completed in place, and bytes that a failed sync may have dropped are written again at
    the same offset. No record is torn, duplicated or reordered. A file has one writer, which may use several threads.

    Attributes:
        attempt: The attempt's number, from 1.
        path: The journal file.
        is_gone: Whether the file had been deleted or moved away when `tend` last looked.
    """

    def __init__(self, path: Path, attempt: int, clock: Clock | None = None) -> None:
        self.attempt = attempt
        self.path, self.is_gone = path, False
        self._clock = clock if clock is not None else SystemClock()
        # Not opened with O_APPEND: Linux would then ignore the offset passed to `os.pwrite`.
        descriptor = open_inside(path, path.parent.parent, os.O_RDWR | os.O_CREAT)
        self._stream = os.fdopen(descriptor, "r+b", buffering=0)
        # The file is `_num_durable` bytes, then `_tail`, of which the kernel has accepted the first `_num_taken` bytes.
        self._num_durable = self._stream.seek(0, os.SEEK_END)
        # A writer may have died in the middle of a line; the rest of it must not swallow the next record.
        self._tail = bytearray(b"\n" if _is_torn(self._stream.fileno(), self._num_durable) else b"")
        self._num_taken = 0
        self._lock = threading.Lock()
        self._sync_lock = threading.Lock()

    @classmethod
    def claim(cls, run_dir: Path | str, clock: Clock | None = None, *, after: int = 0) -> AttemptJournal:
        """Start the journal of a new attempt under the first free number.

        Args:
            run_dir: The run's directory.
            clock: Source of the records' times.
            after: The number is larger than this, since attempts may be known that left no journal here.

        Raises:
            UserError: The journal's folder can't be written.
            RunError: It does not answer.
        """
        folder = Path(run_dir) / JOURNAL_FOLDER
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            make_folder(folder, folder.parent)
            attempt = max(after, *attempt_numbers(run_dir), 0)
            while True:
                attempt += 1
                path = folder / journal_file_name(attempt)
                try:
                    os.close(open_inside(path, folder.parent, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
                except FileExistsError:
                    continue
                return cls(path, attempt, clock)
        except OSError as error:
            raise claim_failed(str(folder), error) from error

    @classmethod
    def open(
        cls, run_dir: Path | str, attempt: int, *, writer: str | None = None, clock: Clock | None = None
    ) -> AttemptJournal:
        """Continue the journal of an attempt that has been claimed, perhaps by another process.

        Args:
            run_dir: The run's directory.
            attempt: The claimed number.
            writer: Name of this writer, which gets a file of its own; None for the attempt's main file.
            clock: Source of the records' times.
        """
        path = Path(run_dir) / JOURNAL_FOLDER / journal_file_name(attempt, writer)
        if path.is_dir():
            # Of a run that was copied from an object store, whose segments stay as they are.
            path = path.with_name(journal_file_name(attempt, f"{writer or 'main'}-here"))
        return cls(path, attempt, clock)

    def append(self, event: Mapping[str, Any]) -> None:
        """Write one event; ``time`` (seconds since the epoch) and ``attempt`` are added.

        Args:
            event: ``event`` is its kind; the other fields are those of its class in `tracking.events`, and more. A loss
                that is not finite is stored as a string ("nan", "inf"), since JSON has no such number.

        Raises:
            OSError: The disk does not accept it now. It is kept, and written first by the next call of any method.
        """
        found, line = encode_record({"time": self._clock.now(), "attempt": self.attempt, **event})
        self.append_line(line, durable=is_durable(found))

    def append_line(self, line: bytes, *, durable: bool) -> None:
        """Write an encoded event, as `append` does.

        Args:
            line: The event as `encode_record` returns it.
            durable: Whether it must survive a power failure when this returns.

        Raises:
            OSError: As `append`.
        """
        with self._lock:
            self._check_open()
            self._tail += line
            self._write()
        if durable or len(self._tail) > _MAX_UNSYNCED_BYTES:
            self.sync()

    def tend(self) -> None:
        """Look whether the file was deleted or moved away; called between appends and every few seconds."""
        try:
            self.is_gone = not os.path.samestat(os.lstat(self.path), os.fstat(self._stream.fileno()))
        except FileNotFoundError:
            self.is_gone = True
        except (OSError, ValueError):
            return

    @property
    def num_waiting_bytes(self) -> int:
        """Return the size of the records that the disk has not accepted yet."""
        with self._lock:
            return len(self._tail) - self._num_taken

    def sync(self) -> None:
        """Make all records survive a power failure; call this before committing a checkpoint.

        Raises:
            OSError: Some records are not on the disk; the next call writes them again.
        """
        # One thread at a time: the kernel reports a failed sync once, and it must reach the thread that waits for it.
        with self._sync_lock:
            with self._lock:
                self._check_open()
                self._write()
                num_taken = self._num_taken
            try:
                # Outside the lock: a slow disk must not block `append`.
                os.fsync(self._stream.fileno())
            except OSError:
                with self._lock:
                    # The kernel may have dropped what it had accepted.
                    self._num_taken = 0
                raise
            with self._lock:
                del self._tail[:num_taken]
                self._num_durable += num_taken
                self._num_taken -= num_taken

    def close(self) -> None:
        """Close the file; closing twice does nothing.

        Raises:
            OSError: The records counted by `num_waiting_bytes` could not be written, and are lost.
        """
        if self._stream.closed:
            return
        try:
            self.sync()
        finally:
            with self._sync_lock, self._lock:
                self._stream.close()

    def _check_open(self) -> None:
        """Raise `OSError` where the stream would raise `ValueError`: a late record is lost, which is not a bug."""
        if self._stream.closed:
            raise OSError(errno.EBADF, "the journal is already closed", str(self.path))

    def _write(self) -> None:
        """Hand everything to the kernel; the caller holds the lock."""
        while self._num_taken < len(self._tail):
            offset = self._num_durable + self._num_taken
            # A disk that is nearly full accepts a part, and reports an error only for the next write.
            self._num_taken += os.pwrite(self._stream.fileno(), self._tail[self._num_taken :], offset)


def _is_torn(descriptor: int, size: int) -> bool:
    """Return whether a file of this size ends in the middle of a line."""
    return size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"


def claim_journal(run_dir: Place, clock: Clock | None = None, *, after: int = 0) -> JournalWriter:
    """Start the journal of a new attempt under the first free number, as `AttemptJournal.claim` does."""
    if isinstance(run_dir, Path):
        return AttemptJournal.claim(run_dir, clock, after=after)
    from ray_ulysses.tracking.segmented_journal import claim_segmented

    return claim_segmented(run_dir, clock, after=after)


def open_journal(run_dir: Place, attempt: int, *, writer: str | None = None) -> JournalWriter:
    """Continue the journal of an attempt that has been claimed, as `AttemptJournal.open` does."""
    if isinstance(run_dir, Path):
        return AttemptJournal.open(run_dir, attempt, writer=writer)
    from ray_ulysses.tracking.segmented_journal import open_segmented

    return open_segmented(run_dir, attempt, writer=writer)
