"""The protocol of a run's storage, the same for local files and object stores.

Keys are relative POSIX paths such as ``checkpoints/step-00000200/manifest.json``. A file appears whole or
not at all, and `Store.create` succeeds for exactly one of several writers: links and renames give that on
files, conditional puts on object stores. A store that can do neither can't hold a run.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Protocol

from ray_ulysses.errors import RunError

Buffer = bytes | bytearray | memoryview

_PIECE_BYTES = 16 << 20


class AlreadyExistsError(RunError):
    """A file that had to be new is there already."""


class Store(Protocol):
    """Files of one run, by key."""

    def open(self, key: str) -> BinaryIO:
        """Return a seekable stream of the file's bytes; raises `FileNotFoundError` if there is none."""
        ...

    def read_whole(self, key: str, limit: int = -1) -> bytes:
        """Return a whole file, or its first bytes if there is a limit; raises as `open` does."""
        with self.open(key) as stream:
            size = stream.seek(0, 2)
            stream.seek(0)
            return read_exactly(stream, size if limit < 0 else min(size, limit))

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


class RangeReader(Protocol):
    """An open file that threads may read at once."""

    size: int
    """Its size in bytes when it was opened."""

    def read_at(self, start: int, size: int) -> bytes:
        """Return ``size`` bytes from a place on, or fewer where the file ends; raises OSError."""
        ...

    def fetch(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Fetch ranges ``(start, size)`` at once, where reading them one by one would wait for each."""
        ...

    def forget(self, start: int, size: int) -> bool:
        """Drop a damaged range from caches; return whether reading it again may give other bytes."""
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


def read_exactly(stream: BinaryIO, num_bytes: int) -> bytes:
    """Return ``num_bytes`` from a stream's position on, or fewer where the file ends.

    A single read may return fewer, as files of some mounts do.
    """
    parts = []
    while num_bytes > 0 and (part := stream.read(num_bytes)):
        parts.append(part)
        num_bytes -= len(part)
    return b"".join(parts)
