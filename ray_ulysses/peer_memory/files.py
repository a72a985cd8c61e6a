"""Files in a node's memory, written chunk by chunk and never changed once they have a name.

The kernel takes several times as long to find and clear pages as to copy bytes into them. So the pages of files that
were dropped are kept for the next ones: a training state has the same size after every step. Chunks that a process of
the node has in memory that it shares stay where they are, and are not copied at all.

Such a buffer is lent from the moment at which a file in it is sent until the agent has dropped that file, which it says
in the byte behind the buffer. Nothing is written into it meanwhile: the file may be the newest state that there is. If
the agent is gone, the buffer is left as it is, and its owner makes another.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import socket
import threading
import weakref
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from ray_ulysses.checkpoint.checksums import checksum
from ray_ulysses.clock import Clock
from ray_ulysses.peer_memory.wire import has_ended
from ray_ulysses.storage import AlreadyExistsError
from ray_ulysses.storage.store import checked_key

_LEAST_SPARE_BYTES = 2**20
"""Smaller files, such as manifests, get pages of their own."""
_MOST_SLACK = 2
"""A file keeps pages for this many times its size at most."""
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_OVERDUE_S = 10.0
"""Longest wait for a buffer whose file has a successor, in seconds: the agent may have failed to drop the file."""
LENT, RETURNED = b"\1", b"\0"
"""The byte behind lent memory: whether files use it."""


class Pages:
    """Memory with a descriptor, from which the kernel sends."""

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("ray-ulysses-peer-memory", os.MFD_CLOEXEC)
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


class LentPages:
    """Memory of a process on this node that one file uses where it is.

    The process changes it only while the byte behind it says so: it marks the memory as lent, and the end of the file
    marks it as returned, whatever has become of the process.

    Args:
        descriptor: The memory, whose size nobody can change; closed with this.
        num_bytes: Its size without that byte.
    """

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        self._descriptor, self.num_bytes = descriptor, num_bytes

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._descriptor

    def give_back(self) -> None:
        """Mark it as returned; after that it may only be closed."""
        os.pwrite(self._descriptor, RETURNED, self.num_bytes)

    def close(self) -> None:
        """Close it, which takes seconds where its process is gone: the kernel then clears gigabytes of pages."""
        os.close(self._descriptor)


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """A run of bytes of a file that were sent together."""

    pages: Pages | LentPages
    """The memory that they are in."""
    offset: int
    """Where they begin there."""
    num_bytes: int
    checksum: int
    """Their checksum, as the writer computed it from its own memory."""


class MemoryFile:
    """A file.

    Attributes:
        pages: Its own memory.
        is_large: Whether its own memory is worth keeping for another file.
        lent: The memory of others that it uses.
        lent_bytes: Bytes that are in it.
        size: Its size in bytes.
        chunks: Its chunks, in order.
        num_users: The writer, the name and the readers that it has; its pages are spare when the last has gone.
    """

    def __init__(self, files: MemoryFiles, pages: Pages, *, is_large: bool) -> None:
        self.pages, self.is_large, self.num_users = pages, is_large, 1
        self.lent: list[LentPages] = []
        self.size = self.lent_bytes = 0
        self.chunks: list[Chunk] = []
        self._ends: list[int] = []
        self._files = files

    @property
    def own_bytes(self) -> int:
        """Bytes that are in its own memory."""
        return self.size - self.lent_bytes

    def room(self, num_bytes: int) -> memoryview:
        """Return the memory of the next chunk; release the view before the next call.

        Raises:
            OSError: The peer memory's memory is full.
        """
        end = self.own_bytes + num_bytes
        if end > self.pages.num_bytes:
            self._files.charge(end - self.pages.num_bytes)
            self.pages.resize(end)
        return self.pages.view(self.own_bytes, end)

    def accept(self, room: memoryview, wanted: int) -> None:
        """Verify a chunk where it is stored.

        Raises:
            OSError: It is not what was sent.
        """
        if checksum(room) != wanted:
            raise OSError(errno.EIO, "a chunk arrived damaged")
        self._add(Chunk(pages=self.pages, offset=self.own_bytes, num_bytes=len(room), checksum=wanted))

    def borrow(self, pages: LentPages) -> LentPages:
        """Use memory of others, and return it as it is among `lent`: once, by whatever descriptors it comes."""
        for known in self.lent:
            if os.path.sameopenfile(known.fileno(), pages.fileno()):
                pages.close()
                return known
        self.lent.append(pages)
        return pages

    def take(self, pages: LentPages, offset: int, num_bytes: int, wanted: int) -> None:
        """Append a chunk where it is, in memory that is among `lent`; a copy that is made of it will be verified.

        Raises:
            ValueError: It is not within that memory.
            OSError: The peer memory's memory is full.
        """
        if min(offset, num_bytes) < 0 or offset + num_bytes > pages.num_bytes:
            raise ValueError("a chunk beyond the memory that it is in")
        self._files.charge(num_bytes)
        self.lent_bytes += num_bytes
        self._add(Chunk(pages=pages, offset=offset, num_bytes=num_bytes, checksum=wanted))

    def ranges(self, start: int, stop: int) -> Iterator[tuple[Pages | LentPages, int, int]]:
        """Yield where the bytes of a range are: the memory, the offset there, and how many."""
        for number in range(bisect_right(self._ends, start), len(self.chunks)):
            chunk, begin = self.chunks[number], self._ends[number] - self.chunks[number].num_bytes
            if begin >= stop:
                return
            first, last = max(start - begin, 0), min(stop - begin, chunk.num_bytes)
            yield chunk.pages, chunk.offset + first, last - first

    def _add(self, chunk: Chunk) -> None:
        self.size += chunk.num_bytes
        self.chunks.append(chunk)
        self._ends.append(self.size)


class MemoryFiles:
    """The files of one agent, within a limit; any thread may call.

    Args:
        limit_bytes: Most bytes of all files, those being written included; None for no limit.
    """

    def __init__(self, limit_bytes: int | None) -> None:
        self._limit_bytes = limit_bytes
        self._lock = threading.RLock()
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
            return sum(pages.num_bytes for pages in self._spare)

    def charge(self, num_bytes: int) -> None:
        """Take memory for a file that is being written.

        Raises:
            OSError: Too little is left.
        """
        with self._lock:
            needed = self._num_bytes + num_bytes
            if self._limit_bytes is not None:
                while self._spare and needed + self.spare_bytes > self._limit_bytes:
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
        """Return a file to write; the writer must `release` it, whether it is kept or not.

        Args:
            is_large: Whether it is worth taking spare pages for it.
        """
        with self._lock:
            pages = self._spare.pop() if is_large and self._spare else Pages()
            self._num_bytes += pages.num_bytes
        return MemoryFile(self, pages, is_large=is_large)

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
            if file.pages.num_bytes > _MOST_SLACK * file.own_bytes:
                self._num_bytes -= file.pages.num_bytes - file.own_bytes
                file.pages.resize(file.own_bytes)
            self._files[key] = file
            file.num_users += 1
            if old is not None:
                self._release(old)
        return file.size

    def release(self, file: MemoryFile) -> None:
        """Release a file that was begun."""
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
            self._num_bytes -= file.pages.num_bytes + file.lent_bytes
            for lent in file.lent:
                lent.give_back()
            if file.is_large and file.pages.num_bytes >= _LEAST_SPARE_BYTES:
                self._spare.append(file.pages)
            else:
                file.pages.close()
            if file.lent:
                _close_later(file.lent)


def _close_later(lent: Iterable[LentPages]) -> None:
    def close() -> None:
        for pages in lent:
            pages.close()

    try:
        threading.Thread(target=close, name="peer-memory-close", daemon=True).start()
    except RuntimeError:
        # There are too many threads.
        close()


def _is_in(key: str, prefix: str) -> bool:
    return key == prefix or key.startswith(f"{prefix}/")


class LentBuffer:
    """One buffer.

    Attributes:
        descriptor: Its memory.
        num_bytes: Its size, without the byte behind it.
        memory: What its owner writes into, while it is returned.
    """

    def __init__(self, owner: LentMemory, num_bytes: int) -> None:
        self.descriptor = os.memfd_create("ray-ulysses-lent", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self.descriptor)
        size = num_bytes + len(LENT)
        # Pages are taken and mapped now, so that there is an error here where there are none, and no waiting for them
        # later. `MAP_POPULATE` would hold up all other threads.
        os.posix_fallocate(self.descriptor, 0, size)
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SEALS)
        self._mapped = mmap.mmap(self.descriptor, size)
        np.frombuffer(self._mapped, np.uint8)[:: mmap.PAGESIZE].max()
        self.num_bytes, self.memory = num_bytes, memoryview(self._mapped)[:num_bytes]
        self._owner, self._address = owner, _address(self.memory)
        self._lent_over: socket.socket | None = None

    @property
    def is_returned(self) -> bool:
        """Whether no file uses it."""
        return self._mapped[self.num_bytes :] != LENT

    @property
    def is_lost(self) -> bool:
        """Whether nobody will return it; ask while no file is being written."""
        if self.is_returned or self._lent_over is None:
            return False
        return self._lent_over.fileno() == -1 or has_ended(self._lent_over) or self._owner.is_overdue(self)

    def offset_of(self, address: int, num_bytes: int) -> int | None:
        """Return where bytes are in it; None if they are elsewhere."""
        offset = address - self._address
        return offset if offset >= 0 and offset + num_bytes <= self.num_bytes else None

    def lend(self, connection: socket.socket) -> None:
        """Lend it to the agent at the other end of a connection."""
        self._mapped[self.num_bytes :] = LENT
        self._lent_over = connection


class LentMemory:
    """The buffers of one worker; one thread makes and asks them, another writes files.

    Args:
        clock: Time.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._buffers: tuple[weakref.ref[LentBuffer], ...] = ()
        self._newest: weakref.ref[LentBuffer] | None = None
        self._waiting_since: float | None = None

    def make(self, num_bytes: int) -> LentBuffer:
        """Return a new buffer.

        Raises:
            OSError: There is no memory for it.
        """
        buffer = LentBuffer(self, num_bytes)
        self._buffers = (*(known for known in self._buffers if known() is not None), weakref.ref(buffer))
        return buffer

    @property
    def is_used(self) -> bool:
        """Whether there is a buffer."""
        return any(known() is not None for known in self._buffers)

    def place(self, view: memoryview) -> tuple[LentBuffer, int] | None:
        """Return the buffer that bytes are in, and where; None if they are elsewhere."""
        address = _address(view)
        for known in self._buffers:
            buffer = known()
            if buffer is not None and (offset := buffer.offset_of(address, len(view))) is not None:
                return buffer, offset
        return None

    def kept(self, buffer: LentBuffer) -> None:
        """Note that a file in a buffer is whole."""
        self._newest, self._waiting_since = weakref.ref(buffer), None

    def is_overdue(self, buffer: LentBuffer) -> bool:
        """Return whether a lent buffer has been missed for too long, while the newest file is in another one."""
        if self._newest is not None and self._newest() is buffer:
            return False
        now = self._clock.monotonic()
        if self._waiting_since is None:
            self._waiting_since = now
        return now - self._waiting_since > _OVERDUE_S


def check_lent(descriptor: int, num_bytes: int) -> None:
    """Check that a descriptor belongs to a buffer of a size.

    Raises:
        ValueError: It has another size, or one that can change.
        OSError: It is not memory.
    """
    if os.fstat(descriptor).st_size != num_bytes + len(LENT):
        raise ValueError("it has another size than was said")
    if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
        raise ValueError("its size can change")


def _address(view: memoryview) -> int:
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address
