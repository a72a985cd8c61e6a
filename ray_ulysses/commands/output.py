"""What a command prints: its result, lines about its progress, and what it is waiting for.

It imports nothing heavy: it is there before the libraries are that take the first seconds.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import sys
import threading
from contextlib import suppress
from types import TracebackType
from typing import Literal, Self, TextIO, cast

from ray_ulysses.clock import Clock, SystemClock
from ray_ulysses.logging import get_logger, one_line, printable
from ray_ulysses.report.words import duration

_GONE = (errno.EPIPE, errno.EIO, errno.EBADF)
"""The reader has ended, the terminal was closed, or the descriptor; a full disk may have room again."""
_REMINDER_S = 10.0
"""Interval of the lines of a long phase."""
_FIRST_S = 1.0
"""A command that is faster says nothing but its result."""
_INTERVAL_S = 0.25
_KEPT = ("note:", "warning:")


class SteadyStream(io.TextIOBase):
    """Writes to standard output or error as it is then, and never fails.

    A training run outlives what reads its lines: `tee` ends by the same Ctrl-C, a terminal is closed, the disk of a log
    is full, or a daemon has closed the descriptor.
    """

    def __init__(self, name: Literal["stdout", "stderr"], *, escapes: bool = True) -> None:
        """Choose the stream; nothing is opened.

        Args:
            name: Which one.
            escapes: Whether control characters are escaped; without, the caller writes colors and cursor movements.
        """
        self._name = name
        self._shown = printable if escapes else str

    @property
    def _stream(self) -> TextIO | None:
        # A live panel puts a stream of its own in the place of it, which writes to the panel's console.
        found = getattr(sys, self._name)
        found = getattr(found, "rich_proxied_file", found)
        return cast("TextIO | None", getattr(found, "unescaped", found))

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The encoding of the stream."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        """Return whether the stream is a terminal."""
        stream = self._stream
        return stream is not None and not stream.closed and stream.isatty()

    def writable(self) -> bool:
        """Return that the stream can be written."""
        return True

    def fileno(self) -> int:
        """Return the descriptor of the stream."""
        stream = self._stream
        if stream is None:
            raise io.UnsupportedOperation("the stream is closed")
        return stream.fileno()

    def write(self, text: str, /) -> int:
        """Write a text, if the stream still takes it."""
        try:
            if (stream := self._stream) is not None:
                stream.write(self._shown(text))
        except (OSError, ValueError) as error:
            self._failed(error)
        return len(text)

    def flush(self) -> None:
        """Write what is buffered, if the stream still takes it."""
        try:
            if (stream := self._stream) is not None:
                stream.flush()
        except (OSError, ValueError) as error:
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        """Send everything to nowhere from now on, where nobody reads it any more: Python writes the rest at its end."""
        if isinstance(error, OSError) and error.errno in _GONE:
            with suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self.fileno())
                os.close(nowhere)


def put(text: str, *, stderr: bool = False, end: str = "\n") -> None:
    """Print a text that has been laid out; the only way of commands to their output."""
    if (stream := sys.stderr if stderr else sys.stdout) is not None:
        try:
            stream.write(text + end)
            stream.flush()
        except BrokenPipeError:
            if stderr:
                raise
            # `head` has read enough. What is buffered goes nowhere, or Python's end would complain.
            SteadyStream("stdout").flush()
            raise SystemExit(1) from None


def put_line(line: str, *, stderr: bool = False) -> None:
    """Print one line."""
    put(one_line(line), stderr=stderr)


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
            lasts = ""
        elif now - self._said >= _REMINDER_S:
            self._said = now
            lasts = f", for {duration(self.phase_s)}"
        else:
            return None
        return None if phase is None else f"elapsed={duration(self.elapsed_s)} phase: {phase}{lasts}"


class Display:
    """Context manager that shows something from a thread of its own, which calls `look` again and again."""

    def __init__(self, clock: Clock | None = None, interval_s: float | None = None) -> None:
        """Show nothing before the block is entered.

        Args:
            clock: Source of time.
            interval_s: Seconds between two looks.
        """
        self._clock = clock or SystemClock()
        self._watch = PhaseWatch(self._clock)
        self._interval_s = interval_s or _INTERVAL_S
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="display", daemon=True)

    def __enter__(self) -> Self:
        """Start to show."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=10.0)

    def look(self) -> None:
        """Show what there is to show now."""
        raise NotImplementedError

    def _follow(self) -> None:
        while not self._stop.wait(self._interval_s):
            self.look()


class Waiting(Display):
    """Shows the phase of a command.

    In a terminal that is one line, which is gone when the result comes; elsewhere it is a line per phase, and one every
    ten seconds of it, beginning after the first second.
    """

    def __init__(
        self, phase: str, *, is_quiet: bool = False, stream: TextIO | None = None, clock: Clock | None = None
    ) -> None:
        """Set up the display.

        Args:
            phase: What is waited for first.
            is_quiet: Whether nothing is shown but notes and warnings.
            stream: Where to write; standard error by default.
            clock: Source of time.
        """
        super().__init__(clock)
        self._phase, self._is_quiet = phase, is_quiet
        self._stream = stream or cast("TextIO", SteadyStream("stderr", escapes=False))
        self._is_live = self._stream.isatty()

    def __enter__(self) -> Self:
        """Start to show what is waited for."""
        if self._is_quiet:
            get_logger("ray_ulysses").setLevel(logging.WARNING)
            return self
        return super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop, and clear the line of a terminal, since the result follows."""
        super().__exit__(kind, error, trace)
        if self._is_quiet:
            get_logger("ray_ulysses").setLevel(logging.INFO)
        else:
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
            if self._is_live:
                self._stream.write(f"\r\033[K{phase}  {duration(self._watch.elapsed_s)}")
            elif due is not None:
                self._stream.write(f"{due}\n")
            self._stream.flush()

    def _clear(self) -> None:
        if self._is_live:
            self._stream.write("\r\033[K")
            self._stream.flush()
