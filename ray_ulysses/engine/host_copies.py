"""Copies between a device and one range of host memory, beside the computation.

The range is reserved at once and takes memory as it is used. With CUDA, what is used is pinned piece by piece, so that
copies are asynchronous: torch's own pinned memory would be rounded up to a power of two.

A copy begins after everything that the caller's computation was given to do before. It has ended for the computation
that follows `wait`; until then, neither side of it may be written, freed or, where it is the destination, read.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ray_ulysses.errors import UserError
from ray_ulysses.parallel.device import pin, reserve_host

_log = logging.getLogger(__name__)

PIECE_BYTES = 256 << 20
"""Bytes that are pinned at once."""


def host_range(num_bytes: int) -> torch.Tensor:
    """Reserve host memory, uint8; a page takes memory once it is written.

    Raises:
        UserError: The system refuses that much.
    """
    try:
        return reserve_host(num_bytes)
    except (OSError, ValueError, OverflowError) as error:
        raise UserError(
            f"memory.offload_activations: {num_bytes:,} bytes of host memory can't be reserved ({error}); use a "
            "smaller data.context_tokens, a larger parallel.sp_size, or memory.offload_activations: []"
        ) from error


class CpuCopies:
    """Copies on the host, which have ended when a call returns."""

    def __init__(self, num_bytes: int) -> None:
        self._range = host_range(num_bytes)

    def copy_out(self, source: torch.Tensor, start: int) -> None:
        """Copy to the range."""
        self._range[start : start + len(source)].copy_(source)

    def copy_in(self, start: int, target: torch.Tensor) -> None:
        """Copy from the range."""
        target.copy_(self._range[start : start + len(target)])

    def wait(self, copy: None) -> None:
        """Return at once."""


class CudaCopies:
    """Copies on a stream of their own."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._pinned = PinnedRange(host_range(num_bytes), device)
        self._stream = torch.cuda.Stream(device)

    def copy_out(self, source: torch.Tensor, start: int) -> torch.cuda.Event:
        """Begin to copy to the range."""
        with self._copying() as ended:
            for host, part in self._pinned.pieces(start, len(source)):
                host.copy_(source[part], non_blocking=True)
        return ended

    def copy_in(self, start: int, target: torch.Tensor) -> torch.cuda.Event:
        """Begin to copy from the range."""
        with self._copying() as ended:
            for host, part in self._pinned.pieces(start, len(target)):
                target[part].copy_(host, non_blocking=True)
        return ended

    def wait(self, copy: torch.cuda.Event) -> None:
        """Make the current stream wait."""
        torch.cuda.current_stream(self._stream.device).wait_event(copy)

    @contextlib.contextmanager
    def _copying(self) -> Iterator[torch.cuda.Event]:
        # The caller's stream is asked for each time: a backward pass has its own.
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        ended = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            yield ended
            ended.record(self._stream)


class PinnedRange:
    """A range of host memory that is pinned as it is used, or stays pageable where that fails."""

    def __init__(self, memory: torch.Tensor, device: torch.device, cudart: Callable[[], Any] | None = None) -> None:
        self._memory = memory
        self._device, self._cudart = device, cudart
        self._pinned_to = 0
        self._is_pinnable = True

    def pieces(self, start: int, num_bytes: int) -> Iterator[tuple[torch.Tensor, slice]]:
        """Yield parts of the range, none of which two pinned pieces share, and where they are in the tensor."""
        stop = start + num_bytes
        self._pin_to(stop)
        while start < stop:
            end = min(stop, (start // PIECE_BYTES + 1) * PIECE_BYTES)
            yield self._memory[start:end], slice(num_bytes - (stop - start), num_bytes - (stop - end))
            start = end

    def _pin_to(self, stop: int) -> None:
        while self._is_pinnable and self._pinned_to < stop:
            piece = self._memory[self._pinned_to : self._pinned_to + PIECE_BYTES]
            error = pin(piece, self._device, owner=self, cudart=self._cudart)
            if error:
                self._is_pinnable = False
                _log.warning(
                    "memory.offload_activations: host memory can't be pinned beyond %d bytes (CUDA error %d); copies "
                    "of the rest are slower and keep the computation waiting. Raise the limit of locked memory "
                    "(ulimit -l, or that of the container)",
                    self._pinned_to,
                    error,
                )
                return
            self._pinned_to += len(piece)


HostCopies = CpuCopies | CudaCopies
