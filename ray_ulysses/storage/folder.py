"""Folders of finished files that are read at any place: a directory, or a prefix of an object store."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from ray_ulysses.storage.atomic import file_crc32
from ray_ulysses.storage.location import expand_home, parse_location
from ray_ulysses.storage.regular import open_inside, open_regular, read_regular

if TYPE_CHECKING:
    from ray_ulysses.storage.object_folder import CachedObject, RemoteFolder

_RETRY_S = 5.0
"""Those who read wait longer, with a patience of their own."""

Folder: TypeAlias = "LocalFolder | RemoteFolder"
"""The files of a folder, by their relative POSIX path, of which one that is missing raises FileNotFoundError; ``str``
gives its location for people. What pyarrow reads a file from is to be asked for anew for each reading."""
RangeReader: TypeAlias = "LocalFile | CachedObject"
"""An open file; threads may read at once, and fetch ranges ``(start, size)`` where reading them one by one would wait
for each. A damaged range is forgotten, which says whether reading it again may give other bytes."""


class LocalFolder:
    """A directory; no link in it is followed.

    Attributes:
        path: The directory.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def named(self, key: str) -> str:
        """Return the path of a file."""
        return str(self.path / key)

    def exists(self) -> bool:
        """Return whether there is something of that name."""
        return self.path.exists()

    def size(self, key: str) -> int:
        """Return the size of a file in bytes."""
        with open_regular(self.path / key, self.path) as stream:
            return os.fstat(stream.fileno()).st_size

    def read_whole(self, key: str) -> bytes:
        """Return the content of a plain file."""
        return read_regular(self.path / key, self.path)

    def crc32(self, key: str) -> int:
        """Return the CRC-32 of the content of a file."""
        return file_crc32(self.for_arrow(key))

    def for_arrow(self, key: str) -> Path:
        """Return the path of a plain file."""
        open_regular(self.path / key, self.path).close()
        return self.path / key

    def open_ranges(self, key: str, *, fresh: bool = False) -> LocalFile:
        """Open a file, which no cache is before."""
        return LocalFile(self.path / key, self.path)


class LocalFile:
    """A file that is read through a descriptor.

    A memory map would be no faster, and ends the process where the file was truncated or its storage went away.

    Attributes:
        size: Its size in bytes when it was opened.
    """

    def __init__(self, path: Path, within: Path) -> None:
        """Open a file; raises as `open_inside`."""
        self._descriptor = open_inside(path, within)
        # Closed when nobody reads any more: a thread may, while another opens the file anew.
        weakref.finalize(self, _close, self._descriptor)
        self.size = os.fstat(self._descriptor).st_size

    def read_at(self, start: int, size: int) -> bytes:
        """Return ``size`` bytes from a place on, or fewer where the file ends; raises OSError."""
        found = os.pread(self._descriptor, size, start)
        if len(found) == size or not found:
            return found
        # The kernel may return less at a time (2 GiB at most).
        parts = [found]
        while parts[-1] and start + size > (place := start + sum(map(len, parts))):
            parts.append(os.pread(self._descriptor, start + size - place, place))
        return b"".join(parts)

    def fetch(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Do nothing."""

    def forget(self, start: int, size: int) -> bool:
        """Return False: nothing is cached here."""
        return False


def open_folder(location: str | Path) -> Folder:
    """Return the folder at a location; nothing is read yet.

    Args:
        location: A path or URI as of `ray_ulysses.storage.place.open_store`.

    Raises:
        UserError: It is none of these, holds a secret, or can't be set up in this environment.
    """
    where = parse_location(location)
    if isinstance(where, Path):
        return LocalFolder(expand_home(where))
    from ray_ulysses.storage.block_cache import node_cache
    from ray_ulysses.storage.object_folder import RemoteFolder
    from ray_ulysses.storage.object_store import ObjectStore

    store = ObjectStore.at(where, retry_s=_RETRY_S)
    return RemoteFolder(store, str(where), node_cache())


def _close(descriptor: int) -> None:
    with suppress(OSError):
        os.close(descriptor)
