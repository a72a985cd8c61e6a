"""Writes a run's journal: one JSON object per event and line, one file per attempt and writer.

``journal/attempt-0003.jsonl`` belongs to the third attempt, which claims its number by creating the file. Any other
writer, such as the controller, appends to its own file, ``attempt-0003.controller.jsonl``, because two hosts can't
safely append to one file on NFS. The schema is documented in docs/journal.md.

An object store does not support appends, so a journal file is stored there as a sequence of immutable segments. Records
are buffered in memory and uploaded as a segment by `SegmentedJournal.sync`, which runs immediately for durable records
and every few seconds otherwise (`SegmentedJournal.tend`). A process that dies loses the last few seconds of records.
Recovery never needs them: every state that a run can resume from, in storage or in peer memory, is committed after a
`sync`, so the journal contains all steps up to that state. Later steps are trained and recorded again.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ray_ulysses.clock import Clock, SystemClock
from ray_ulysses.errors import RunError, UserError
from ray_ulysses.run_names import JOURNAL_FOLDER, journal_file_name, merged_segment_key, segment_key
from ray_ulysses.storage.place import Place, open_store
from ray_ulysses.storage.regular import make_folder, open_inside
from ray_ulysses.storage.retry import is_transient
from ray_ulysses.storage.store import AlreadyExistsError, create_if_absent
from ray_ulysses.tracking.journal_files import attempt_numbers, segmented_files
from ray_ulysses.tracking.journal_lines import encode_record, is_durable

if TYPE_CHECKING:
    from ray_ulysses.storage.object_store import ObjectStore

JournalWriter: TypeAlias = "AttemptJournal | SegmentedJournal"

PUT_EVERY_S = 3.0
MERGED_SEGMENTS = 256
# Unsynced records are buffered in memory; this is the size of a few thousand steps.
_MAX_UNSYNCED_BYTES = 2**20
_MOST_KEPT_BYTES = 16 * 2**20
_LOOK_EVERY_S = 30.0
_RETRY_S = 10.0
_MOST_TRIES = 1000


def claim_journal(run_dir: Place, clock: Clock | None = None, *, after: int = 0) -> JournalWriter:
    """Claim the next free attempt number and open the new attempt's journal.

    Args:
        run_dir: The run's directory.
        clock: Clock that timestamps the records.
        after: Lower bound (exclusive) for the number, for known attempts that have no journal in this run directory.

    Raises:
        UserError: The journal folder can't be written.
        RunError: The storage is temporarily unavailable.
    """
    try:
        if isinstance(run_dir, Path):
            run_dir.mkdir(parents=True, exist_ok=True)
            make_folder(run_dir / JOURNAL_FOLDER, run_dir)
        attempt = max(after, *attempt_numbers(run_dir), 0) + 1
        while not _claim(run_dir, attempt):
            attempt += 1
        return open_journal(run_dir, attempt, clock=clock)
    except OSError as error:
        folder = f"{open_store(run_dir).name}/{JOURNAL_FOLDER}"
        text = f"run.storage: the journal {folder} can't be written ({error.strerror or error})"
        if is_transient(error):
            # The cause may be gone when the user tries again.
            raise RunError(f"{text}; make the storage reachable and run the same command again") from error
        raise UserError(f"{text}; make the folder writable or change run.storage") from error


def _claim(run_dir: Place, attempt: int) -> bool:
    """Create an attempt's main file. Return False if the number is already taken."""
    name = journal_file_name(attempt)
    if not isinstance(run_dir, Path):
        return create_if_absent(open_store(run_dir), segment_key(name, 0), b"")
    try:
        os.close(open_inside(run_dir / JOURNAL_FOLDER / name, run_dir, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return False
    return True


def open_journal(
    run_dir: Place, attempt: int, *, writer: str | None = None, clock: Clock | None = None
) -> JournalWriter:
    """Open the journal of an attempt whose number has been claimed, possibly by another process.

    Args:
        run_dir: The run's directory.
        attempt: The attempt's number.
        writer: Name of this writer, which selects its journal file; None for the attempt's main file.
        clock: Clock that timestamps the records.
    """
    if not isinstance(run_dir, Path):
        from ray_ulysses.storage.object_store import ObjectStore

        return SegmentedJournal(ObjectStore(run_dir, retry_s=_RETRY_S), attempt, writer=writer, clock=clock)
    path = run_dir / JOURNAL_FOLDER / journal_file_name(attempt, writer)
    if path.is_dir():
        # The run was copied from an object store. Its segments stay unchanged; new records go to a separate file.
        path = path.with_name(journal_file_name(attempt, f"{writer or 'main'}-here"))
    return AttemptJournal(path, attempt, clock)


class AttemptJournal:
    """Appends events to one journal file of an attempt; `append` returns once the kernel has accepted the record.

    A record that the disk does not accept is kept in memory and written before the next record. Every byte has a fixed
    offset: partial writes are completed in place, and bytes that a failed sync may have dropped are written again at
    the same offset. No record is torn, duplicated or reordered. A file has one writer, which may use several threads.

    Attributes:
        attempt: Number of the attempt, starting at 1.
        path: Path of the journal file.
        is_gone: Whether the last call of `tend` found that the file had been deleted or moved.
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
        # A writer may have died in the middle of a line. Without a newline, the next record would be lost with it.
        is_torn = self._num_durable > 0 and os.pread(descriptor, 1, self._num_durable - 1) != b"\n"
        self._tail = bytearray(b"\n" if is_torn else b"")
        self._num_taken = 0
        self._lock = threading.Lock()
        self._sync_lock = threading.Lock()

    def append(self, event: Mapping[str, Any]) -> None:
        """Append an event, with ``time`` (seconds since the epoch) and ``attempt`` added.

        Args:
            event: The event's kind as ``event``, the fields of its class in `tracking.events`, and optional extra
                fields. Non-finite numbers are encoded as strings ("nan", "inf"), since JSON cannot represent them.

        Raises:
            OSError: The disk did not accept the record. It stays buffered, and the next call of any method retries.
        """
        found, line = encode_record({"time": self._clock.now(), "attempt": self.attempt, **event})
        self.append_line(line, durable=is_durable(found))

    def append_line(self, line: bytes, *, durable: bool) -> None:
        """Append a line from `encode_record`; if ``durable``, sync the file to disk before returning.

        Raises:
            OSError: See `append`.
        """
        with self._lock:
            self._check_open()
            self._tail += line
            self._write()
        if durable or len(self._tail) > _MAX_UNSYNCED_BYTES:
            self.sync()

    def tend(self) -> None:
        """Update `is_gone`; the writer calls this method every few seconds."""
        try:
            self.is_gone = not os.path.samestat(os.lstat(self.path), os.fstat(self._stream.fileno()))
        except FileNotFoundError:
            self.is_gone = True
        except (OSError, ValueError):
            return

    @property
    def num_waiting_bytes(self) -> int:
        """Size of the records that the disk has not accepted yet, in bytes."""
        with self._lock:
            return len(self._tail) - self._num_taken

    def sync(self) -> None:
        """Sync all records to disk. Callers must do this before they commit a checkpoint.

        Raises:
            OSError: Some records may not be on disk. The next call writes them again.
        """
        # One thread at a time: the kernel reports a failed sync only once, and the waiting thread must get the error.
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
                    # The kernel may have dropped bytes that it had accepted.
                    self._num_taken = 0
                raise
            with self._lock:
                del self._tail[:num_taken]
                self._num_durable += num_taken
                self._num_taken -= num_taken

    def close(self) -> None:
        """Sync and close the file. Does nothing if the file is already closed.

        Raises:
            OSError: The disk did not accept the remaining `num_waiting_bytes`, which are lost.
        """
        if self._stream.closed:
            return
        try:
            self.sync()
        finally:
            with self._sync_lock, self._lock:
                self._stream.close()

    def _check_open(self) -> None:
        """Raise `OSError` if the file is closed; the stream's `ValueError` would look like a bug."""
        if self._stream.closed:
            raise OSError(errno.EBADF, "the journal is already closed", str(self.path))

    def _write(self) -> None:
        """Pass all buffered bytes to the kernel. The caller must hold `_lock`."""
        while self._num_taken < len(self._tail):
            offset = self._num_durable + self._num_taken
            # A nearly full disk accepts only part of the data, and reports an error on the next write.
            self._num_taken += os.pwrite(self._stream.fileno(), self._tail[self._num_taken :], offset)


class SegmentedJournal:
    """Appends events to one journal file of an attempt in an object store; see `AttemptJournal`.

    A file has one writer, which may use several threads. Each segment is uploaded under a free number. A failed upload
    is retried with the same bytes until it succeeds, so that no record is torn, duplicated or reordered.

    Attributes:
        attempt: Number of the attempt, starting at 1.
        path: Location of the journal file, for error messages.
        is_gone: Whether the last check in `tend` found that the file had been deleted.
    """

    def __init__(self, store: ObjectStore, attempt: int, *, writer: str | None = None, clock: Clock | None = None):
        """Open a file for appending after its last segment."""
        self.attempt, self._name = attempt, journal_file_name(attempt, writer)
        self.path = f"{store.name}/{JOURNAL_FOLDER}/{self._name}"
        self._store, self._clock = store, clock if clock is not None else SystemClock()
        there = segmented_files(store, store.sizes(f"{JOURNAL_FOLDER}/{self._name}")).get(self._name)
        segments = () if there is None else there.segments
        self._next = segments[-1].last + 1 if segments else 1
        # The segment that is being uploaded, and the records that come after it.
        self._sealed = b""
        self._waiting = bytearray()
        self._merging: list[bytes] = []
        self._merging_from = self._next
        self._failure: OSError | None = None
        self._is_closed = self.is_gone = False
        self._put_at = self._looked_at = self._clock.monotonic()
        self._lock, self._put_lock = threading.Lock(), threading.Lock()

    def append(self, event: Mapping[str, Any]) -> None:
        """Append an event; see `AttemptJournal.append`.

        Raises:
            OSError: The last upload failed. The record stays buffered, and the next `sync` or `tend` retries.
        """
        found, line = encode_record({"time": self._clock.now(), "attempt": self.attempt, **event})
        self.append_line(line, durable=is_durable(found))

    def append_line(self, line: bytes, *, durable: bool) -> None:
        """Append an encoded event; see `AttemptJournal.append_line`."""
        with self._lock:
            self._check_open()
            self._waiting += line
            is_long = len(self._waiting) > _MAX_UNSYNCED_BYTES
            failure = self._failure
        if durable or (is_long and failure is None):
            self.sync()
        elif failure is not None:
            raise OSError(failure.errno, failure.strerror, failure.filename) from failure

    @property
    def num_waiting_bytes(self) -> int:
        """Size of the records that the store has not accepted yet, in bytes."""
        with self._lock:
            return len(self._sealed) + len(self._waiting)

    def tend(self) -> None:
        """Do periodic work when it is due: upload buffered records, merge segments, and update `is_gone`.

        Raises:
            OSError: The upload failed.
        """
        now = self._clock.monotonic()
        if now - self._put_at >= PUT_EVERY_S:
            self._put_at = now
            self.sync()
            self._merge()
        if now - self._looked_at >= _LOOK_EVERY_S:
            self._looked_at = now
            self._look()

    def sync(self) -> None:
        """Upload all records. Callers must do this before they commit a checkpoint.

        Raises:
            OSError: Some records are not uploaded. The next call retries.
        """
        with self._put_lock:
            with self._lock:
                self._check_open()
            try:
                while self._seal():
                    self._put()
            except OSError as error:
                self._failure = error
                raise
            self._failure = None

    def close(self) -> None:
        """Upload the remaining records and close the journal. Does nothing if the journal is already closed.

        Raises:
            OSError: The store did not accept the remaining `num_waiting_bytes`, which are lost.
        """
        if self._is_closed:
            return
        try:
            self.sync()
        finally:
            with self._lock:
                self._is_closed = True

    def _check_open(self) -> None:
        if self._is_closed:
            raise OSError(errno.EBADF, "the journal is already closed", self.path)

    def _seal(self) -> bool:
        """Fix the bytes of the next segment, unless one is pending. Return whether there is a segment to upload."""
        with self._lock:
            if not self._sealed:
                self._sealed = bytes(self._waiting)
                self._waiting.clear()
            return bool(self._sealed)

    def _put(self) -> None:
        """Upload the sealed bytes under the next free number."""
        for _ in range(_MOST_TRIES):
            key = segment_key(self._name, self._next)
            try:
                self._store.create(key, [self._sealed])
            except AlreadyExistsError:
                # An earlier try succeeded after all, or another process of this writer used the number.
                if self._store.read_whole(key) != self._sealed:
                    with self._lock:
                        self._next += 1
                        self._merging, self._merging_from = [], self._next
                    continue
            with self._lock:
                self._merging.append(self._sealed)
                self._sealed = b""
                self._next += 1
            return
        raise OSError(errno.EIO, f"another writer has added {_MOST_TRIES} segments after the last one", self.path)

    def _look(self) -> None:
        """Set `is_gone` if the segment that claimed the attempt no longer exists."""
        try:
            self._store.size(segment_key(self._name, 0))
        except FileNotFoundError:
            self.is_gone = True
        except OSError:
            return

    def _merge(self) -> None:
        """Replace many segments with one, so that a long attempt stays quick to list and read."""
        with self._lock:
            merged, first = list(self._merging), self._merging_from
        if len(merged) < MERGED_SEGMENTS and sum(map(len, merged)) < _MOST_KEPT_BYTES:
            return
        last = first + len(merged) - 1
        if len(merged) > 1:
            with contextlib.suppress(AlreadyExistsError):
                self._store.create(merged_segment_key(self._name, first, last), merged)
        with self._lock:
            if self._merging_from == first:
                del self._merging[: len(merged)]
                self._merging_from = last + 1
        if len(merged) > 1:
            # Readers skip segments that could not be deleted.
            self._store.delete_files([segment_key(self._name, number) for number in range(first, last + 1)])
