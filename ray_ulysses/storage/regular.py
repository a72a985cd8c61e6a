"""Opens plain files below a folder that somebody else may have made.

Below such a folder no link is followed: it could lead to a file of this user that the folder's author can't reach. Each
folder on the way is opened from the one above it, so that none can be replaced by a link in between. The folder itself,
and what is above it, may be links. Nothing but a plain file is opened: a pipe would wait for its writer, and a device
may have no end.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from ray_ulysses.errors import UserError

_FOLDER = os.O_PATH | os.O_DIRECTORY
_PLAIN = os.O_NOFOLLOW | os.O_NONBLOCK


class NotAPlainFileError(OSError, UserError):
    """A link, a pipe, a socket or a device is where a file or a folder is expected."""

    def __str__(self) -> str:
        # The reason names the link, which may be a folder on the way to the file that the error names.
        return str(self.strerror) if self.errno == errno.ELOOP else f"{self.filename}: is {self.strerror}"


def link_error(path: Path | str) -> NotAPlainFileError:
    """Return the error for a link where none is followed."""
    rule = (
        f"{path} is a link, and links inside a run, a store or a corpus are not followed; move the files in its place"
    )
    return NotAPlainFileError(errno.ELOOP, f"{rule}, or set checkpoint.storage to the other disk", str(path))


@contextmanager
def opened_folder(folder: Path, within: Path, *, make: bool = False) -> Iterator[int]:
    """Yield a descriptor of a folder that serves as ``dir_fd``.

    Args:
        folder: The folder.
        within: A folder that holds it or is it, below which no link is followed.
        make: Whether missing folders below ``within`` are made, to outlive a power cut.

    Raises:
        NotAPlainFileError: There is a link on the way.
        OSError: It can't be opened.
    """
    names = folder.relative_to(within).parts
    if ".." in names:
        raise ValueError(f"{folder} may lead out of {within}")
    descriptor, path = os.open(within, _FOLDER), within
    try:
        for name in names:
            path = path / name
            try:
                below = _open_below(name, descriptor, make)
            except OSError as error:
                raise _named(error, path, descriptor) from None
            close_quietly(descriptor)
            descriptor = below
        yield descriptor
    finally:
        close_quietly(descriptor)


@contextmanager
def entered(path: Path, parent: int) -> Iterator[int]:
    """Yield a descriptor of a folder that can be listed, given one of the folder above it; see `opened_folder`."""
    try:
        descriptor = os.open(path.name, _FOLDER & ~os.O_PATH | os.O_NOFOLLOW, dir_fd=parent)
    except OSError as error:
        raise _named(error, path, parent) from None
    try:
        yield descriptor
    finally:
        close_quietly(descriptor)


def open_inside(path: Path, within: Path, flags: int = os.O_RDONLY) -> int:
    """Return a descriptor of a plain file that is reached from a folder without following a link below that.

    Args:
        path: The file.
        within: The folder.
        flags: Flags of `os.open`, without O_TRUNC, since it may turn out not to be a plain file.

    Raises:
        NotAPlainFileError: It is not a plain file, or there is a link on the way.
        OSError: It can't be opened.
    """
    assert not flags & os.O_TRUNC
    with opened_folder(path.parent, within) as folder:
        try:
            return _plain(os.open(path.name, flags | _PLAIN, 0o644, dir_fd=folder), path)
        except OSError as error:
            raise _named(error, path, folder) from None


def make_folder(folder: Path, within: Path) -> None:
    """Make a folder that is missing; raises as `opened_folder` does."""
    with opened_folder(folder, within, make=True):
        pass


def refuse_links(folder: Path, within: Path) -> None:
    """Refuse a folder that a link leads to, if it is below another one; an absent one is not refused.

    Raises:
        NotAPlainFileError: There is a link on the way.
    """
    with suppress(FileNotFoundError, NotADirectoryError):
        if folder.is_relative_to(within):
            with opened_folder(folder, within):
                pass


def open_regular(path: Path | str, within: Path | None = None) -> BinaryIO:
    """Open a file for reading.

    Args:
        path: The file.
        within: The folder below which no link is followed; None where a person has named the file.

    Raises:
        NotAPlainFileError: It is a pipe, a socket or a device, or there is a link on the way.
        OSError: It can't be opened.
    """
    if within is not None:
        return os.fdopen(open_inside(Path(path), within), "rb")
    # Without O_NONBLOCK, opening a pipe that nobody writes to never returns; for a file it means nothing.
    return os.fdopen(_plain(os.open(path, os.O_RDONLY | os.O_NONBLOCK), path), "rb")


def read_regular(path: Path | str, within: Path | None = None) -> bytes:
    """Return the content of a file; see `open_regular`."""
    with open_regular(path, within) as stream:
        return stream.read()


def _open_below(name: str, folder: int, make: bool) -> int:
    try:
        return os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
    except FileNotFoundError:
        if not make:
            raise
    try:
        os.mkdir(name, dir_fd=folder)
    except FileExistsError:
        # Another process was faster.
        pass
    else:
        sync(".", folder)
    return os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)


def sync(path: Path | str, folder: int | None = None) -> None:
    """Make a file, or the names in a folder, outlive a power cut; ``folder`` is a descriptor that the path is below."""
    descriptor = os.open(path, os.O_RDONLY, dir_fd=folder)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems refuse to sync a folder and sync its names with the file.
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
    finally:
        os.close(descriptor)


def close_quietly(descriptor: int) -> None:
    """Close a descriptor by which nothing was written that could be lost."""
    with suppress(OSError):
        os.close(descriptor)


def _plain(descriptor: int, path: Path | str) -> int:
    """Return the descriptor if it belongs to a plain file; close it otherwise."""
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    text = "a pipe, a socket or a device, not a plain file; put the file back, or remove what is there"
    raise NotAPlainFileError(errno.EINVAL, text, str(path))


def _named(error: OSError, path: Path, folder: int) -> OSError:
    """Return an error of opening a name in a folder with the whole path; one of its own where a link is the reason."""
    if error.errno in (errno.ELOOP, errno.ENOTDIR):
        try:
            if stat.S_ISLNK(os.stat(path.name, dir_fd=folder, follow_symlinks=False).st_mode):
                return link_error(path)
        except OSError:
            pass
    error.filename = str(path)
    return error
