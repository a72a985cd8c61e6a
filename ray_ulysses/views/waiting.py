"""Says what a command is waiting for, on standard error, until its result is there.

It imports nothing heavy: it is there before the libraries are that take the first seconds.
"""

from __future__ import annotations

import logging
import threading
from types import TracebackType
from typing import TextIO, cast

from ray_ulysses.clock import Clock, SystemClock
from ray_ulysses.logging import get_logger
from ray_ulysses.report.words import duration
from ray_ulysses.terminal import one_line
from ray_ulysses.views.streams import SteadyStream, put

_REMINDER_S = 10.0
"""Interval of the lines of a long phase."""
_FIRST_S = 1.0
"""A command that is faster says nothing but its result."""
_INTERVAL_S = 0.25
_KEPT = ("note:", "warning:")


class PhaseWatch:
    """Measures the duration of the start and of its current phase."""

    def __init__(self, clock: Clock) -> None:
        """Start to measure."""
        self._clock = clock
        self._began = self._phase_began = self._said = clock.monotonic()
        self._phase: str | None = None

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return self._clock.monotonic() - self._began

    @property
    def phase_s(self) -> float:
        """Seconds since the phase began."""
        return self._clock.monotonic() - self._phase_began

    def look(self, phase: str | None) -> str | None:
        """Record the current phase; return its line for a log if one is due."""
        now = self._clock.monotonic()
        if phase != self._phase:
            self._phase, self._phase_began, self._said = phase, now, now
            return phase
        if phase is None or now - self._said < _REMINDER_S:
            return None
        self._said = now
        return f"{phase}, for {duration(self.phase_s)}"


class Waiting:
    """Context manager that shows the phase of a command from its own thread.

    In a terminal that is one line, which is gone when the result comes; elsewhere it is a line per phase, and one every
    ten seconds of it, beginning after the first second.
    """

    def __init__(
        self, phase: str, *, is_quiet: bool = False, stream: TextIO | None = None, clock: Clock | None = None
    ) -> None:
        """Show nothing before the block is entered.

        Args:
            phase: What is waited for first.
            is_quiet: Whether nothing is shown but notes and warnings.
            stream: Where to write; standard error by default.
            clock: Source of time.
        """
        self._phase, self._is_quiet = phase, is_quiet
        self._stream = stream or cast("TextIO", SteadyStream("stderr", escapes=False))
        self._is_live = self._stream.isatty()
        self._watch = PhaseWatch(clock or SystemClock())
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="waiting", daemon=True)

    def __enter__(self) -> Waiting:
        """Start to show what is waited for."""
        if self._is_quiet:
            get_logger("ray_ulysses").setLevel(logging.WARNING)
        else:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop, and clear the line of a terminal, since the result follows."""
        self._stop.set()
        if self._is_quiet:
            get_logger("ray_ulysses").setLevel(logging.INFO)
        else:
            self._thread.join(timeout=10.0)
            self._clear()

    def phase(self, name: str) -> None:
        """Set what is waited for now."""
        with self._lock:
            self._phase = name

    def say(self, line: str) -> None:
        """Print a line about the progress, above that of what is waited for."""
        if self._is_quiet and not line.startswith(_KEPT):
            return
        with self._lock:
            self._clear()
            self._stream.write(f"{one_line(line)}\n")
            self._stream.flush()

    def show(self, text: str) -> None:
        """Print a part of the result, which has been laid out, on standard output."""
        with self._lock:
            self._clear()
            put(text)

    def look(self) -> None:
        """Show what is waited for, if it is time to."""
        with self._lock:
            if self._watch.elapsed_s < _FIRST_S:
                return
            phase = one_line(self._phase)
            due = self._watch.look(phase)
            elapsed = duration(self._watch.elapsed_s)
            if self._is_live:
                self._stream.write(f"\r\033[K{phase}  {elapsed}")
            elif due is not None:
                self._stream.write(f"elapsed={elapsed} phase: {due}\n")
            self._stream.flush()

    def _clear(self) -> None:
        if self._is_live:
            self._stream.write("\r\033[K")
            self._stream.flush()

    def _follow(self) -> None:
        while not self._stop.wait(_INTERVAL_S):
            self.look()
