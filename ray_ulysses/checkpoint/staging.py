"""Copies a rank's training state into host buffers, from which it is written while training continues.

An optimizer step overwrites what a checkpoint has to hold. So the parts are copied at once, and written from the
copies while training continues. On a GPU the copies run on a stream of their own into pinned memory; nothing waits for
them but the next update of the weights, and the thread that writes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ray_ulysses.checkpoint.errors import CheckpointError
from ray_ulysses.checkpoint.state import HeldInterval, ShardedState, StateSource, TensorPart
from ray_ulysses.logging import get_logger
from ray_ulysses.parallel.device import pin, reserve_host

_log = get_logger(__name__)


class LentBuffer(Protocol):
    """Memory of a buffer that a store keeps after a state was written, instead of a copy."""

    @property
    def memory(self) -> memoryview:
        """The memory."""
        ...

    @property
    def is_returned(self) -> bool:
        """Whether the store does without it."""
        ...

    @property
    def is_lost(self) -> bool:
        """Whether the store will keep it for good; asked only while nothing is being written."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class StagedState:
    """A copy of one rank's state that training can't change."""

    state: ShardedState
    """The copies. Wait for `ready` before reading them."""
    source: StateSource
    """What was copied, kept alive until the copies are done."""
    copied: torch.cuda.Event | None
    """CUDA's event behind the last copy; None where copies are done already."""
    buffer: int
    """Number of the buffer that holds them."""

    def wait(self) -> None:
        """Wait until the copies are there; the thread that reads them calls."""
        if self.copied is not None:
            self.copied.synchronize()


