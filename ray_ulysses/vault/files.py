"""Files in a node's memory: written chunk by chunk, then sealed by the kernel and never changed again."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
from dataclasses import dataclass

from ray_ulysses.checkpoint.checksums import checksum
from ray_ulysses.storage import AlreadyExistsError
from ray_ulysses.storage.store import checked_key

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


class MemoryFile:
    """A file without a name on any disk; its memory goes with the last reference to it.

    Attributes:
        size: Its size in bytes.
    """

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("ray-ulysses-vault", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.size = 0

    def __del__(self) -> None:
        os.close(self._descriptor)

    def fileno(self) -> int:
        """Return its descriptor."""
        return self._descriptor


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """A run of bytes of a file that were sent together.

    Attributes:
        num_bytes: How many.
        checksum: Their checksum, as the writer computed it from its own memory.
    """

    num_bytes: int
    checksum: int


class Upload:
    """A file that is being written by one connection.

    Attributes:
        file: The file.
        chunks: What was accepted.
    """

    def __init__(self, files: MemoryFiles) -> None:
        self.file = MemoryFile()
        self.chunks: list[Chunk] = []
        self._files = files
        self._mapped: mmap.mmap | None = None

    def room(self, num_bytes: int) -> memoryview:
        """Return the memory of the next chunk; release the view before the next call.

        Raises:
            OSError: The vault's memory is full.
        """
        self._files.charge(num_bytes)
        start, self.file.size = self.file.size, self.file.size + num_bytes
        if self._mapped is None:
            os.ftruncate(self.file.fileno(), self.file.size)
            self._mapped = mmap.mmap(self.file.fileno(), self.file.size)
        else:
            self._mapped.resize(self.file.size)
        return memoryview(self._mapped)[start:]

    def accept(self, room: memoryview, wanted: int) -> None:
        """Verify a chunk where it is stored.

        Raises:
            OSError: It is not what was sent.
        """
        if checksum(room) != wanted:
            raise OSError(errno.EIO, "a chunk arrived damaged")
        self.chunks.append(Chunk(num_bytes=len(room), checksum=wanted))

    def seal(self) -> None:
        """Make the file unchangeable, by whoever holds it."""
        self.close()
        fcntl.fcntl(self.file.fileno(), fcntl.F_ADD_SEALS, _SEALS)

    def close(self) -> None:
        """Unmap it; its memory goes unless it was kept."""
        if self._mapped is not None:
            self._mapped.close()
            self._mapped = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SealedFile:
    """A whole file.

    Attributes:
        file: Its memory.
        chunks: Its chunks, in order.
    """

    file: MemoryFile
    chunks: tuple[Chunk, ...]


class MemoryFiles:
    """The files of one agent, within a limit; any thread may call.

    Args:
        limit_bytes: Most bytes of all files, those being written included; None for no limit.
    """

    def __init__(self, limit_bytes: int | None) -> None:
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._files: dict[str, SealedFile] = {}
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all files, those being written included."""
        with self._lock:
            return self._num_bytes

    def charge(self, num_bytes: int) -> None:
        """Take memory for a file that is being written.

        Raises:
            OSError: There is not as much left.
        """
        with self._lock:
            if self._limit_bytes is not None and self._num_bytes + num_bytes > self._limit_bytes:
                text = (
                    f"the peer memory of this node is full: {self._num_bytes / 2**30:.2f} of "
                    f"{self._limit_bytes / 2**30:.2f} GiB are used, {num_bytes / 2**30:.2f} more are needed; raise "
                    "elastic.peer_memory_gib, or use more nodes"
                )
                raise OSError(errno.ENOSPC, text)
            self._num_bytes += num_bytes

    def keep(self, key: str, upload: Upload, *, replace: bool) -> int:
        """Seal a file and give it its name; return its size in bytes.

        Raises:
            AlreadyExistsError: The key is taken, and ``replace`` is false.
        """
        checked_key(key)
        upload.seal()
        with self._lock:
            old = self._files.get(key)
            if old is not None and not replace:
                raise AlreadyExistsError(f"{key} exists already; nothing was written over it")
            self._files[key] = SealedFile(file=upload.file, chunks=tuple(upload.chunks))
            self._num_bytes -= old.file.size if old is not None else 0
        return upload.file.size

    def give_up(self, upload: Upload) -> None:
        """Drop a file that was not kept."""
        upload.close()
        with self._lock:
            self._num_bytes -= upload.file.size

    def get(self, key: str) -> SealedFile:
        """Return a file, which stays readable although it is deleted meanwhile.

        Raises:
            FileNotFoundError: There is none of that key.
        """
        with self._lock:
            found = self._files.get(key)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), key)
        return found

    def sizes(self, prefix: str) -> dict[str, int]:
        """Return the size of each file at or under a folder, by its key."""
        with self._lock:
            return {key: found.file.size for key, found in self._files.items() if _is_in(key, prefix)}

    def delete(self, prefix: str) -> None:
        """Drop a file, or all files under a folder."""
        with self._lock:
            for key in [key for key in self._files if _is_in(key, prefix)]:
                self._num_bytes -= self._files.pop(key).file.size

    def clear(self) -> None:
        """Drop all files."""
        with self._lock:
            self._num_bytes -= sum(found.file.size for found in self._files.values())
            self._files.clear()


def _is_in(key: str, prefix: str) -> bool:
    return key == prefix or key.startswith(f"{prefix}/")
