"""Runs an iterator in a thread, a few values before they are needed."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterator
from typing import Generic, TypeVar

from ray_ulysses.errors import RunError

T = TypeVar("T")


class LateError(RunError):
    """No value came in time."""


_POLL_S = 0.1


class ReadAhead(Generic[T]):
    """Runs ``values`` in a thread, at most ``depth`` values ahead (at least one)."""

    def __init__(self, values: Iterator[T], depth: int) -> None:
        self._values = values
        # An exception in it is not a value, but what reading the next one raised.
        self._queue: queue.Queue[T | Exception] = queue.Queue(maxsize=max(1, depth))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ray-ulysses-read-ahead", daemon=True)
        self._thread.start()

    @property
    def is_ready(self) -> bool:
        """Whether `next` would not wait."""
        return not self._queue.empty()

    def next(self, timeout_s: float | None = None) -> T:
        """Return the next value, or raise what reading it raised.

        Args:
            timeout_s: How long to wait for it; None waits forever, which is meant for local reads only.

        Raises:
            LateError: No value came in time.
            RunError: None is left.
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
            # What it holds, such as a stream, ends in the thread that used it.
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
