"""Selects the CUDA device of a thread, and reserves and pins host memory."""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections.abc import Callable
from typing import Any

import torch


def choose_device(device: torch.device) -> None:
    """Select the device of the current thread. Every thread that uses CUDA must call this function first.

    Otherwise, the thread uses the first GPU, and every rank on the node allocates a context of about 0.5 GiB there
    (pytorch#135273).
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)


def reserve_host(num_bytes: int) -> torch.Tensor:
    """Reserve host memory as a uint8 tensor. A page is allocated only when it is first written.

    Huge pages are used if the system supports them, because they are allocated, pinned and freed many times faster.

    Raises:
        OSError: The operating system refuses the reservation.
    """
    reserved = mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # The call fails if the kernel does not support huge pages.
    with contextlib.suppress(OSError):
        reserved.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(reserved, dtype=torch.uint8)


def pin(memory: torch.Tensor, device: torch.device, *, owner: object, cudart: Callable[[], Any] | None = None) -> int:
    """Pin host memory until ``owner`` is garbage-collected, and return CUDA's error code (0 for success).

    All copies from and to the memory must have finished before ``owner`` is released.
    """
    runtime, address = (cudart or torch.cuda.cudart)(), memory.data_ptr()
    with _current(device):
        error = int(runtime.cudaHostRegister(address, len(memory), 0))
        if error:
            # CUDA reports the error a second time at the next kernel launch, so consume it here.
            with contextlib.suppress(RuntimeError):
                torch.zeros((), device=device)
            return error
    weakref.finalize(owner, _unpin, runtime, address, device).atexit = False
    return 0


def _unpin(runtime: Any, address: int, device: torch.device) -> None:
    # Garbage collection may run on any thread, so select the device again.
    with _current(device):
        runtime.cudaHostUnregister(address)


def _current(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
