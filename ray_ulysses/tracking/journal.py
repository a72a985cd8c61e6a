"""Writing of a run's journal: one JSON object per event and line, one file per attempt, written as it happens.

``journal/attempt-0003.jsonl`` belongs to the third attempt; its number is claimed by creating the file, so
that two attempts never share one. A process beside the first writer (the controller beside rank 0) appends
to a segment of its own, ``attempt-0003.controller.jsonl``, because appending from two hosts to one file is
not safe on NFS. Beside a segment that has grown stands its index; see `tracking.journal_index`.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ray_ulysses.clock import Clock, SystemClock
from ray_ulysses.errors import UserError
from ray_ulysses.run_names import JOURNAL_FOLDER, SEGMENT_NAME, segment_name
from ray_ulysses.tracking.events import encode_event, event_adapter
from ray_ulysses.tracking.journal_index import LEAST_BYTES, PIECE_BYTES, SegmentIndex
from ray_ulysses.tracking.line_checksum import with_checksum
from ray_ulysses.validation import ContentError, read_json

# After these the record must outlive a power cut: recovery reads them.
_DURABLE = {"attempt_started", "checkpoint_committed", "attempt_ended", "start_failed", "run_finished", "run_failed"}
# Until a sync they are kept in memory, too: a few thousand steps, in case that nothing else asks for one.
_MOST_UNSYNCED_BYTES = 2**20


class AttemptJournal:
    """Appends events to one segment of an attempt; each is on its way to the disk when `append` returns.

    A record that the disk does not take is kept, and goes there before the next. Each byte has its place in the file
    from the beginning: what was written in part is completed there, and what may have got lost between the kernel and
    the disk (a sync that failed) is written there once more, so that no record is torn, doubled or out of order. A
    segment has one writer, which may append from several threads.

    Attributes:
        attempt: The attempt's number, from 1.
        path: The segment.
    """

    def __init__(self, path: Path, attempt: int, clock: Clock | None = None) -> None:
        self.attempt = attempt
        self.path = path
        self._clock = clock if clock is not None else SystemClock()
        # Not opened for appending: Linux then takes no notice of the place that `os.pwrite` names.
        self._stream = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b", buffering=0)
        # The file up to `_num_durable`, then `_tail`, of which the kernel has taken the first `_num_taken` bytes.
        self._num_durable = self._stream.seek(0, os.SEEK_END)
        # A writer may have died in the middle of a line; its rest must not swallow the next record.
        self._tail = bytearray(b"\n" if _is_torn(self._stream.fileno(), self._num_durable) else b"")
        self._num_taken = 0
        self._index = SegmentIndex(path, attempt)
        self._index_lock = threading.Lock()
        self._lock = threading.Lock()
        self._sync_lock = threading.Lock()

    @classmethod
    def claim(cls, run_dir: Path | str, clock: Clock | None = None, *, after: int = 0) -> AttemptJournal:
        """Start the journal of a new attempt under the first free number.

        Args:
            run_dir: The run's directory.
            clock: Where the records' times come from.
            after: The number is larger than this: others may know of attempts that this journal does not.

        Raises:
            UserError: The journal's folder can't be written.
        """
        folder = Path(run_dir) / JOURNAL_FOLDER
        try:
            folder.mkdir(parents=True, exist_ok=True)
            attempt = max(after, *attempt_numbers(run_dir), 0)
            while True:
                attempt += 1
                path = folder / segment_name(attempt)
                try:
                    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
                except FileExistsError:
                    continue
                return cls(path, attempt, clock)
        except OSError as error:
            raise UserError(
                f"run.storage: the journal {folder} can't be written ({error.strerror}); make it writable "
                f"or set another run.storage"
            ) from error

    @classmethod
    def open(
        cls, run_dir: Path | str, attempt: int, *, writer: str | None = None, clock: Clock | None = None
    ) -> AttemptJournal:
        """Go on with the journal of an attempt that has been claimed, perhaps by another process.

        Args:
            run_dir: The run's directory.
            attempt: The claimed number.
            writer: A name for a segment of this writer's own; None is the attempt's first segment.
            clock: Where the records' times come from.
        """
        return cls(Path(run_dir) / JOURNAL_FOLDER / segment_name(attempt, writer), attempt, clock)

    def append(self, event: Mapping[str, Any]) -> None:
        """Write one event; ``time`` (seconds since the epoch) and ``attempt`` are added.

        Args:
            event: ``event`` is its kind, the other fields are those of its class in `tracking.events` and more. A loss
                that is not finite is stored as a string ("nan", "inf"), which JSON has no number for.

        Raises:
            OSError: The disk does not take it now. It is kept, and written first by the next call of any kind.
        """
        record = {"time": self._clock.now(), "attempt": self.attempt, **event}
        line = encode_event(record)
        try:
            kind = read_json(event_adapter(), line).event
        except ContentError as error:
            raise AssertionError(f"journal event {event!r} can't be read back: {error}") from error
        with self._lock:
            self._refuse_closed()
            self._tail += with_checksum(line) + b"\n"
            self._write()
        if kind in _DURABLE or len(self._tail) > _MOST_UNSYNCED_BYTES:
            self.sync()
        if self.num_bytes - self._index.reached > PIECE_BYTES:
            self._extend_index(PIECE_BYTES)

    @property
    def num_bytes(self) -> int:
        """Return the size of the segment up to now, with what is still to be written."""
        with self._lock:
            return self._num_durable + len(self._tail)

    def is_gone(self) -> bool:
        """Whether the segment was deleted or moved away; a disk that does not say it proves nothing."""
        try:
            return not os.path.samestat(os.stat(self.path), os.fstat(self._stream.fileno()))
        except FileNotFoundError:
            return True
        except (OSError, ValueError):
            return False

    @property
    def num_pending(self) -> int:
        """Return how many records the disk has not taken yet."""
        with self._lock:
            return self._tail.count(b"\n", self._num_taken)

    def sync(self) -> None:
        """Make everything so far outlive a power cut; call it before a checkpoint is committed.

        Raises:
            OSError: Something is not on the disk, and is written again by the next call.
        """
        # One at a time: the kernel tells of a failure once, and it must not be another thread that hears of it.
        with self._sync_lock:
            with self._lock:
                self._refuse_closed()
                self._write()
                num_taken = self._num_taken
            try:
                # Outside the lock: a slow disk must not hold up who appends a step.
                os.fsync(self._stream.fileno())
            except OSError:
                with self._lock:
                    # What the kernel had taken it may have dropped.
                    self._num_taken = 0
                raise
            with self._lock:
                del self._tail[:num_taken]
                self._num_durable += num_taken
                self._num_taken -= num_taken

    def close(self) -> None:
        """Close the segment; closing twice does nothing.

        Raises:
            OSError: The records that `num_pending` counts could not be written, and are lost now.
        """
        if self._stream.closed:
            return
        try:
            self.sync()
            self._extend_index(LEAST_BYTES)
        finally:
            with self._sync_lock, self._lock:
                self._stream.close()

    def _extend_index(self, least_bytes: int) -> None:
        """Index what has been written, unless another thread is at it."""
        if self._index_lock.acquire(blocking=False):
            try:
                self._index.extend(least_bytes)
            finally:
                self._index_lock.release()

    def _refuse_closed(self) -> None:
        """Raise `OSError` where the stream would raise a `ValueError`: what comes too late is lost, and no bug."""
        if self._stream.closed:
            raise OSError(errno.EBADF, "the journal is closed already", str(self.path))

    def _write(self) -> None:
        """Hand everything to the kernel; whoever calls holds the lock."""
        while self._num_taken < len(self._tail):
            place = self._num_durable + self._num_taken
            # A disk that is nearly full takes a part and says nothing of the rest before it is asked again.
            self._num_taken += os.pwrite(self._stream.fileno(), self._tail[self._num_taken :], place)


def attempt_numbers(run_dir: Path | str) -> tuple[int, ...]:
    """Return the numbers of all attempts of a run that have a journal, ascending."""
    return tuple(sorted({attempt for attempt, _ in segments(run_dir)}))


def segments(run_dir: Path | str) -> Iterator[tuple[int, Path]]:
    """Yield (attempt, path) of each segment in the order in which they are read."""
    folder = Path(run_dir) / JOURNAL_FOLDER
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = SEGMENT_NAME.match(path.name)
        if match:
            found.append((int(match["attempt"]), match["writer"] or "", path))
    for attempt, _, path in sorted(found, key=lambda segment: segment[:2]):
        yield attempt, path


def _is_torn(descriptor: int, size: int) -> bool:
    """Return whether a file of so many bytes ends in the middle of a line."""
    return size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
