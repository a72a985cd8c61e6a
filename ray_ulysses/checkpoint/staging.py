"""Host buffers for copies of a rank's training state, which are saved while training continues.

The next optimizer step overwrites the state, so the state is copied before it is saved in the background. On a GPU, the
copies run on a separate stream into pinned memory. Only the next weight update and the saving thread wait for the
copies.
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
    """A buffer whose memory a store may use as a file's content, without a copy."""

    @property
    def memory(self) -> memoryview:
        """Writable view of the buffer."""
        ...

    @property
    def is_returned(self) -> bool:
        """Whether the store no longer uses the memory."""
        ...

    @property
    def is_lost(self) -> bool:
        """Whether the store will never return the memory; only valid while no save is in progress."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class StagedState:
    """A copy of one rank's state that training does not overwrite."""

    state: ShardedState
    """Copied parts; call `wait` before reading them."""
    source: StateSource
    """Original state, kept alive until the copies are complete."""
    copied: torch.cuda.Event | None
    """CUDA event recorded after the last copy, or None if the copies are complete."""
    buffer: int
    """Index of the buffer that contains the copies."""

    def wait(self) -> None:
        """Block until the copies are complete; must be called on the thread that reads the copies."""
        if self.copied is not None:
            self.copied.synchronize()


class Staging:
    """Pool of host buffers for copies of the state; one thread stages states, another releases buffers.

    Args:
        num_buffers: Maximum number of staged states. If 0, a state in memory is not copied, and the caller must not
            change the state until its buffer is released.
        device: Device of the state, also available as an attribute.
        lend: Function that allocates a buffer of a given size in bytes that the store may keep. If None, buffers use
            private memory. If set, the caller must check `is_ready` and call `reserve` before `stage`.
    """

    def __init__(
        self, num_buffers: int, device: torch.device, *, lend: Callable[[int], LentBuffer] | None = None
    ) -> None:
        self._in_place = num_buffers == 0
        self._lend = lend
        self._lent: dict[int, LentBuffer] = {}
        self._buffers: list[torch.Tensor | None] = [None] * max(num_buffers, 1)
        # Views of each buffer for a list of intervals, cached because the intervals are the same at every step.
        self._parts: dict[int, tuple[tuple[HeldInterval, ...], tuple[TensorPart, ...]]] = {}
        self._free = list(reversed(range(len(self._buffers))))
        self._changed = threading.Condition()
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def num_bytes(self) -> int:
        """Total size of the allocated buffers, in bytes."""
        return sum(buffer.numel() for buffer in self._buffers if buffer is not None)

    @property
    def is_ready(self) -> bool:
        """Whether an allocated buffer is free; only valid while no save is in progress."""
        with self._changed:
            return any(self._is_writable(number) and self._buffers[number] is not None for number in self._free)

    def wait_for_buffer(self, timeout_s: float) -> bool:
        """Wait until a buffer is free; return False on timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: self._next() is not None, timeout=timeout_s)

    def reserve(self, intervals: Sequence[HeldInterval]) -> None:
        """Allocate a buffer and touch its pages in advance, so that no save waits for the allocation.

        Does nothing if a free buffer is ready or if all buffers are allocated. `stage` must not be called concurrently.

        Raises:
            CheckpointError: The host has too little memory.
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
        """Copy a state into a free buffer, without waiting for GPU copies.

        On a GPU, call `before_update` before the state changes.
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
        """Make the current CUDA stream wait for the copies, without blocking the host."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def release(self, number: int) -> None:
        """Mark a buffer as free; thread-safe."""
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
        """Return the index of a free buffer, preferring an allocated one, or None if no buffer is free."""
        writable = [number for number in reversed(self._free) if self._is_writable(number)]
        return min(writable, key=lambda number: self._buffers[number] is None, default=None)

    def _is_writable(self, number: int) -> bool:
        """Return whether a free buffer may be overwritten or allocated; if its memory is lost, drop the memory."""
        lent = self._lent.get(number)
        if lent is None or lent.is_returned:
            return True
        if lent.is_lost:
            _log.info("abandoning %d bytes of memory that the peer memory agent did not return", len(lent.memory))
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
            # The buffer outlives all copies into it, because it is only dropped after its release.
            if self._stream is not None and (error := pin(memory, self.device, owner=memory)):
                raise MemoryError(
                    f"the memory can't be pinned: CUDA error {error}; raise the locked-memory limit (ulimit -l)"
                )
            return memory
        except (RuntimeError, MemoryError, OSError) as error:
            self._forget(number)
            hint = "decrease checkpoint.host_buffers (0 uses no buffers and waits for each save)"
            raise CheckpointError(
                f"could not allocate {num_bytes / 2**30:.1f} GiB of host memory to copy this rank's state ({error}); "
                f"{hint if self._lend is None else 'set elastic.peer_memory: false'}, or use more workers"
            ) from error

    def _room_for(self, number: int, intervals: Sequence[HeldInterval]) -> tuple[TensorPart, ...]:
        """Return views of a buffer for the given intervals; allocates the buffer if it is missing or too small."""
        intervals = tuple(intervals)
        known = self._parts.get(number)
        if known is not None and known[0] == intervals:
            return known[1]
        # Consecutive parts of the same dtype have no gap between them, so that they can be lent as one range.
        offsets, size = [], 0
        for held in intervals:
            item_bytes = held.dtype.itemsize
            offsets.append(-(-size // item_bytes) * item_bytes)
            size = offsets[-1] + held.num_elements * item_bytes
        buffer = self._buffers[number]
        if buffer is None or buffer.numel() < size:
            # Drop the old buffer first, because the host may not have memory for both.
            self._forget(number)
            buffer = self._allocate(number, size)
            self._buffers[number] = buffer
        copies = []
        for held, offset in zip(intervals, offsets, strict=True):
            memory = buffer[offset : offset + held.num_elements * held.dtype.itemsize].view(held.dtype)
            copies.append(TensorPart(key=held.key, start=held.start, tensor=memory))
        self._parts[number] = intervals, tuple(copies)
        return self._parts[number][1]
