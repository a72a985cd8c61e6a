"""Standard output and error of a command whose reader may go away: what can't be written is left out."""

from __future__ import annotations

import errno
import io
import os
import sys
from contextlib import suppress
from typing import Literal, TextIO, cast

from ray_ulysses.terminal import one_line, printable

_GONE = (errno.EPIPE, errno.EIO, errno.EBADF)
"""The reader has ended, the terminal was closed, or the descriptor; a full disk may have room again."""


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
