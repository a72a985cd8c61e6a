"""Standard output and error of a command whose reader may go away: what can't be written is left out."""

from __future__ import annotations

import errno
import io
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Literal, TextIO, cast

if TYPE_CHECKING:
    from rich.console import Console

_GONE = (errno.EPIPE, errno.EIO, errno.EBADF)
"""The reader has ended, the terminal was closed, or the descriptor; a full disk may have room again."""


class SteadyStream(io.TextIOBase):
    """Writes to standard output or error as it is then, and never fails.

    A training run outlives what reads its lines: `tee` ends by the same Ctrl-C, a terminal is closed, the disk of a log
    is full, or a daemon has closed the descriptor.
    """

    def __init__(self, name: Literal["stdout", "stderr"]) -> None:
        """Choose the stream; nothing is opened."""
        self._name = name

    @property
    def _stream(self) -> TextIO | None:
        # A live panel puts a stream of its own in the place of it, which writes to the panel's console.
        found = getattr(sys, self._name)
        return cast("TextIO | None", getattr(found, "rich_proxied_file", found))

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
                stream.write(text)
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


def open_console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """Return a console of standard output or error that never fails.

    Args:
        stderr: Whether it writes to standard error.
        quiet: Whether it writes nothing.
    """
    from rich.console import Console

    return Console(file=cast("TextIO", SteadyStream("stderr" if stderr else "stdout")), quiet=quiet)
