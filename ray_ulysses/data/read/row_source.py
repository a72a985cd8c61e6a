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
"""Fraction of ``elastic.collective_timeout_s`` for which a rank waits for a row, so that the rank reports the cause
before the other ranks time out in a collective."""
CLOSE_TIMEOUT_S = 5.0
"""Time that ``close`` waits for a pending read, in seconds. A read hangs if the storage does not respond."""
_POLL_S = 0.1


class LateError(RunError):
    """Error for a value that did not arrive in time."""


class ReadAhead(Generic[T]):
    """Iterates over ``values`` in a thread, at most ``depth`` (at least one) values ahead of the consumer."""

    def __init__(self, values: Iterator[T], depth: int) -> None:
        self._values = values
        # An exception in the queue takes the place of the value whose reading raised it.
        self._queue: queue.Queue[T | Exception] = queue.Queue(maxsize=max(1, depth))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ray-ulysses-read-ahead", daemon=True)
        self._thread.start()

    @property
    def is_ready(self) -> bool:
        """Whether `next` would return immediately."""
        return not self._queue.empty()

    def next(self, timeout_s: float | None = None) -> T:
        """Return the next value, or raise the exception that was raised while reading it.

        Args:
            timeout_s: Maximum wait in seconds. None waits forever and is meant for local reads only.

        Raises:
            LateError: No value arrived in time.
            RunError: No values are left.
        """
        try:
            value = self._queue.get(timeout=timeout_s)
        except queue.Empty:
            raise LateError(f"no row arrived for {timeout_s:g} s") from None
        if isinstance(value, Exception):
            # Put back, so that the next call raises the error again instead of waiting forever.
            self._queue.put(value)
            raise value
        return value

    def close(self, timeout_s: float | None = None) -> None:
        """Stop the thread, and wait up to ``timeout_s`` seconds for pending reads to finish."""
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
            # Closed in this thread, so that resources such as a stream are released in the thread that used them.
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
    """Reads a rank's slices in this process, one per micro-batch, starting at any step."""

    num_direct: int | None = None
    """Number of the last step's slices that were read directly before the stream started; None without a stream."""
    _late = "the storage of the corpora is not responding. Repair it"

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

        After the first call, every rank must request consecutive steps.

        Raises:
            UserError: A shard can't be read.
            RunError: No row arrived in time, or the stream failed.
        """
        schedule = self._plan.step_schedule(step, self._dp_size)
        if self._ahead is None or self._next_step != step:
            self.close()
            self._ahead = ReadAhead(self._slices_from(step), self._prefetch_rows)
        # The position is unknown until the last slice is yielded, so repeating a step restarts the reads.
        self._next_step = 0
        for _ in schedule:
            yield self._next(step)
        self._next_step = step + 1

    def close(self) -> None:
        """Stop reading ahead. May be called repeatedly. Requesting another step restarts reading ahead."""
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
                f"step {step}: {error} ({ROW_SHARE:g} of elastic.collective_timeout_s); {self._late}, then run the "
                "same command to resume"
            ) from error

    def _slices_from(self, first_step: int) -> Iterator[RowSlice]:
        return map(self._read, self._rows_from(first_step))

    def _rows_from(self, first_step: int) -> Iterator[int | None]:
        """Yield this rank's row for each micro-batch from ``first_step`` on; None stands for a filler row."""
        for step in range(first_step, self._plan.num_steps + 1):
            for micro_batch in self._plan.step_schedule(step, self._dp_size):
                yield micro_batch[self._dp_rank]

    def _read(self, row: int | None) -> RowSlice:
        if row is None:
            return self._reader.filler(self._sp_rank, self._sp_size, self._ring_size)
        return self._reader.read("train", row, self._sp_rank, self._sp_size, self._ring_size)