class Staging:
    """Host buffers for copies of the state; one thread stages, another releases.

    Args:
        num_buffers: States that may be held at once; 0 copies nothing, and the caller must wait until what was
            staged is released before the state may change.
        device: Where the state lives.
        lend: Returns memory of a size that the store may keep; without, buffers are this process's own. The caller
            must then check `is_ready` and `reserve` before it stages.

    Attributes:
        device: Where the state lives.
    """

    def __init__(
        self, num_buffers: int, device: torch.device, *, lend: Callable[[int], LentBuffer] | None = None
    ) -> None:
        self._in_place = num_buffers == 0
        self._lend = lend
        self._lent: dict[int, LentBuffer] = {}
        self._buffers: list[torch.Tensor | None] = [None] * max(num_buffers, 1)
        # The parts in each buffer, and of which intervals they are: the same after every step.
        self._parts: dict[int, tuple[tuple[HeldInterval, ...], tuple[TensorPart, ...]]] = {}
        self._free = list(reversed(range(len(self._buffers))))
        self._changed = threading.Condition()
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def num_bytes(self) -> int:
        """Return the host memory that the buffers take."""
        return sum(buffer.numel() for buffer in self._buffers if buffer is not None)

    @property
    def is_ready(self) -> bool:
        """True if a state can be staged into memory that is there; ask while nothing is being written."""
        with self._changed:
            return any(self._is_writable(number) and self._buffers[number] is not None for number in self._free)

    def wait_for_buffer(self, timeout_s: float) -> bool:
        """Wait until a state can be staged; return whether one can."""
        with self._changed:
            return self._changed.wait_for(lambda: self._next() is not None, timeout=timeout_s)

    def reserve(self, intervals: Sequence[HeldInterval]) -> None:
        """Make a buffer before it is needed, page by page, so that no save stalls for it; nothing is staged meanwhile.

        Does nothing if one `is_ready`, or if all of them are there.

        Args:
            intervals: What will be staged.

        Raises:
            CheckpointError: There is no memory for it.
        """
        if self._in_place or self.is_ready:
            return
        missing = [number for number in self._free if self._buffers[number] is None]
        if not missing:
            return
        parts = self._room_for(missing[-1], intervals)
        for part in parts if self._lend is None else ():
            part.tensor.zero_()

    def stage(self, source: StateSource) -> StagedState:
        """Copy a state into a free buffer; returns when the copies are under way.

        On a GPU the state must not be changed before `before_update` was called.
        """
        with self._changed:
            number = self._next()
            assert number is not None, "no buffer is free: call wait_for_buffer first"
            self._free.remove(number)
        if self._in_place and isinstance(source, ShardedState):
            return StagedState(state=source, source=source, copied=None, buffer=number)
        try:
            copies = self._room_for(number, source.intervals)
            copied = self._copy(source, [copy.tensor for copy in copies])
        except BaseException:
            self.release(number)
            raise
        staged = ShardedState(parts=copies, description=source.description)
        return StagedState(state=staged, source=source, copied=copied, buffer=number)

    def before_update(self) -> None:
        """Keep the next update of the weights behind the copies; nothing waits on the host."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def release(self, number: int) -> None:
        """Give a buffer back; any thread may call."""
        with self._changed:
            self._free.append(number)
            self._changed.notify_all()

    def _copy(self, source: StateSource, destinations: Sequence[torch.Tensor]) -> torch.cuda.Event | None:
        if self._stream is None:
            source.copy_to(destinations)
            return None
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            source.copy_to(destinations)
            copied = torch.cuda.Event()
            copied.record(self._stream)
        return copied

    def _next(self) -> int | None:
        """Return the buffer to stage into, one that is there before others; None if there is none."""
        writable = [number for number in reversed(self._free) if self._is_writable(number)]
        return min(writable, key=lambda number: self._buffers[number] is None, default=None)

    def _is_writable(self, number: int) -> bool:
        """Return whether a buffer may be written, or made; one that is lost is given up, and must be made anew."""
        lent = self._lent.get(number)
        if lent is None or lent.is_returned:
            return True
        if lent.is_lost:
            _log.info("memory that was lent, and is not returned, is given up: %d bytes", len(lent.memory))
            self._forget(number)
        return False

    def _forget(self, number: int) -> None:
        self._parts.pop(number, None)
        self._lent.pop(number, None)
        self._buffers[number] = None

    def _allocate(self, number: int, num_bytes: int) -> torch.Tensor:
        try:
            if self._lend is None:
                memory = reserve_host(num_bytes)
            else:
                self._lent[number] = self._lend(max(num_bytes, 1))
                memory = torch.frombuffer(self._lent[number].memory, dtype=torch.uint8)
            # It is let go after its release, when the copies into it are done.
            if self._stream is not None and (error := pin(memory, self.device, owner=memory)):
                raise MemoryError(
                    f"it can't be pinned: CUDA error {error}; raise the limit of locked memory (ulimit -l)"
                )
            return memory
        except (RuntimeError, MemoryError, OSError) as error:
            self._forget(number)
            hint = "lower checkpoint.host_buffers (0 takes none and waits for each save)"
            raise CheckpointError(
                f"no {num_bytes / 2**30:.1f} GiB of host memory for a copy of this rank's state ({error}); "
                f"{hint if self._lend is None else 'set elastic.peer_memory: false'}, or use more workers"
            ) from error

    def _room_for(self, number: int, intervals: Sequence[HeldInterval]) -> tuple[TensorPart, ...]:
        """Return parts for these intervals whose memory is in a buffer, which is allocated on first use."""
        intervals = tuple(intervals)
        known = self._parts.get(number)
        if known is not None and known[0] == intervals:
            return known[1]
        # There are no gaps between parts of one dtype, so that they can be lent as one.
        offsets, size = [], 0
        for held in intervals:
            item_bytes = held.dtype.itemsize
            offsets.append(-(-size // item_bytes) * item_bytes)
            size = offsets[-1] + held.num_elements * item_bytes
        buffer = self._buffers[number]
        if buffer is None or buffer.numel() < size:
            # Let go of the old one first: two of them might not fit.
            self._forget(number)
            buffer = self._allocate(number, size)
            self._buffers[number] = buffer
        copies = []
        for held, offset in zip(intervals, offsets, strict=True):
            memory = buffer[offset : offset + held.num_elements * held.dtype.itemsize].view(held.dtype)
            copies.append(TensorPart(key=held.key, start=held.start, tensor=memory))
        self._parts[number] = intervals, tuple(copies)
        return self._parts[number][1]
