"""Memory of a worker that the agent of its node can keep files in, so that they need no copy and no second memory.

A buffer is lent from the moment at which a file in it is sent until the agent has dropped that file, which it says in
the byte behind the buffer. Nothing is written into it meanwhile: the file may be the newest state that there is. An
agent that is gone says nothing any more; then the buffer is left as it is, and its owner makes another.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import weakref

import numpy as np

from ray_ulysses.clock import Clock
from ray_ulysses.vault.files import LENT
from ray_ulysses.vault.wire import has_ended

_OVERDUE_S = 10.0
"""How long the file in a buffer may be there beside its successor, in seconds: the agent may have missed to drop it."""


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
        # Pages are taken now, so that there is an error here where there are none, and no waiting for them later.
        os.posix_fallocate(self.descriptor, 0, size)
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self._mapped = mmap.mmap(self.descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
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
        """Leave it to the agent at the other end of a connection."""
        self._mapped[self.num_bytes :] = LENT
        self._lent_over = connection


class LentMemory:
    """The buffers of one worker; one thread makes and asks them, another writes files.

    Args:
        clock: Time.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._buffers: weakref.WeakSet[LentBuffer] = weakref.WeakSet()
        self._newest: weakref.ref[LentBuffer] | None = None
        self._newest_at = 0.0

    def make(self, num_bytes: int) -> LentBuffer:
        """Return a new buffer.

        Raises:
            OSError: There is no memory for it.
        """
        buffer = LentBuffer(self, num_bytes)
        self._buffers.add(buffer)
        return buffer

    def place(self, view: memoryview) -> tuple[LentBuffer, int] | None:
        """Return the buffer that bytes are in, and where; None if they are elsewhere."""
        address = _address(view)
        for buffer in self._buffers:
            offset = buffer.offset_of(address, len(view))
            if offset is not None:
                return buffer, offset
        return None

    def kept(self, buffer: LentBuffer) -> None:
        """Note that a file in a buffer is whole."""
        self._newest, self._newest_at = weakref.ref(buffer), self._clock.monotonic()

    def is_overdue(self, buffer: LentBuffer) -> bool:
        """Return whether a file of another buffer is there for so long that this one's should have been dropped."""
        newest = self._newest() if self._newest is not None else None
        return newest is not buffer and self._clock.monotonic() - self._newest_at > _OVERDUE_S


def _address(view: memoryview) -> int:
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address
