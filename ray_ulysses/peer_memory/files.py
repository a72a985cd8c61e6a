"""Files in a node's memory, uploaded chunk by chunk and immutable once they are named.

The kernel takes several times as long to allocate and clear pages as to copy bytes into them. The pages of dropped
files are therefore reused: a training state has the same size after every step. A process on the same node can also
lend shared memory that already contains a file's chunks, which are then not copied at all.

A buffer is lent from the start of the upload until the agent drops the file and resets the flag byte at the end of the
buffer. Until then, the owner must not write into the buffer, because the file may be the newest state. If the agent
dies, the owner abandons the buffer and creates another buffer.
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
"""Minimum size of `Pages` that are kept for reuse; smaller `Pages`, such as a manifest's, are freed."""
_MOST_SLACK = 2
"""Maximum size of a file's pages as a multiple of the file's size; excess pages are freed."""
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_OVERDUE_S = 10.0
"""Seconds after which a buffer with an outdated file is considered lost, because the agent may never drop the file."""
LENT, RETURNED = b"\1", b"\0"
"""Values of the flag byte after a lent buffer: in use by a file, or not."""


class Pages:
    """Resizable memory with a file descriptor, so that the kernel can send its content without a copy."""

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("ray-ulysses-peer-memory", os.MFD_CLOEXEC)
        self._mapped: mmap.mmap | None = None
        self.num_bytes = 0

    def close(self) -> None:
        """Free the memory."""
        if self._mapped is not None:
            self._mapped.close()
            self._mapped = None
        os.close(self._descriptor)

    def fileno(self) -> int:
        """Return the file descriptor."""
        return self._descriptor

    def resize(self, num_bytes: int) -> None:
        """Grow or shrink the memory to `num_bytes` bytes."""
        os.ftruncate(self._descriptor, num_bytes)
        if self._mapped is None and num_bytes:
            self._mapped = mmap.mmap(self._descriptor, num_bytes)
        elif self._mapped is not None:
            self._mapped.resize(num_bytes)
        self.num_bytes = num_bytes

    def view(self, start: int, stop: int) -> memoryview:
        """Return a view of a byte range, which must be released before the next `resize`."""
        assert self._mapped is not None
        return memoryview(self._mapped)[start:stop]


class LentPages:
    """Memory that another process on this node has lent to a file.

    The owner sets the flag byte after the memory to `LENT`, and does not write into the memory until `give_back` sets
    the byte to `RETURNED`. The owner may have died in the meantime.

    Args:
        descriptor: File descriptor of the memory, sealed against resizing; `close` closes it.
        num_bytes: Size of the memory in bytes, without the flag byte.
    """

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        self._descriptor, self.num_bytes = descriptor, num_bytes

    def fileno(self) -> int:
        """Return the file descriptor."""
        return self._descriptor

    def give_back(self) -> None:
        """Mark the memory as returned, so that the owner may overwrite it."""
        os.pwrite(self._descriptor, RETURNED, self.num_bytes)

    def close(self) -> None:
        """Close the descriptor, which takes seconds if the owner has died, because the kernel then frees the pages."""
        os.close(self._descriptor)


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """A contiguous part of a file, with its own checksum."""

    pages: Pages | LentPages
    """Memory that contains the chunk."""
    offset: int
    """Byte offset of the chunk in `pages`."""
    num_bytes: int
    checksum: int
    """Checksum that the writer computed from its own memory."""


