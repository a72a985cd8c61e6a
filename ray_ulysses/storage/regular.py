"""Reading of plain files only: opening a pipe would wait for its writer, and a device may have no end."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

from ray_ulysses.errors import UserError


class NotAPlainFileError(OSError, UserError):
    """A pipe, a socket or a device is where a file is expected."""

    def __str__(self) -> str:
        return f"{self.filename}: is {self.strerror}; put the file back, or remove what is there"


def open_regular(path: Path | str) -> BinaryIO:
    """Open a file for reading.

    Raises:
        NotAPlainFileError: It is a pipe, a socket or a device.
        OSError: It can't be opened.
    """
    # Without O_NONBLOCK, opening a pipe that nobody writes to never returns; for a file it means nothing.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise NotAPlainFileError(errno.EINVAL, "a pipe, a socket or a device, not a plain file", str(path))


def read_regular(path: Path | str) -> bytes:
    """Return the content of a file; raises as `open_regular` does."""
    with open_regular(path) as stream:
        return stream.read()
