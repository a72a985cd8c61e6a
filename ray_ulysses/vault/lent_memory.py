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

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_OVERDUE_S = 10.0
"""How long a buffer is waited for whose file has a successor, in seconds: the agent may have missed to drop it."""


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
        """Return whether a buffer that is lent is asked for since long, while the newest file is in another one."""
        if self._newest is not None and self._newest() is buffer:
            return False
        now = self._clock.monotonic()
        if self._waiting_since is None:
            self._waiting_since = now
        return now - self._waiting_since > _OVERDUE_S


def check_lent(descriptor: int, num_bytes: int) -> None:
    """Make sure that a descriptor is that of a buffer of a size.

    Raises:
        ValueError: It has another size, or one that can change.
        OSError: It is no memory.
    """
    if os.fstat(descriptor).st_size != num_bytes + len(LENT):
        raise ValueError("it has another size than was said")
    if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
        raise ValueError("its size can change")


def _address(view: memoryview) -> int:
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address
