"""Writes a run's journal: one JSON object per line and event, one file per attempt and writer.

``journal/attempt-0003.jsonl`` belongs to the third attempt, which claims its number by creating the file. A second
writer (the controller beside rank 0) appends to a file of its own, ``attempt-0003.controller.jsonl``, because two hosts
can't safely append to one file on NFS. The schema is documented in docs/journal.md.

An object store can't append: there a file is segments that are never changed. Records wait in memory until a segment of
them is put: by `SegmentedJournal.sync`, at once for a record that recovery reads, and every few seconds by
`SegmentedJournal.tend`. A process that dies loses the records of its last seconds. Recovery never needs these: whatever
state it can start from, in storage or in the memory of peers, was committed after a `sync`, so that the journal holds
every step up to it, and the steps beyond it are trained and recorded again.
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
# Unsynced records are also kept in memory: a few thousand steps at most.
_MAX_UNSYNCED_BYTES = 2**20
_MOST_KEPT_BYTES = 16 * 2**20
_LOOK_EVERY_S = 30.0
_RETRY_S = 10.0
_MOST_TRIES = 1000


def claim_journal(run_dir: Place, clock: Clock | None = None, *, after: int = 0) -> JournalWriter:
    """Start the journal of a new attempt under the first free number.

    Args:
        run_dir: The run's directory.
        clock: Source of the records' times.
        after: The number is larger than this, since attempts may be known that left no journal here.

    Raises:
        UserError: The journal's folder can't be written.
        RunError: It does not answer.
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
            # Another attempt may meet it again.
            raise RunError(f"{text}; make it reachable, and start the same command again") from error
        raise UserError(f"{text}; make it writable or set another run.storage") from error


def _claim(run_dir: Place, attempt: int) -> bool:
    """Create the main file of an attempt, and return whether its number was free."""
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
    """Continue the journal of an attempt that has been claimed, perhaps by another process.

    Args:
        run_dir: The run's directory.
        attempt: The claimed number.
        writer: Name of this writer, which gets a file of its own; None for the attempt's main file.
        clock: Source of the records' times.
    """
    if not isinstance(run_dir, Path):
        from ray_ulysses.storage.object_store import ObjectStore

        return SegmentedJournal(ObjectStore(run_dir, retry_s=_RETRY_S), attempt, writer=writer, clock=clock)
    path = run_dir / JOURNAL_FOLDER / journal_file_name(attempt, writer)
    if path.is_dir():
        # Of a run that was copied from an object store, whose segments stay as they are.
        path = path.with_name(journal_file_name(attempt, f"{writer or 'main'}-here"))
    return AttemptJournal(path, attempt, clock)


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


class SegmentedJournal:
    """Appends events to one journal file of an attempt in an object store; see `AttemptJournal`.

    A file has one writer, which may use several threads. A segment is put under a number that nobody has taken, with
    the same bytes until that succeeds, so that no record is torn, repeated or out of order.

    Attributes:
        attempt: The attempt's number, from 1.
        path: The journal file, for errors.
        is_gone: Whether it had been deleted when `tend` last looked.
    """

    def __init__(self, store: ObjectStore, attempt: int, *, writer: str | None = None, clock: Clock | None = None):
        """Continue a file behind its last segment."""
        self.attempt, self._name = attempt, journal_file_name(attempt, writer)
        self.path = f"{store.name}/{JOURNAL_FOLDER}/{self._name}"
        self._store, self._clock = store, clock if clock is not None else SystemClock()
        there = segmented_files(store, store.sizes(f"{JOURNAL_FOLDER}/{self._name}")).get(self._name)
        segments = () if there is None else there.segments
        self._next = segments[-1].last + 1 if segments else 1
        # What is being put, until it is there, and what waits behind it.
        self._sealed = b""
        self._waiting = bytearray()
        self._merging: list[bytes] = []
        self._merging_from = self._next
        self._failure: OSError | None = None
        self._is_closed = self.is_gone = False
        self._put_at = self._looked_at = self._clock.monotonic()
        self._lock, self._put_lock = threading.Lock(), threading.Lock()

    def append(self, event: Mapping[str, Any]) -> None:
        """Record one event; see `AttemptJournal.append`.

        Raises:
            OSError: The store does not accept records now. It is kept, and put first by the next call of any method.
        """
        found, line = encode_record({"time": self._clock.now(), "attempt": self.attempt, **event})
        self.append_line(line, durable=is_durable(found))

    def append_line(self, line: bytes, *, durable: bool) -> None:
        """Record an encoded event; see `AttemptJournal.append_line`."""
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
        """Return the size of the records that the store has not accepted yet."""
        with self._lock:
            return len(self._sealed) + len(self._waiting)

    def tend(self) -> None:
        """Put what has waited for some seconds, merge segments, and look whether the file was deleted, as each is due.

        Raises:
            OSError: The store does not accept records now.
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
        """Put all records; call this before committing a checkpoint.

        Raises:
            OSError: Some are not stored; the next call puts them.
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
        """Put the rest and end; closing twice does nothing.

        Raises:
            OSError: The records counted by `num_waiting_bytes` could not be put, and are lost.
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
        """Fix what the next segment holds, unless it is fixed already; return whether there is anything to put."""
        with self._lock:
            if not self._sealed:
                self._sealed = bytes(self._waiting)
                self._waiting.clear()
            return bool(self._sealed)

    def _put(self) -> None:
        """Put the sealed bytes under the next free number."""
        for _ in range(_MOST_TRIES):
            key = segment_key(self._name, self._next)
            try:
                self._store.create(key, [self._sealed])
            except AlreadyExistsError:
                # An earlier try of ours arrived after all, or what another process of this writer had on its way.
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
        raise OSError(errno.EIO, f"{_MOST_TRIES} segments that are not this writer's lie behind its own", self.path)

    def _look(self) -> None:
        """See whether the segment is there that claimed the attempt."""
        try:
            self._store.size(segment_key(self._name, 0))
        except FileNotFoundError:
            self.is_gone = True
        except OSError:
            return

    def _merge(self) -> None:
        """Put one segment in the place of many, so that a long attempt can be listed and read."""
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
            # Those that can't be deleted are skipped by whoever reads.
            self._store.delete_files([segment_key(self._name, number) for number in range(first, last + 1)])