class MemoryFile:
    """A file in `MemoryFiles`.

    Args:
        files: Owner of the file, which accounts for its memory.
        pages: Memory for chunks that are not in lent memory.
        is_large: Whether to keep `pages` for reuse when the file is dropped.
    """

    def __init__(self, files: MemoryFiles, pages: Pages, *, is_large: bool) -> None:
        self.pages, self.is_large = pages, is_large
        self.num_users = 1
        """Reference count: the writer, the name and the readers. At zero, the memory is freed or kept for reuse."""
        self.lent: list[LentPages] = []
        self.size = self.lent_bytes = 0
        self.chunks: list[Chunk] = []
        self._ends: list[int] = []
        self._files = files

    @property
    def own_bytes(self) -> int:
        """Number of bytes in `pages`, as opposed to lent memory."""
        return self.size - self.lent_bytes

    def room(self, num_bytes: int) -> memoryview:
        """Return memory for the next chunk, as a view that must be released before the next call.

        Raises:
            OSError: The agent's memory is full.
        """
        end = self.own_bytes + num_bytes
        if end > self.pages.num_bytes:
            self._files.charge(end - self.pages.num_bytes)
            self.pages.resize(end)
        return self.pages.view(self.own_bytes, end)

    def accept(self, room: memoryview, wanted: int) -> None:
        """Append the chunk that was received into `room` if its checksum equals `wanted`.

        Raises:
            OSError: The checksum differs.
        """
        if checksum(room) != wanted:
            raise OSError(errno.EIO, "a chunk was damaged in transit")
        self._add(Chunk(pages=self.pages, offset=self.own_bytes, num_bytes=len(room), checksum=wanted))

    def borrow(self, pages: LentPages) -> LentPages:
        """Add and return lent memory; if the file already uses it, close `pages` and return the existing object."""
        for known in self.lent:
            if os.path.sameopenfile(known.fileno(), pages.fileno()):
                pages.close()
                return known
        self.lent.append(pages)
        return pages

    def take(self, pages: LentPages, offset: int, num_bytes: int, wanted: int) -> None:
        """Append a chunk of lent memory without a copy; the checksum is verified when an agent receives a copy.

        Raises:
            ValueError: The chunk exceeds the lent memory.
            OSError: The agent's memory is full.
        """
        if min(offset, num_bytes) < 0 or offset + num_bytes > pages.num_bytes:
            raise ValueError("a chunk exceeds the lent memory")
        self._files.charge(num_bytes)
        self.lent_bytes += num_bytes
        self._add(Chunk(pages=pages, offset=offset, num_bytes=num_bytes, checksum=wanted))

    def ranges(self, start: int, stop: int) -> Iterator[tuple[Pages | LentPages, int, int]]:
        """Split a byte range of the file by chunk; yield the memory, byte offset and size of each piece."""
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
    """The files of an agent, with a limit on their total size; thread-safe.

    Args:
        limit_bytes: Maximum total size of all files, including uploads in progress, or None for no limit.
    """

    def __init__(self, limit_bytes: int | None) -> None:
        self._limit_bytes = limit_bytes
        self._lock = threading.RLock()
        self._files: dict[str, MemoryFile] = {}
        self._spare: list[Pages] = []
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Total size in bytes of all files, including uploads in progress but not spare pages."""
        with self._lock:
            return self._num_bytes

    @property
    def spare_bytes(self) -> int:
        """Total size in bytes of the pages that are kept for reuse."""
        with self._lock:
            return sum(pages.num_bytes for pages in self._spare)

    def charge(self, num_bytes: int) -> None:
        """Count `num_bytes` more bytes towards the limit, freeing spare pages if necessary.

        Raises:
            OSError: The limit would be exceeded.
        """
        with self._lock:
            needed = self._num_bytes + num_bytes
            if self._limit_bytes is not None:
                while self._spare and needed + self.spare_bytes > self._limit_bytes:
                    self._spare.pop().close()
                if needed > self._limit_bytes:
                    text = (
                        f"the peer memory of this node is full: {self._num_bytes / 2**30:.2f} of "
                        f"{self._limit_bytes / 2**30:.2f} GiB are used, and {num_bytes / 2**30:.2f} GiB more are "
                        "needed; increase elastic.peer_memory_gib, or use more nodes"
                    )
                    raise OSError(errno.ENOSPC, text)
            self._num_bytes = needed

    def begin(self, *, is_large: bool) -> MemoryFile:
        """Return a new file without a name, in spare pages if large; the writer must `release` it even after `keep`."""
        with self._lock:
            pages = self._spare.pop() if is_large and self._spare else Pages()
            self._num_bytes += pages.num_bytes
        return MemoryFile(self, pages, is_large=is_large)

    def keep(self, key: str, file: MemoryFile, *, replace: bool) -> int:
        """Store a completely written file under `key`, and return its size in bytes.

        Raises:
            AlreadyExistsError: The key exists, and `replace` is false.
        """
        checked_key(key)
        with self._lock:
            old = self._files.get(key)
            if old is not None and not replace:
                raise AlreadyExistsError(f"{key} already exists and was not overwritten")
            if file.pages.num_bytes > _MOST_SLACK * file.own_bytes:
                self._num_bytes -= file.pages.num_bytes - file.own_bytes
                file.pages.resize(file.own_bytes)
            self._files[key] = file
            file.num_users += 1
            if old is not None:
                self._release(old)
        return file.size

    def release(self, file: MemoryFile) -> None:
        """Drop the writer's reference to a file that `begin` returned."""
        with self._lock:
            self._release(file)

    @contextmanager
    def reading(self, key: str) -> Iterator[MemoryFile]:
        """Yield a file, whose content stays valid within the block even if the file is deleted or replaced.

        Raises:
            FileNotFoundError: No file has this key.
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
        """Return the size in bytes of each file whose key is `prefix` or is in the folder `prefix`, by key."""
        with self._lock:
            return {key: found.size for key, found in self._files.items() if _is_in(key, prefix)}

    def delete(self, prefix: str) -> None:
        """Delete the file `prefix`, or all files under the folder `prefix`."""
        with self._lock:
            for key in [key for key in self._files if _is_in(key, prefix)]:
                self._release(self._files.pop(key))

    def clear(self) -> None:
        """Delete all files and free the spare pages."""
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
        # The thread limit is reached.
        close()


def _is_in(key: str, prefix: str) -> bool:
    return key == prefix or key.startswith(f"{prefix}/")


class LentBuffer:
    """Shared memory of a worker that can be lent to the agent on the same node.

    Args:
        owner: Registry to which the buffer belongs.
        num_bytes: Size of the buffer in bytes, without the flag byte.
    """

    def __init__(self, owner: LentMemory, num_bytes: int) -> None:
        self.descriptor = os.memfd_create("ray-ulysses-lent", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self.descriptor)
        size = num_bytes + len(LENT)
        # Allocate and map all pages now, so that a lack of memory raises here and no save waits for page faults.
        # `MAP_POPULATE` would block all other threads.
        os.posix_fallocate(self.descriptor, 0, size)
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SEALS)
        self._mapped = mmap.mmap(self.descriptor, size)
        np.frombuffer(self._mapped, np.uint8)[:: mmap.PAGESIZE].max()
        self.num_bytes, self.memory = num_bytes, memoryview(self._mapped)[:num_bytes]
        self._owner, self._address = owner, _address(self.memory)
        self._lent_over: socket.socket | None = None

    @property
    def is_returned(self) -> bool:
        """Whether the worker may write into `memory`, because no file uses this memory."""
        return self._mapped[self.num_bytes :] != LENT

    @property
    def is_lost(self) -> bool:
        """Whether the agent will never return the buffer; only valid while no file is being written."""
        if self.is_returned or self._lent_over is None:
            return False
        return self._lent_over.fileno() == -1 or has_ended(self._lent_over) or self._owner.is_overdue(self)

    def offset_of(self, address: int, num_bytes: int) -> int | None:
        """Return the byte offset of an address range in the buffer, or None if the range is not inside the buffer."""
        offset = address - self._address
        return offset if offset >= 0 and offset + num_bytes <= self.num_bytes else None

    def lend(self, connection: socket.socket) -> None:
        """Mark the buffer as lent to the agent at the other end of `connection`."""
        self._mapped[self.num_bytes :] = LENT
        self._lent_over = connection


class LentMemory:
    """A worker's buffers, which the agent on the same node can use without a copy.

    One thread may create and query buffers while another thread writes files.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._buffers: tuple[weakref.ref[LentBuffer], ...] = ()
        self._newest: weakref.ref[LentBuffer] | None = None
        self._waiting_since: float | None = None

    def make(self, num_bytes: int) -> LentBuffer:
        """Create a buffer.

        Raises:
            OSError: The node has too little memory.
        """
        buffer = LentBuffer(self, num_bytes)
        self._buffers = (*(known for known in self._buffers if known() is not None), weakref.ref(buffer))
        return buffer

    @property
    def is_used(self) -> bool:
        """Whether a buffer that was created still exists."""
        return any(known() is not None for known in self._buffers)

    def place(self, view: memoryview) -> tuple[LentBuffer, int] | None:
        """Return the buffer that contains the memory of `view` and the byte offset of `view` in it, or None."""
        address = _address(view)
        for known in self._buffers:
            buffer = known()
            if buffer is not None and (offset := buffer.offset_of(address, len(view))) is not None:
                return buffer, offset
        return None

    def kept(self, buffer: LentBuffer) -> None:
        """Record that the newest complete file is in `buffer`."""
        self._newest, self._waiting_since = weakref.ref(buffer), None

    def is_overdue(self, buffer: LentBuffer) -> bool:
        """Return whether a lent buffer with an outdated file has not been returned within `_OVERDUE_S` seconds."""
        if self._newest is not None and self._newest() is buffer:
            return False
        now = self._clock.monotonic()
        if self._waiting_since is None:
            self._waiting_since = now
        return now - self._waiting_since > _OVERDUE_S


def check_lent(descriptor: int, num_bytes: int) -> None:
    """Check that a descriptor refers to a `LentBuffer` of `num_bytes` bytes.

    Raises:
        ValueError: The memory has a different size, or is not sealed against resizing.
        OSError: The descriptor does not refer to memory that can be sealed.
    """
    if os.fstat(descriptor).st_size != num_bytes + len(LENT):
        raise ValueError("the size differs from the size in the request")
    if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
        raise ValueError("the memory is not sealed against resizing")


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])
