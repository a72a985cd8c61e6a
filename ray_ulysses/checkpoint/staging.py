"""Copies a rank's training state into host buffers, from which it is written while training continues.

An optimizer step overwrites what a checkpoint has to hold. So the parts are copied at once, and written from the
copies while training continues. On a GPU the copies run on a stream of their own into pinned memory; nothing waits for
them but the next update of the weights, and the thread that writes.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ray_ulysses.checkpoint.errors import CheckpointError
from ray_ulysses.checkpoint.state import HeldInterval, ShardedState, StateSource, TensorPart

_ALIGNMENT = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class StagedState:
    """A copy of one rank's state that training can't change.

    Attributes:
        state: The copies. Wait for `ready` before reading them.
        source: What was copied, kept alive until the copies are done.
        copied: CUDA's event behind the last copy; None where copies are done already.
        buffer: Number of the buffer that holds them.
    """

    state: ShardedState
    source: StateSource
    copied: torch.cuda.Event | None
    buffer: int

    def wait(self) -> None:
        """Wait until the copies are there; the thread that reads them calls."""
        if self.copied is not None:
            self.copied.synchronize()


class Staging:
    """Host buffers for copies of the state; one thread stages, another releases.

    Args:
        num_buffers: States that may be held at once; 0 copies nothing, and whoever stages must wait until what was
            staged is released before the state may change.
        device: Where the state lives.
    """

    def __init__(self, num_buffers: int, device: torch.device) -> None:
        self._in_place = num_buffers == 0
        self._buffers: list[torch.Tensor | None] = [None] * max(num_buffers, 1)
        # The parts in each buffer, and of which intervals they are: the same after every step.
        self._parts: dict[int, tuple[tuple[HeldInterval, ...], tuple[TensorPart, ...]]] = {}
        self._free = list(reversed(range(len(self._buffers))))
        self._changed = threading.Condition()
        self._is_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._is_cuda else None

    @property
    def num_bytes(self) -> int:
        """Return the host memory that the buffers take."""
        return sum(buffer.numel() for buffer in self._buffers if buffer is not None)

    def wait_for_buffer(self, timeout_s: float) -> bool:
        """Wait until a state can be staged; return whether one can."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._free), timeout=timeout_s)

    def reserve(self, intervals: Sequence[HeldInterval]) -> None:
        """Make the first buffer before it is needed, page by page, so that the first save stalls no longer than others.

        Args:
            intervals: What will be staged.

        Raises:
            CheckpointError: There is no memory for it.
        """
        if not self._in_place and self._buffers[0] is None:
            for part in self._room_for(0, intervals):
                part.tensor.zero_()

    def stage(self, source: StateSource) -> StagedState:
        """Copy a state into a free buffer; returns when the copies are under way.

        On a GPU the state must not be changed before `before_update` was called.
        """
        with self._changed:
            assert self._free, "no buffer is free: call wait_for_buffer first"
            number = self._free.pop()
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

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._is_cuda)
        except (RuntimeError, MemoryError) as error:
            raise CheckpointError(
                f"no {num_bytes / 2**30:.1f} GiB of host memory for a copy of this rank's state ({error}); lower "
                "checkpoint.host_buffers (0 takes none and waits for each save), or use more workers"
            ) from error

    def _room_for(self, number: int, intervals: Sequence[HeldInterval]) -> tuple[TensorPart, ...]:
        """Return parts for these intervals whose memory is in a buffer, which is allocated on first use."""
        intervals = tuple(intervals)
        known = self._parts.get(number)
        if known is not None and known[0] == intervals:
            return known[1]
        offsets, size = [], 0
        for held in intervals:
            offsets.append(size)
            size += -(-held.num_elements * held.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        buffer = self._buffers[number]
        if buffer is None or buffer.numel() < size:
            # Let go of the old one first: two of them might not fit.
            self._parts.pop(number, None)
            self._buffers[number] = buffer = None
            buffer = self._allocate(size)
            self._buffers[number] = buffer
        copies = []
        for held, offset in zip(intervals, offsets, strict=True):
            memory = buffer[offset : offset + held.num_elements * held.dtype.itemsize].view(held.dtype)
            copies.append(TensorPart(key=held.key, start=held.start, tensor=memory))
        self._parts[number] = intervals, tuple(copies)
        return self._parts[number][1]
