"""Runs storage calls in a background thread so that hung storage does not block training."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from ray_ulysses.clock import Clock, SystemClock

PROMPT_S = 1.0
"""Maximum time, in seconds, that a training step waits for its storage calls. Healthy storage responds sooner, so the
step's record survives a crash, and a user's request takes effect after the current step."""


class BackgroundCalls:
    """A queue of calls that a daemon thread runs in order. Any thread may add calls to the queue.

    Args:
        name: The name of the thread.
        tick: A function that the thread calls each time the queue stays empty for ``every_s``.
        every_s: Interval between ticks, in seconds; None for no ticks.
        clock: The time source.
    """

    def __init__(
        self, name: str, *, tick: Callable[[], object] = str, every_s: float | None = None, clock: Clock | None = None
    ) -> None:
        self._tick, self._every_s, self._clock = tick, every_s, clock or SystemClock()
        self._calls: deque[tuple[Callable[[], object], int]] = deque()
        self._changed = threading.Condition()
        self._num_asked = self._num_done = self._waiting_bytes = 0
        self._begun_at: float | None = None
        self._error: BaseException | None = None
        self._is_closed = False
        threading.Thread(target=self._run, name=name, daemon=True).start()

    @property
    def is_idle(self) -> bool:
        """Whether all queued calls have finished."""
        with self._changed:
            return self._num_done == self._num_asked

    @property
    def waiting_bytes(self) -> int:
        """Memory used by unfinished calls, in bytes."""
        with self._changed:
            return self._waiting_bytes

    @property
    def hangs_for_s(self) -> float:
        """Running time of the current call or tick, in seconds; 0 if none is running."""
        with self._changed:
            return 0.0 if self._begun_at is None else self._clock.monotonic() - self._begun_at

    def ask(self, call: Callable[[], object], num_bytes: int = 0) -> None:
        """Queue a call, or ignore the call after `close`.

        Args:
            call: The function. If it raises an error, the thread ends, and later `ask` and `wait` calls raise it.
            num_bytes: Memory that the call occupies until it has finished, in bytes.
        """
        with self._changed:
            self._raise_error()
            if self._is_closed:
                return
            self._calls.append((call, num_bytes))
            self._num_asked += 1
            self._waiting_bytes += num_bytes
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> bool:
        """Wait for all calls queued so far, and return whether they finished within the timeout."""
        with self._changed:
            last = self._num_asked
            ended = self._changed.wait_for(lambda: self._num_done >= last or self._error is not None, timeout_s)
            self._raise_error()
            return ended

    def wait_promptly(self) -> None:
        """Wait up to `PROMPT_S` for all calls queued so far; return at once if a call has hung for that long."""
        if self.hangs_for_s < PROMPT_S:
            self.wait(PROMPT_S)

    def close(self) -> None:
        """End the thread after it has run all calls queued so far."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._calls or self._is_closed, self._every_s)
                if self._is_closed and not self._calls:
                    return
                is_tick = not self._calls
                call, num_bytes = (self._tick, 0) if is_tick else self._calls.popleft()
                self._begun_at = self._clock.monotonic()
            try:
                call()
            except BaseException as error:
                self._error = error
            del call  # it may reference a lot of memory
            with self._changed:
                self._begun_at = None
                self._num_done += not is_tick
                self._waiting_bytes -= num_bytes
                self._changed.notify_all()
                if self._error is not None:
                    return
