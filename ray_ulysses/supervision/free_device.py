"""Waits until a device is free of the process that trained on it before."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ray_ulysses.clock import Clock, SystemClock
from ray_ulysses.errors import RunError
from ray_ulysses.logging import get_logger
from ray_ulysses.parallel.device import choose_device
from ray_ulysses.trainer.out_of_memory import is_out_of_memory

_log = get_logger(__name__)
_LOOK_EVERY_S = 0.2
_FREE_PART = 1 / 16
"""A device of which no more than this is held counts as free: processes hold about half a GiB when they start."""


def choose_free_device(
    device: torch.device,
    within_s: float,
    *,
    memory: Callable[[torch.device], tuple[int, int]] = torch.cuda.mem_get_info,
    clock: Clock | None = None,
) -> None:
    """Choose a GPU for this process once nobody else holds memory there; the driver may take some time for that.

    Memory that is still held then, by whichever process, is named in a warning: training may fit beside it.

    Args:
        device: The GPU.
        within_s: Longest wait, in seconds.
        memory: Returns its free bytes, and all of its bytes.
        clock: Time.

    Raises:
        RunError: Not even this process's context fits.
    """
    clock = clock or SystemClock()
    began = clock.monotonic()
    while True:
        no_context, held = None, "nearly all"
        try:
            choose_device(device)
            free, total = memory(device)
            if total - free <= total * _FREE_PART:
                return
            held = f"{(total - free) / 2**30:.1f} of {total / 2**30:.1f} GiB"
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            no_context = error
        if clock.monotonic() - began >= within_s:
            break
        clock.sleep(_LOOK_EVERY_S)
    text = (
        f"{held} of the memory of {device} are still held by other processes after a wait of {within_s:.0f} s for one "
        "that trained there before; find them with nvidia-smi, and end those that are not needed"
    )
    if no_context is not None:
        raise RunError(text) from no_context
    _log.warning("%s, or this worker may run out of memory", text)
