"""Lists the files of the sources, each once regardless of links to it, in an order given by their names alone."""

from __future__ import annotations

import errno
import fnmatch
import functools
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ray_ulysses.data.sources.quarantine import Rejected
from ray_ulysses.errors import UserError
from ray_ulysses.storage.patience import is_transient

_LEADS_NOWHERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


@dataclass(frozen=True, kw_only=True, slots=True)
class FileStamp:
    """A file as it was when the sources were listed."""

    path: str
    num_bytes: int
    modified_ns: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Folder:
    """A folder to be listed.

    Attributes:
        path: Its path, through the links that lead to it.
        below: The same, relative to the source.
        real: Its path without links.
        entered: The real paths of all its parents and its own.
    """

    path: str
    below: str
    real: str
    entered: frozenset[str]


class FileListing:
    """Lists one source after another, and each file only once.

    Links are followed, except those to a parent of the link. Errors of the storage are raised, so that the listing can
    be repeated and no file is left out.

    Attributes:
        pattern: Only files of a folder whose path below it matches; ``*`` also crosses ``/``.
        exclude: Patterns of files and folders to leave out.
        out: A folder to leave out wherever it is; None for none.
    """

    def __init__(self, pattern: str, exclude: Sequence[str], out: Path | None = None) -> None:
        self.pattern = pattern
        self.exclude = tuple(exclude)
        self.out = None if out is None else os.path.realpath(out)
        self._listed: dict[str, str] = {}

    def files(self, source: Path) -> Iterator[FileStamp | Rejected]:
        """Yield the files of a source, and a `Rejected` for each that is left out.

        Raises:
            UserError: The source is missing, or a file or folder of it can't be read.
        """
        path = str(source)
        try:
            status, real = os.stat(path), os.path.realpath(path, strict=True)
        except OSError as error:
            raise unreadable(path, error) from error
        if stat.S_ISDIR(status.st_mode):
            yield from self._files_below(_Folder(path=path, below="", real=real, entered=frozenset([real])))
        else:
            yield self._file(path, real, status)

    def _files_below(self, source: _Folder) -> Iterator[FileStamp | Rejected]:
        """Yield the files of a folder, then those of its subfolders, sorted by name."""
        folders = [source]
        while folders:
            folder = folders.pop()
            inner: list[_Folder] = []
            for entry in _entries(folder.path):
                below = f"{folder.below}/{entry.name}" if folder.below else entry.name
                found = None if is_excluded(below, self.exclude) else self._entry(entry, below, folder)
                if isinstance(found, _Folder):
                    inner.append(found)
                elif found is not None:
                    yield found
            folders.extend(reversed(inner))

    def _entry(self, entry: os.DirEntry[str], below: str, folder: _Folder) -> _Folder | FileStamp | Rejected | None:
        """Return the file or folder of a directory entry; None for a file that does not match."""
        try:
            is_folder, is_link = entry.is_dir(), entry.is_symlink()
            if not is_folder and not matches(below, self.pattern):
                return None
            status = entry.stat()
            real = os.path.realpath(entry.path, strict=True) if is_link else os.path.join(folder.real, entry.name)
        except OSError as error:
            if entry.is_symlink() and error.errno in _LEADS_NOWHERE:
                return Rejected(source=path_text(entry.path), offset=0, reason="a broken symbolic link")
            raise unreadable(entry.path, error) from error
        if not is_folder:
            return self._file(entry.path, real, status)
        if real == self.out:
            return None
        if real in folder.entered:
            return Rejected(source=path_text(entry.path), offset=0, reason="a link to one of its own parent folders")
        return _Folder(path=entry.path, below=below, real=real, entered=folder.entered | {real})

    def _file(self, path: str, real: str, status: os.stat_result) -> FileStamp | Rejected:
        if not stat.S_ISREG(status.st_mode):
            return Rejected(source=path_text(path), offset=0, reason="not a regular file")
        if real in self._listed:
            reason = f"the same file as {path_text(self._listed[real])}"
            return Rejected(source=path_text(path), offset=0, reason=reason)
        self._listed[real] = path
        return FileStamp(path=path, num_bytes=status.st_size, modified_ns=status.st_mtime_ns)


@contextmanager
def open_parquet(path: str, **options: Any) -> Iterator[pq.ParquetFile]:
    """Open a Parquet file of any name, whose pages are compared with their checksums if they have any.

    pyarrow accepts a name that is not UTF-8 only as bytes.

    Raises:
        OSError: It can't be read, like the other ``READ_ERRORS``.
    """
    with (
        pa.OSFile(os.fsencode(path)) as file,
        pq.ParquetFile(file, page_checksum_verification=True, **options) as parquet,
    ):
        yield parquet


@functools.lru_cache(maxsize=64)
def path_text(path: str | Path) -> str:
    r"""Return a path as it can be written anywhere: bytes of a name that are not UTF-8 are shown as ``\xff``."""
    return str(path).encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def matches(below: str, pattern: str) -> bool:
    """Return whether the path of a file, relative to its source, matches a pattern."""
    return fnmatch.fnmatchcase(below, pattern) or (
        pattern.startswith("**/") and fnmatch.fnmatchcase(below, pattern[3:])
    )


def is_excluded(below: str, patterns: Sequence[str]) -> bool:
    """Return whether a file or folder is excluded; a pattern without ``/`` also matches its last name."""
    name = below.rpartition("/")[2]
    return any(
        matches(below, pattern) or ("/" not in pattern and fnmatch.fnmatchcase(name, pattern)) for pattern in patterns
    )


def unreadable(path: str, error: Exception, what: str = "") -> Exception:
    """Return the error for a source that can't be read; a transient error is returned itself, to be retried.

    Args:
        path: The file or folder.
        error: The error of reading it.
        what: The expected format; empty if the format is not the problem.
    """
    if is_transient(error):
        return error
    if what:
        return UserError(f"source={path_text(path)}: the {what} file can't be read ({error}); restore or remove it")
    if getattr(error, "errno", None) in _LEADS_NOWHERE:
        return UserError(f"source={path_text(path)}: no such file or directory")
    reason = getattr(error, "strerror", None) or error
    way_out = "make it readable, or leave it out (--exclude)"
    return UserError(f"source={path_text(path)}: can't be read ({reason}); {way_out}")


def changed(path: str) -> UserError:
    """Return the error for a source that is no longer what was listed."""
    return UserError(
        f"source={path_text(path)}: changed while it was being prepared; run prepare again once it no longer changes"
    )


def _entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        raise unreadable(folder, error) from error
