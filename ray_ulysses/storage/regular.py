"""Opens regular files below a folder that an untrusted user may have created.

No symbolic link below the folder is followed, because a link could expose one of this user's private files. The folder
itself and its parents may be links. Each subfolder is opened relative to its parent's descriptor, so no component can
be replaced by a link in the meantime. Pipes and devices are refused, since reading them may block or never end.
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
    """A symbolic link, pipe, socket or device was found instead of a regular file or folder."""

    def __str__(self) -> str:
        # For a link, `strerror` already contains the link's path.
        return str(self.strerror) if self.errno == errno.ELOOP else f"{self.filename}: is {self.strerror}"


def link_error(path: Path | str) -> NotAPlainFileError:
    """Return the error for a symbolic link that is not followed."""
    rule = f"{path} is a link, and links inside a run, a store or a corpus are not followed"
    hint = "replace the link by the files, or set checkpoint.storage to the other disk"
    return NotAPlainFileError(errno.ELOOP, f"{rule}; {hint}", str(path))


@contextmanager
def opened_folder(folder: Path, within: Path, *, make: bool = False) -> Iterator[int]:
    """Yield a descriptor of a folder for use as ``dir_fd``.

    Args:
        folder: The folder.
        within: The folder itself or an ancestor, below which no symbolic link is followed.
        make: Whether to create missing folders below ``within``, durably.

    Raises:
        NotAPlainFileError: The path contains a symbolic link below ``within``.
        OSError: The folder can't be opened.
    """
    names = folder.relative_to(within).parts
    if ".." in names:
        raise ValueError(f"{folder} contains '..' and may be outside of {within}")
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
    """Yield a descriptor that can list a folder, opened relative to the parent folder's descriptor ``parent``."""
    try:
        descriptor = os.open(path.name, _FOLDER & ~os.O_PATH | os.O_NOFOLLOW, dir_fd=parent)
    except OSError as error:
        raise _named(error, path, parent) from None
    try:
        yield descriptor
    finally:
        close_quietly(descriptor)


def open_inside(path: Path, within: Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file without following symbolic links below a folder, and return the descriptor.

    Args:
        path: The path of the file.
        within: The folder, an ancestor of the file.
        flags: Flags for `os.open`. O_TRUNC is not allowed, since it would take effect before the file type is checked.

    Raises:
        NotAPlainFileError: The file is not a regular file, or the path contains a symbolic link below ``within``.
        OSError: The file can't be opened.
    """
    assert not flags & os.O_TRUNC
    with opened_folder(path.parent, within) as folder:
        try:
            return _plain(os.open(path.name, flags | _PLAIN, 0o644, dir_fd=folder), path)
        except OSError as error:
            raise _named(error, path, folder) from None


def make_folder(folder: Path, within: Path) -> None:
    """Create a folder if it is missing; see `opened_folder`."""
    with opened_folder(folder, within, make=True):
        pass


def refuse_links(folder: Path, within: Path) -> None:
    """Refuse a folder whose path contains a symbolic link below ``within``. Other folders, even missing, are accepted.

    Raises:
        NotAPlainFileError: The path contains a symbolic link below ``within``.
    """
    with suppress(FileNotFoundError, NotADirectoryError):
        if folder.is_relative_to(within):
            with opened_folder(folder, within):
                pass


def open_regular(path: Path | str, within: Path | None = None) -> BinaryIO:
    """Open a regular file for reading.

    Args:
        path: The path of the file.
        within: The folder below which no symbolic link is followed; None to follow links, for paths given by the user.

    Raises:
        NotAPlainFileError: The file is not a regular file, or the path contains a symbolic link below ``within``.
        OSError: The file can't be opened.
    """
    if within is not None:
        return os.fdopen(open_inside(Path(path), within), "rb")
    # Without O_NONBLOCK, opening a pipe without a writer blocks. The flag has no effect on regular files.
    return os.fdopen(_plain(os.open(path, os.O_RDONLY | os.O_NONBLOCK), path), "rb")


def read_regular(path: Path | str, within: Path | None = None) -> bytes:
    """Return a regular file's content; see `open_regular`."""
    with open_regular(path, within) as stream:
        return stream.read()


def _open_below(name: str, folder: int, make: bool) -> int:
    try:
        return os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
    except FileNotFoundError:
        if not make:
            raise
    # Another process may create the folder first.
    with suppress(FileExistsError):
        os.mkdir(name, dir_fd=folder)
        sync(".", folder)
    return os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)


def sync(path: Path | str, folder: int | None = None) -> None:
    """Flush a file, or a folder's entries, to disk. A relative path is resolved against the descriptor ``folder``."""
    descriptor = os.open(path, os.O_RDONLY, dir_fd=folder)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems can't sync a folder. They sync its entries together with the files.
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
    finally:
        os.close(descriptor)


def close_quietly(descriptor: int) -> None:
    """Close a descriptor and ignore errors. Use it only if no written data can be lost."""
    with suppress(OSError):
        os.close(descriptor)


def _plain(descriptor: int, path: Path | str) -> int:
    """Return the descriptor if it refers to a regular file; otherwise close it and raise an error."""
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    text = "a pipe, a socket or a device instead of a regular file; restore the file, or remove this one"
    raise NotAPlainFileError(errno.EINVAL, text, str(path))


def _named(error: OSError, path: Path, folder: int) -> OSError:
    """Add the full path to an error from ``open``, or return a link error if ``path`` is a symbolic link."""
    if error.errno in (errno.ELOOP, errno.ENOTDIR):
        with suppress(OSError):
            if stat.S_ISLNK(os.stat(path.name, dir_fd=folder, follow_symlinks=False).st_mode):
                return link_error(path)
    error.filename = str(path)
    return error
