"""The protocol of a run's storage, the same for local files and object stores.

Keys are relative POSIX paths such as ``checkpoints/step-00000200/manifest.json``. A file appears whole or
not at all, and `Store.create` succeeds for exactly one of several writers: links and renames give that on
files, conditional puts on object stores. A store that can do neither can't hold a run.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Protocol

from ray_ulysses.errors import RunError

Buffer = bytes | bytearray | memoryview

# Below this a request costs more than its bytes: a read that continues where the last one ended fetches this many.
READ_AHEAD_BYTES = 64 << 10
_PIECE_BYTES = 16 << 20


class AlreadyExistsError(RunError):
    """A file that had to be new is there already."""


class StoredFile(io.BufferedIOBase):
    """A file of a store as it was when it was opened: a seekable stream, and ranges that threads may read at once."""

    def __init__(self, size: int) -> None:
        """Begin at the first byte.

        Args:
            size: Its size in bytes.
        """
        self.size = size
        self._position, self._last_end = 0, -1
        self._ahead, self._ahead_start = bytearray(), 0

    def read_into(self, start: int, target: memoryview) -> int:
        """Fill a buffer from a place on; return how many bytes there were, less where the file ends; raises OSError."""
        raise NotImplementedError

    def read_at(self, start: int, size: int) -> bytearray:
        """Return ``size`` bytes from a place on, or fewer where the file ends; raises OSError."""
        content = bytearray(max(min(size, self.size - start), 0))
        count = self.read_into(start, memoryview(content)) if content else 0
        del content[count:]
        return content

    def fetch(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Fetch ranges ``(start, size)`` at once, where reading them one by one would wait for each."""

    def forget(self, start: int, size: int) -> bool:
        """Drop a damaged range from caches; return whether reading it again may give other bytes."""
        return False

    def read(self, size: int | None = -1, /) -> bytes:
        """Return ``size`` bytes from the position, or fewer where the file ends; all if it is None or negative."""
        left = max(self.size - self._position, 0)
        content = memoryview(bytearray(left if size is None or size < 0 else min(size, left)))
        return bytes(content[: self.readinto(content)])

    def readinto(self, target: Buffer, /) -> int:  # type: ignore[override]
        """Fill a buffer from the position and return how many bytes there were."""
        if self.closed:
            raise ValueError("I/O operation on closed file")
        start, goes_on = self._position, self._position == self._last_end
        rest = memoryview(target).cast("B")[: max(self.size - start, 0)]
        done = self._take_ahead(start, rest)
        rest = rest[done:]
        if goes_on and 0 < rest.nbytes < READ_AHEAD_BYTES:
            self._ahead_start, self._ahead = start + done, self.read_at(start + done, READ_AHEAD_BYTES)
            done += self._take_ahead(start + done, rest)
        elif rest.nbytes:
            done += self.read_into(start + done, rest)
        self._position = self._last_end = start + done
        return done

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Go to a position and return it; nothing is read."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size}[whence]
        if base + offset < 0:
            raise ValueError(f"can't seek to {base + offset}, before the beginning")
        self._position = base + offset
        return self._position

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def _take_ahead(self, start: int, target: memoryview) -> int:
        """Copy what was read ahead, if it begins before a place; return how many bytes that were."""
        offset = start - self._ahead_start
        if not 0 <= offset < len(self._ahead):
            return 0
        found = memoryview(self._ahead)[offset : offset + target.nbytes]
        target[: found.nbytes] = found
        return found.nbytes


class Store(Protocol):
    """Files of one run, by key."""

    def open(self, key: str) -> StoredFile:
        """Open a file for reading; raises `FileNotFoundError` if there is none."""
        ...

    def read_whole(self, key: str, limit: int = -1) -> bytes:
        """Return a whole file, or its first bytes if there is a limit; raises as `open` does."""
        with self.open(key) as file:
            return file.read(limit)

    def create(self, key: str, chunks: Iterable[Buffer]) -> int:
        """Write a new file durably and return its size in bytes.

        The file appears at once and whole, after its bytes are on the medium.

        Raises:
            AlreadyExistsError: The key is taken; of several writers exactly one succeeds.
            OSError: It could not be written; then nothing appears under the key.
        """
        ...

    def replace(self, key: str, chunks: Iterable[Buffer]) -> int:
        """Write a file durably in place of the one there, if any; readers see the old or the new one."""
        ...

    def list(self, prefix: str) -> list[str]:
        """Return the keys of all files under a folder, sorted; an absent folder is an empty one."""
        return [*self.sizes(prefix)]

    def sizes(self, folder: str) -> dict[str, int | None]:
        """Return the size in bytes of each file under a folder, by its key, sorted; None where it can't be read now."""
        ...

    def delete(self, prefix: str) -> None:
        """Delete a file, or a folder with all that is in it; what is not there is deleted already."""
        ...


def checked_key(key: str) -> str:
    """Return the key if it is a relative POSIX path that stays inside the store.

    Raises:
        ValueError: The key is absolute, empty, or climbs out.
    """
    path = PurePosixPath(key)
    if not path.parts or path.is_absolute() or ".." in path.parts or str(path) != key:
        raise ValueError(f"storage key {key!r} is not a plain relative path")
    return key


def crc32_of(store: Store, key: str) -> int:
    """Return the CRC-32 of a file's bytes."""
    crc32 = 0
    with store.open(key) as stream:
        while piece := stream.read(_PIECE_BYTES):
            crc32 = zlib.crc32(piece, crc32)
    return crc32


def create_if_absent(store: Store, key: str, content: bytes) -> bool:
    """Create a small file, and return whether its key was free; raises OSError as `Store.create` does."""
    try:
        store.create(key, [content])
    except AlreadyExistsError:
        return False
    return True


def file_pieces(path: Path) -> Iterator[bytes]:
    """Yield a local file's bytes in pieces, to create it in a store."""
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            yield piece
