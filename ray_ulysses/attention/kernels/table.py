"""Selects the fastest available kernel that computes a layer exactly."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Literal

from ray_ulysses.attention.kernels.call import Demand, KernelEntry
from ray_ulysses.attention.kernels.cudnn import CUDNN
from ray_ulysses.attention.kernels.flash import FLASH_2, FLASH_3, FLASH_4, compute_capability
from ray_ulysses.attention.kernels.math import MATH
from ray_ulysses.attention.kernels.sdpa import SDPA
from ray_ulysses.attention.kernels.varlen import VARLEN
from ray_ulysses.errors import UserError

KernelName = Literal["auto", "flash_attn_4", "flash_attn_3", "flash_attn", "cudnn", "varlen", "sdpa", "math"]

KERNELS: tuple[KernelEntry, ...] = (FLASH_2, CUDNN, VARLEN, SDPA, FLASH_4, FLASH_3, MATH)
"""All kernels. On GPUs other than Hopper, which are not measured, this is the order of preference."""
HOPPER_TFLOPS: Mapping[str, int] = {"cudnn": 548, "flash_attn": 341, "varlen": 326}
"""Rates on an H200: forward and backward of a document of 131,072 tokens, as one of eight ranks with heads of 128. Of
documents so short that cuDNN is slower, `cudnn` leaves the computation to `varlen`."""


def by_speed() -> tuple[KernelEntry, ...]:
    """Return all kernels in the order of preference on this machine's GPU.

    On Hopper, this is the order of measured rates. Kernels that are not measured come after them, but before `math`.
    """
    capability = compute_capability()
    if capability is None or capability[0] != 9:
        return KERNELS
    return tuple(sorted(KERNELS, key=lambda entry: -HOPPER_TFLOPS.get(entry.name, 0)))


@cache
def choose_kernel(name: str, demand: Demand) -> tuple[KernelEntry, str]:
    """Return the named kernel, or for ``auto`` the fastest suitable kernel, and the reason for the choice.

    Raises:
        UserError: The named kernel is unknown, not available, or can't meet the demand exactly.
    """
    skipped: list[str] = []
    for entry in by_speed():
        obstacle = _obstacle(entry, demand)
        if name == "auto":
            if obstacle is None:
                return entry, "; ".join(["the fastest kernel that fits", *skipped])
            skipped.append(f"{entry.name}: {obstacle}")
        elif name == entry.name:
            if obstacle is None:
                return entry, "set by model.attention"
            able = ", ".join(other.name for other in KERNELS if _obstacle(other, demand) is None)
            raise UserError(f"model.attention={name!r} can't be used: {obstacle}; use auto or {able}")
    raise UserError(f"model.attention={name!r} is unknown; use auto or one of {[one.name for one in KERNELS]}")


def _obstacle(entry: KernelEntry, demand: Demand) -> str | None:
    if not entry.runs_on(demand.device_type):
        return f"it requires {entry.needs}, but this device is {demand.device_type}"
    return entry.refuses(demand)
