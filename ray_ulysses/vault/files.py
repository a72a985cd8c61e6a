"""Files in a node's memory, written chunk by chunk and never changed once they have a name.

The kernel takes several times as long to find and clear pages as to copy bytes into them. So the pages of files that
were dropped are kept for the next ones: a training state has the same size after every step.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ray_ulysses.checkpoint.checksums import checksum
from ray_ulysses.storage import AlreadyExistsError
from ray_ulysses.storage.store import checked_key

_LEAST_SPARE_BYTES = 2**20
"""Smaller files, such as manifests, get pages of their own."""
_MOST_SLACK = 2
"""A file keeps pages for this many times its size at most."""


class Pages:
    """Memory with a descriptor, from which the kernel sends."""

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("ray-ulysses-vault", os.MFD_CLOEXEC)
        self._mapped: mmap.mmap | None = None
        self.num_bytes = 0

    def close(self) -> None:
        """Give the memory back."""
        if self._mapped is not None:
            self._mapped.close()
            self._mapped = None
        os.close(self._descriptor)

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._descriptor

    def resize(self, num_bytes: int) -> None:
        """Take or give back memory."""
        os.ftruncate(self._descriptor, num_bytes)
        if self._mapped is None and num_bytes:
            self._mapped = mmap.mmap(self._descriptor, num_bytes)
        elif self._mapped is not None:
            self._mapped.resize(num_bytes)
        self.num_bytes = num_bytes

    def view(self, start: int, stop: int) -> memoryview:
        """Return a range; release it before the next `resize`."""
        assert self._mapped is not None
        return memoryview(self._mapped)[start:stop]


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """A run of bytes of a file that were sent together.

    Attributes:
        num_bytes: How many.
        checksum: Their checksum, as the writer computed it from its own memory.
    """

    num_bytes: int
    checksum: int


class MemoryFile:
    """A file.

    Attributes:
        pages: Its memory.
        size: Its size in bytes.
        chunks: Its chunks, in order.
        num_users: The writer, the name and the readers that it has; its pages are spare when the last has gone.
    """

    def __init__(self, files: MemoryFiles, pages: Pages) -> None:
        self.pages, self.size, self.num_users = pages, 0, 1
        self.chunks: list[Chunk] = []
        self._files = files

    def room(self, num_bytes: int) -> memoryview:
        """Return the memory of the next chunk; release the view before the next call.

        Raises:
            OSError: The vault's memory is full.
        """
        end = self.size + num_bytes
        if end > self.pages.num_bytes:
            self._files.charge(end - self.pages.num_bytes)
            self.pages.resize(end)
        return self.pages.view(self.size, end)

    def accept(self, room: memoryview, wanted: int) -> None:
        """Verify a chunk where it is stored.

        Raises:
            OSError: It is not what was sent.
        """
        if checksum(room) != wanted:
            raise OSError(errno.EIO, "a chunk arrived damaged")
        self.size += len(room)
        self.chunks.append(Chunk(num_bytes=len(room), checksum=wanted))


class MemoryFiles:
    """The files of one agent, within a limit; any thread may call.

    Args:
        limit_bytes: Most bytes of all files, those being written included; None for no limit.
    """

    def __init__(self, limit_bytes: int | None) -> None:
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._files: dict[str, MemoryFile] = {}
        self._spare: list[Pages] = []
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all files, those being written included, and not the spare pages."""
        with self._lock:
            return self._num_bytes

    @property
    def spare_bytes(self) -> int:
        """Bytes of pages that no file uses."""
        with self._lock:
            return self._spare_bytes()

    def charge(self, num_bytes: int) -> None:
        """Take memory for a file that is being written.

        Raises:
            OSError: There is not as much left.
        """
        with self._lock:
            needed = self._num_bytes + num_bytes
            if self._limit_bytes is not None:
                while self._spare and needed + self._spare_bytes() > self._limit_bytes:
                    self._spare.pop().close()
                if needed > self._limit_bytes:
                    text = (
                        f"the peer memory of this node is full: {self._num_bytes / 2**30:.2f} of "
                        f"{self._limit_bytes / 2**30:.2f} GiB are used, {num_bytes / 2**30:.2f} more are needed; raise "
                        "elastic.peer_memory_gib, or use more nodes"
                    )
                    raise OSError(errno.ENOSPC, text)
            self._num_bytes = needed

    def begin(self, *, is_large: bool) -> MemoryFile:
        """Return a file to write; whoever writes it must `release` it, whether it is kept or not.

        Args:
            is_large: Whether it is worth taking spare pages for it.
        """
        with self._lock:
            pages = self._spare.pop() if is_large and self._spare else Pages()
            self._num_bytes += pages.num_bytes
        return MemoryFile(self, pages)

    def keep(self, key: str, file: MemoryFile, *, replace: bool) -> int:
        """Give a file its name; return its size in bytes.

        Raises:
            AlreadyExistsError: The key is taken, and ``replace`` is false.
        """
        checked_key(key)
        with self._lock:
            old = self._files.get(key)
            if old is not None and not replace:
                raise AlreadyExistsError(f"{key} exists already; nothing was written over it")
            if file.pages.num_bytes > _MOST_SLACK * file.size:
                self._num_bytes -= file.pages.num_bytes - file.size
                file.pages.resize(file.size)
            self._files[key] = file
            file.num_users += 1
            if old is not None:
                self._release(old)
        return file.size

    def release(self, file: MemoryFile) -> None:
        """Do without a file that was begun."""
        with self._lock:
            self._release(file)

    @contextmanager
    def reading(self, key: str) -> Iterator[MemoryFile]:
        """Give a file, which stays as it is within the block although it is dropped meanwhile.

        Raises:
            FileNotFoundError: There is none of that key.
        """
        with self._lock:
            found = self._files.get(key)
            if found is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), key)
            found.num_users += 1
        try:
            yield found
        finally:
            self.release(found)

    def sizes(self, prefix: str) -> dict[str, int]:
        """Return the size of each file at or under a folder, by its key."""
        with self._lock:
            return {key: found.size for key, found in self._files.items() if _is_in(key, prefix)}

    def delete(self, prefix: str) -> None:
        """Drop a file, or all files under a folder."""
        with self._lock:
            for key in [key for key in self._files if _is_in(key, prefix)]:
                self._release(self._files.pop(key))

    def clear(self) -> None:
        """Drop all files and all spare pages."""
        with self._lock:
            for file in self._files.values():
                self._release(file)
            self._files.clear()
            for pages in self._spare:
                pages.close()
            self._spare.clear()

    def _release(self, file: MemoryFile) -> None:
        file.num_users -= 1
        if file.num_users == 0:
            self._num_bytes -= file.pages.num_bytes
            if file.pages.num_bytes >= _LEAST_SPARE_BYTES:
                self._spare.append(file.pages)
            else:
                file.pages.close()

    def _spare_bytes(self) -> int:
        return sum(pages.num_bytes for pages in self._spare)


def _is_in(key: str, prefix: str) -> bool:
    return key == prefix or key.startswith(f"{prefix}/")
