"""Selects the fastest available kernel that computes a layer exactly."""

from __future__ import annotations

from functools import cache
from typing import Literal

from ray_ulysses.attention.kernels.call import Demand, KernelEntry
from ray_ulysses.attention.kernels.cudnn import CUDNN
from ray_ulysses.attention.kernels.flash import FLASH_2, FLASH_3, compute_capability
from ray_ulysses.attention.kernels.math import MATH
from ray_ulysses.attention.kernels.sdpa import SDPA
from ray_ulysses.attention.kernels.varlen import VARLEN
from ray_ulysses.errors import UserError

KernelName = Literal["auto", "flash_attn_3", "flash_attn", "cudnn", "varlen", "sdpa", "math"]

KERNELS: tuple[KernelEntry, ...] = (FLASH_3, FLASH_2, CUDNN, VARLEN, SDPA, MATH)
"""All kernels, ordered from fastest to slowest on GPUs other than Hopper."""
_ON_HOPPER = (FLASH_3, CUDNN, FLASH_2, VARLEN, SDPA, MATH)


def by_speed() -> tuple[KernelEntry, ...]:
    """Return all kernels, ordered from fastest to slowest on this machine's GPU.

    On H100 and H200, cuDNN is 1.6 times as fast as flash-attn 2, and flash-attn 2 is 1.05 times as fast as torch's copy
    of flash-attn (head size 128, forward and backward: benchmarks/results). Other GPU generations are not measured.
    """
    capability = compute_capability()
    return _ON_HOPPER if capability is not None and capability[0] == 9 else KERNELS


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
