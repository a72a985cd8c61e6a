"""Selects a thread's device, and allocates host memory that a device copies to."""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections.abc import Callable
from typing import Any

import torch


def choose_device(device: torch.device) -> None:
    """Select this thread's device; each of our threads that touches CUDA must call it first.

    A thread that has selected none uses the first GPU, so that every rank of a node would hold a context of about half
    a GiB there (pytorch#135273).
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)


def reserve_host(num_bytes: int) -> torch.Tensor:
    """Reserve host memory as uint8; a page takes memory once it is written.

    Huge pages are used where the system has them: they are allocated, pinned and freed many times faster.

    Raises:
        OSError: The system refuses the reservation.
    """
    reserved = mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Not every kernel has huge pages.
    with contextlib.suppress(OSError):
        reserved.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(reserved, dtype=torch.uint8)


def pin(memory: torch.Tensor, device: torch.device, *, owner: object, cudart: Callable[[], Any] | None = None) -> int:
    """Pin host memory until its owner is collected; return CUDA's error code, 0 if it is pinned.

    All copies from and to the memory must have ended when the owner is released.
    """
    runtime, address = (cudart or torch.cuda.cudart)(), memory.data_ptr()
    with _current(device):
        error = int(runtime.cudaHostRegister(address, len(memory), 0))
        if error:
            # CUDA reports the error again at the next kernel launch, so launch one here.
            with contextlib.suppress(RuntimeError):
                torch.zeros((), device=device)
            return error
    weakref.finalize(owner, _unpin, runtime, address, device).atexit = False
    return 0


def _unpin(runtime: Any, address: int, device: torch.device) -> None:
    # Garbage collection may run on any thread.
    with _current(device):
        runtime.cudaHostUnregister(address)


def _current(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
