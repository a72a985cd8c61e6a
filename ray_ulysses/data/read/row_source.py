"""Reads the rows of each step for one rank, ahead of training."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterator
from typing import Generic, TypeVar

from ray_ulysses.data.plan.plan import Plan
from ray_ulysses.data.read.reader import RowReader, RowSlice
from ray_ulysses.errors import RunError

T = TypeVar("T")

ROW_SHARE = 0.8
"""Fraction of ``elastic.collective_timeout_s`` for which a rank waits for a row, so that it reports the cause before
the other ranks time out in a collective."""
CLOSE_TIMEOUT_S = 5.0
"""How long ``close`` waits for a pending read, which may hang if the storage does not answer."""
_POLL_S = 0.1


class LateError(RunError):
    """No value came in time."""


class ReadAhead(Generic[T]):
    """Runs ``values`` in a thread, at most ``depth`` values ahead (at least one)."""

    def __init__(self, values: Iterator[T], depth: int) -> None:
        self._values = values
        # An exception in the queue was raised by reading the next value.
        self._queue: queue.Queue[T | Exception] = queue.Queue(maxsize=max(1, depth))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ray-ulysses-read-ahead", daemon=True)
        self._thread.start()

    @property
    def is_ready(self) -> bool:
        """Return whether `next` would return at once."""
        return not self._queue.empty()

    def next(self, timeout_s: float | None = None) -> T:
        """Return the next value, or raise the exception of reading it.

        Args:
            timeout_s: How long to wait; None waits forever, which is meant for local reads only.

        Raises:
            LateError: No value came in time.
            RunError: No value is left.
        """
        try:
            value = self._queue.get(timeout=timeout_s)
        except queue.Empty:
            raise LateError(f"no row arrived for {timeout_s:g} s") from None
        if isinstance(value, Exception):
            # Kept, so that another call raises the error again instead of waiting forever.
            self._queue.put(value)
            raise value
        return value

    def close(self, timeout_s: float | None = None) -> None:
        """Stop the thread and wait (at most ``timeout_s``) until it no longer reads."""
        self._stop.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            for value in self._values:
                if not self._put(value):
                    return
            self._put(RunError("there are no more rows"))
        except Exception as error:
            self._put(error)
        finally:
            # Closed here, so that its resources, such as a stream, are released in the thread that used them.
            if isinstance(self._values, Generator):
                self._values.close()

    def _put(self, value: T | Exception) -> bool:
        while not self._stop.is_set():
            try:
                self._queue.put(value, timeout=_POLL_S)
            except queue.Full:
                continue
            return True
        return False


class DirectSource:
    """Reads a rank's slices, one per micro-batch, from any step on, in this process."""

    num_direct: int | None = None
    """Slices of the last step that were read directly, before the stream started; None if rows are not streamed."""
    _late = "the storage of the corpora does not answer: repair it"

    def __init__(
        self,
        reader: RowReader,
        plan: Plan,
        dp_rank: int,
        dp_size: int,
        sp_rank: int,
        sp_size: int,
        *,
        ring_size: int = 1,
        prefetch_rows: int = 2,
        timeout_s: float | None = None,
    ) -> None:
        self._reader, self._plan = reader, plan
        self._dp_rank, self._dp_size = dp_rank, dp_size
        self._sp_rank, self._sp_size, self._ring_size = sp_rank, sp_size, ring_size
        self._prefetch_rows, self._timeout_s = prefetch_rows, timeout_s
        self._ahead: ReadAhead[RowSlice] | None = None
        self._next_step = 0

    def step(self, step: int) -> Iterator[RowSlice]:
        """Yield this rank's slices of ``step`` (from 1), one per micro-batch.

        After the first step, every rank must request the steps in order.

        Raises:
            UserError: A shard can't be read.
            RunError: No row arrived in time, or the stream failed.
        """
        schedule = self._plan.step_schedule(step, self._dp_size)
        if self._ahead is None or self._next_step != step:
            self.close()
            self._ahead = ReadAhead(self._slices_from(step), self._prefetch_rows)
        # Until the last slice is yielded the position is unknown, so a repeated step starts over.
        self._next_step = 0
        for _ in schedule:
            yield self._next(step)
        self._next_step = step + 1

    def close(self) -> None:
        """Stop reading ahead, which may be repeated; the next step starts over."""
        if self._ahead is not None:
            self._ahead.close(CLOSE_TIMEOUT_S)
            self._ahead = None
            self._next_step = 0

    def _next(self, step: int) -> RowSlice:
        assert self._ahead is not None
        try:
            return self._ahead.next(self._timeout_s)
        except LateError as error:
            raise RunError(
                f"step {step}: {error} ({ROW_SHARE:g} of elastic.collective_timeout_s): {self._late}; then run the "
                "same command to resume"
            ) from error

    def _slices_from(self, first_step: int) -> Iterator[RowSlice]:
        return map(self._read, self._rows_from(first_step))

    def _rows_from(self, first_step: int) -> Iterator[int | None]:
        """Yield this rank's row of each micro-batch from ``first_step``; None for a filler."""
        for step in range(first_step, self._plan.num_steps + 1):
            for micro_batch in self._plan.step_schedule(step, self._dp_size):
                yield micro_batch[self._dp_rank]

    def _read(self, row: int | None) -> RowSlice:
        if row is None:
            return self._reader.filler(self._sp_rank, self._sp_size, self._ring_size)
        return self._reader.read("train", row, self._sp_rank, self._sp_size, self._ring_size)
