"""What a thread does before it touches a device, and the host memory that a device copies to."""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections.abc import Callable
from typing import Any

import torch


def choose_device(device: torch.device) -> None:
    """Make a device that of this thread; each thread of ours that touches CUDA begins with it.

    A thread that has chosen none uses the first GPU: every rank of a node would hold a context there, of about half a
    GiB (pytorch#135273).
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)


def reserve_host(num_bytes: int) -> torch.Tensor:
    """Reserve host memory, uint8; a page takes memory once it is written.

    Pages are huge where the system has such: they are found, pinned and given back many times as fast.

    Raises:
        OSError: The system refuses that much.
    """
    reserved = mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Not every kernel has them.
    with contextlib.suppress(OSError):
        reserved.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(reserved, dtype=torch.uint8)


def pin(memory: torch.Tensor, device: torch.device, *, owner: object, cudart: Callable[[], Any] | None = None) -> int:
    """Pin host memory until its owner is gone; return CUDA's error, 0 if it is pinned.

    Nothing copies from or to the memory any more when the owner is let go.
    """
    runtime, address = (cudart or torch.cuda.cudart)(), memory.data_ptr()
    with _current(device):
        error = int(runtime.cudaHostRegister(address, len(memory), 0))
        if error:
            # CUDA reports the error again to whoever launches the next kernel.
            with contextlib.suppress(RuntimeError):
                torch.zeros((), device=device)
            return error
    weakref.finalize(owner, _unpin, runtime, address, device).atexit = False
    return 0


def _unpin(runtime: Any, address: int, device: torch.device) -> None:
    # Garbage is collected on any thread.
    with _current(device):
        runtime.cudaHostUnregister(address)


def _current(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
