"""A command's output: its result, its progress and its current phase.

This module imports no large library, so a command can print during slow imports.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import shutil
import sys
import threading
from contextlib import suppress
from typing import Literal, Self, TextIO, cast

from ray_ulysses.clock import Clock, SystemClock
from ray_ulysses.logging import get_logger, one_line, printable
from ray_ulysses.report.words import duration, folded

_GONE = (errno.EPIPE, errno.EIO, errno.EBADF)
"""Errors after which a stream stays unusable: its reader, terminal or descriptor is gone. A full disk may recover."""
_REMINDER_S = 10.0
"""Interval between log lines during a long phase, in seconds."""
_FIRST_S = 1.0
"""Seconds until the phase is first shown; a faster command prints only its result."""
_INTERVAL_S = 0.25
_KEPT = ("note:", "warning:")


class SteadyStream(io.TextIOBase):
    """Writes to the current standard output or standard error, and never fails.

    A training run must outlive the reader of its output: Ctrl-C also ends a `tee`, a terminal may be closed, the log's
    disk may be full, or a daemon may have closed the descriptor.
    """

    def __init__(self, name: Literal["stdout", "stderr"], *, escapes: bool = True) -> None:
        """Choose the stream; nothing is opened.

        Args:
            name: The name of the stream.
            escapes: Whether to escape control characters. If not, the caller writes colors and cursor movements.
        """
        self._name = name
        self._shown = printable if escapes else str

    @property
    def _stream(self) -> TextIO | None:
        # A live panel replaces the standard stream by its own, which writes to the panel's console.
        found = getattr(sys, self._name)
        found = getattr(found, "rich_proxied_file", found)
        return cast("TextIO | None", getattr(found, "unescaped", found))

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The stream's encoding, or ``utf-8`` if the stream has none."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        """Return whether the stream is a terminal."""
        stream = self._stream
        return stream is not None and not stream.closed and stream.isatty()

    def writable(self) -> bool:
        """Return True: the stream accepts every write."""
        return True

    def fileno(self) -> int:
        """Return the stream's file descriptor."""
        stream = self._stream
        if stream is None:
            raise io.UnsupportedOperation("the stream is closed")
        return stream.fileno()

    def write(self, text: str, /) -> int:
        """Write text, or drop the text if the stream is gone."""
        try:
            if (stream := self._stream) is not None:
                stream.write(self._shown(text))
        except (OSError, ValueError) as error:
            self._failed(error)
        return len(text)

    def flush(self) -> None:
        """Flush the stream; buffered text is dropped if the stream is gone."""
        try:
            if (stream := self._stream) is not None:
                stream.flush()
        except (OSError, ValueError) as error:
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        """Redirect a stream that is gone to the null device, so that Python's flush at exit does not fail."""
        if isinstance(error, OSError) and error.errno in _GONE:
            with suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self.fileno())
                os.close(nowhere)


def columns(stream: TextIO) -> int | None:
    """Return a terminal's width in characters, or None if the stream is not a terminal."""
    return shutil.get_terminal_size().columns if stream.isatty() else None


def put(text: str, *, stderr: bool = False, end: str = "\n", is_exact: bool = False) -> None:
    """Print formatted text. Commands print through this function only.

    In a terminal, lines are broken between words to fit the terminal's width, unless ``is_exact`` is set.
    """
    if (stream := sys.stderr if stderr else sys.stdout) is not None:
        try:
            stream.write((text if is_exact else folded(text, columns(stream))) + end)
            stream.flush()
        except BrokenPipeError:
            if stderr:
                raise
            # The reader, such as `head`, has ended. Drop the buffered text, or Python would report an error at exit.
            SteadyStream("stdout").flush()
            raise SystemExit(1) from None


def put_line(line: str, *, stderr: bool = False) -> None:
    """Print one line."""
    put(one_line(line), stderr=stderr)


class PhaseWatch:
    """Measures the time since the start and in the current phase."""

    def __init__(self, clock: Clock) -> None:
        """Start measuring."""
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
        """Record the current phase; return a log line about the phase if one is due, else None."""
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
    """Context manager that calls `look` at a fixed interval from its own thread."""

    def __init__(self, clock: Clock | None = None, interval_s: float | None = None) -> None:
        """Set up the display; nothing is shown before the ``with`` block is entered.

        Args:
            clock: Clock that measures the phases.
            interval_s: Seconds between calls of `look`.
        """
        self._clock = clock or SystemClock()
        self._watch = PhaseWatch(self._clock)
        self._interval_s = interval_s or _INTERVAL_S
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="display", daemon=True)

    def __enter__(self) -> Self:
        """Start the thread."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the thread."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=10.0)

    def look(self) -> None:
        """Update the display."""
        raise NotImplementedError

    def _follow(self) -> None:
        while not self._stop.wait(self._interval_s):
            self.look()


class Waiting(Display):
    """Shows a command's current phase after the first second.

    In a terminal, the phase is a single line, which is cleared before the result is printed. Elsewhere, a line is
    printed for each phase, and again every ten seconds.
    """

    def __init__(
        self, phase: str, *, is_quiet: bool = False, stream: TextIO | None = None, clock: Clock | None = None
    ) -> None:
        """Set up the display.

        Args:
            phase: The first phase.
            is_quiet: Whether to show only notes and warnings.
            stream: The stream to write to; standard error by default.
            clock: Clock that measures the phases.
        """
        super().__init__(clock)
        self._phase, self._is_quiet = phase, is_quiet
        self._stream = stream or cast("TextIO", SteadyStream("stderr", escapes=False))
        self._is_live = self._stream.isatty()

    def __enter__(self) -> Self:
        """Start showing the phase."""
        if self._is_quiet:
            get_logger("ray_ulysses").setLevel(logging.WARNING)
            return self
        return super().__enter__()

    def __exit__(self, *_: object) -> None:
        """Stop, and clear the terminal's line before the result is printed."""
        super().__exit__()
        if self._is_quiet:
            get_logger("ray_ulysses").setLevel(logging.INFO)
        else:
            self._clear()

    def phase(self, name: str) -> None:
        """Set the current phase."""
        with self._lock:
            self._phase = name

    def say(self, line: str) -> None:
        """Print a progress line above the current phase."""
        if self._is_quiet and not line.startswith(_KEPT):
            return
        with self._lock:
            self._clear()
            self._stream.write(f"{folded(one_line(line), columns(self._stream))}\n")
            self._stream.flush()

    def show(self, text: str) -> None:
        """Print a formatted part of the result on standard output."""
        with self._lock:
            self._clear()
            put(text)

    def look(self) -> None:
        """Show the current phase if a line is due."""
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
