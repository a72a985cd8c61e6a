"""Writes a journal file to an object store, which can't append: as segments that are never changed.

Records wait in memory until a segment of them is put: by `SegmentedJournal.sync`, at once for a record that recovery
reads, and every few seconds by `SegmentedJournal.tend`. A process that dies loses the records of its last seconds.
Recovery never needs these: whatever state it can start from, in storage or in the memory of peers, was committed after
a `sync`, so that the journal holds every step up to it, and the steps beyond it are trained and recorded again.
"""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Mapping
from typing import Any

from ray_ulysses.clock import Clock, SystemClock
from ray_ulysses.run_names import JOURNAL_FOLDER, journal_file_name, merged_segment_key, segment_key
from ray_ulysses.storage.location import ObjectLocation
from ray_ulysses.storage.object_store import ObjectStore
from ray_ulysses.storage.store import AlreadyExistsError
from ray_ulysses.tracking.journal_files import attempt_numbers, claim_failed, segmented_files
from ray_ulysses.tracking.journal_lines import encode_record, is_durable

PUT_EVERY_S = 3.0
MERGED_SEGMENTS = 256
_MOST_WAITING_BYTES = 2**20
_MOST_KEPT_BYTES = 16 * 2**20
_LOOK_EVERY_S = 30.0
_RETRY_S = 10.0
_MOST_TRIES = 1000


class SegmentedJournal:
    """Appends events to one journal file of an attempt in an object store; see `tracking.journal.AttemptJournal`.

    A file has one writer, which may use several threads. A segment is put under a number that nobody has taken, with
    the same bytes until that succeeds, so that no record is torn, repeated or out of order.

    Attributes:
        attempt: The attempt's number, from 1.
        path: The journal file, for errors.
        is_gone: Whether it had been deleted when `tend` last looked.
    """

    def __init__(self, store: ObjectStore, attempt: int, *, writer: str | None = None, clock: Clock | None = None):
        """Continue a file behind its last segment; see `claim_segmented` and `tracking.journal`."""
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
            is_long = len(self._waiting) > _MOST_WAITING_BYTES
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


def claim_segmented(run_dir: ObjectLocation, clock: Clock | None = None, *, after: int = 0) -> SegmentedJournal:
    """Start the journal of a new attempt under the first free number; see `AttemptJournal.claim`.

    Raises:
        UserError: The store can't be written.
        RunError: It does not answer.
    """
    store = ObjectStore(run_dir)
    try:
        attempt = max(after, *attempt_numbers(run_dir), 0)
        while True:
            attempt += 1
            with contextlib.suppress(AlreadyExistsError):
                store.create(segment_key(journal_file_name(attempt), 0), [b""])
                break
        return open_segmented(run_dir, attempt, clock=clock)
    except OSError as error:
        raise claim_failed(f"{store.name}/{JOURNAL_FOLDER}", error) from error


def open_segmented(
    run_dir: ObjectLocation, attempt: int, *, writer: str | None = None, clock: Clock | None = None
) -> SegmentedJournal:
    """Continue the journal of an attempt that has been claimed; see `AttemptJournal.open`."""
    return SegmentedJournal(ObjectStore(run_dir, retry_s=_RETRY_S), attempt, writer=writer, clock=clock)
