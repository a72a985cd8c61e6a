"""The storage protocol for a run's files, shared by local file systems and object stores.

Keys are relative POSIX paths such as ``checkpoints/step-00000200/manifest.json``. Every file is written atomically, and
`Store.create` succeeds for exactly one of several concurrent writers. Local stores implement this with hard links and
renames, object stores with conditional puts. Storage without such an operation can't be used for a run.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Protocol

from ray_ulysses.errors import RunError

Buffer = bytes | bytearray | memoryview

# For smaller reads the request dominates the cost, so a sequential read fetches at least this many bytes.
READ_AHEAD_BYTES = 64 << 10
_PIECE_BYTES = 16 << 20


class AlreadyExistsError(RunError):
    """The key of a new file already exists."""


class StoredFile(io.BufferedIOBase):
    """One version of a file in a store, readable as a seekable stream or, from several threads, by ranges.

    Attributes:
        size: Size in bytes.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._position, self._last_end = 0, -1
        self._ahead, self._ahead_start = bytearray(), 0

    def read_into(self, start: int, target: memoryview) -> int:
        """Read bytes from ``start`` until the buffer is full or the file ends; return their number or raise OSError."""
        raise NotImplementedError

    def read_at(self, start: int, size: int) -> bytearray:
        """Return ``size`` bytes from offset ``start``, or fewer if the file ends; raise OSError if the read fails."""
        content = bytearray(max(min(size, self.size - start), 0))
        count = self.read_into(start, memoryview(content)) if content else 0
        del content[count:]
        return content

    def fetch(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Prefetch ranges ``(start, size)`` in parallel, if separate reads would need one request each."""

    def forget(self, start: int, size: int) -> bool:
        """Drop a damaged range from the caches, and return whether another read may return different bytes."""
        return False

    def read(self, size: int | None = -1, /) -> bytes:
        """Return the next ``size`` bytes, or fewer if the file ends, or all if ``size`` is None or negative."""
        left = max(self.size - self._position, 0)
        content = memoryview(bytearray(left if size is None or size < 0 else min(size, left)))
        return bytes(content[: self.readinto(content)])

    def readinto(self, target: Buffer, /) -> int:  # type: ignore[override]
        """Read from the current position into a buffer, and return the number of bytes read."""
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
        """Set the current position without reading, and return the position."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size}[whence]
        if base + offset < 0:
            raise ValueError(f"can't seek to the negative position {base + offset}")
        self._position = base + offset
        return self._position

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def _take_ahead(self, start: int, target: memoryview) -> int:
        """Copy bytes from the read-ahead buffer, if it contains offset ``start``, and return their number."""
        offset = start - self._ahead_start
        if not 0 <= offset < len(self._ahead):
            return 0
        found = memoryview(self._ahead)[offset : offset + target.nbytes]
        target[: found.nbytes] = found
        return found.nbytes


class Store(Protocol):
    """A set of files, addressed by key."""

    def open(self, key: str) -> StoredFile:
        """Open a file for reading; raise `FileNotFoundError` if the file does not exist."""
        ...

    def read_whole(self, key: str, limit: int = -1) -> bytes:
        """Return a file's content, or its first ``limit`` bytes if ``limit`` is not negative; see `open`."""
        with self.open(key) as file:
            return file.read(limit)

    def create(self, key: str, chunks: Iterable[Buffer]) -> int:
        """Create a file atomically and durably, and return its size in bytes.

        If several writers create the same key, exactly one succeeds.

        Raises:
            AlreadyExistsError: The key already exists.
            OSError: The write failed, and no file was created.
        """
        ...

    def replace(self, key: str, chunks: Iterable[Buffer]) -> int:
        """Create or overwrite a file atomically and durably. Readers see the old or the new content."""
        ...

    def names(self, folder: str) -> list[str]:
        """Return the names of the files and folders in a folder, sorted. A missing folder is treated as empty."""
        return sorted({key.removeprefix(f"{folder}/").partition("/")[0] for key in self.list(folder)})

    def list(self, prefix: str) -> list[str]:
        """Return the keys of all files in a folder tree, sorted. A missing folder is treated as empty."""
        return [*self.sizes(prefix)]

    def sizes(self, folder: str) -> dict[str, int | None]:
        """Return the size in bytes of each file in a folder tree, by key, sorted; None if a file can't be opened."""
        ...

    def delete(self, prefix: str) -> None:
        """Delete a file or a folder tree. A missing file or folder is not an error."""
        ...


def checked_key(key: str) -> str:
    """Return the key if it is a normalized relative POSIX path inside the store.

    Raises:
        ValueError: The key is absolute, empty, not normalized, or contains ``..``.
    """
    path = PurePosixPath(key)
    if not path.parts or path.is_absolute() or ".." in path.parts or str(path) != key:
        raise ValueError(f"storage key {key!r} is not a normalized relative path")
    return key


def crc32_of(store: Store, key: str) -> int:
    """Return the CRC-32 of a file's content."""
    crc32 = 0
    with store.open(key) as stream:
        while piece := stream.read(_PIECE_BYTES):
            crc32 = zlib.crc32(piece, crc32)
    return crc32


def create_if_absent(store: Store, key: str, content: bytes) -> bool:
    """Create a small file unless the key exists, and return whether the file was created; see `Store.create`."""
    try:
        store.create(key, [content])
    except AlreadyExistsError:
        return False
    return True


def file_pieces(path: Path) -> Iterator[bytes]:
    """Yield a local file's content in chunks for `Store.create`."""
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            yield piece
