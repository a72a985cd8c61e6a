"""SplitMix64's hash for tensors of int64, whose arithmetic wraps around (https://doi.org/10.1145/2660193.2660195)."""

from __future__ import annotations

import torch

INCREMENT = -0x61C8864680B583EB
"""SplitMix64's increment as a signed integer; inputs are multiplied by it."""
_FIRST, _SECOND = -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15


def mixed(x: torch.Tensor) -> torch.Tensor:
    """Return SplitMix64's output for each state, as int64."""
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        x = (x ^ _shifted(x, shift)).mul_(factor)
    return x ^ _shifted(x, 31)


def _shifted(x: torch.Tensor, shift: int) -> torch.Tensor:
    """Shift without extending the sign."""
    return (x >> shift).bitwise_and_((1 << (64 - shift)) - 1)
