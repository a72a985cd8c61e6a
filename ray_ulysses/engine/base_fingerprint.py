"""The fingerprint of a quantized base, which checkpoints contain instead of the frozen weights."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ray_ulysses.engine.partition_view import PartitionView
from ray_ulysses.engine.quantized_base import quantized_modules
from ray_ulysses.engine.splitmix import INCREMENT, mixed

_CHUNK = 2**20
_WORDS = {2: torch.int16, 4: torch.int32}


@torch.no_grad()
def base_fingerprint(engine: Any, view: PartitionView) -> str:
    """Return a digest of all frozen parameters, or "" if no weight is quantized. All ranks must call this function.

    The digest is a sum over elements, modulo 2**64, of a hash of the parameter's name, the element's index and its
    bits. Each rank adds its own elements, so the digest does not depend on the world size or the ZeRO stage.
    """
    if next(quantized_modules(engine.module), None) is None:
        return ""
    frozen = ((name, one) for name, one in engine.module.named_parameters() if not one.requires_grad)
    parts = ((name, *view.weights(one, is_writing=False)) for name, one in frozen)
    total = _sum(parts).to(engine.device)
    dist.all_reduce(total)
    return _text(total)


@torch.no_grad()
def model_fingerprint(model: nn.Module) -> str:
    """Return the digest that `base_fingerprint` returns for an engine with this model, without communication."""
    return _text(_sum((name, 0, one.flatten()) for name, one in model.named_parameters() if not one.requires_grad))


def _sum(parts: Iterable[tuple[str, int, torch.Tensor]]) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.int64)
    for name, start, values in parts:
        total += _digest(name, start, values).to(total.device)
    return total


def _text(total: torch.Tensor) -> str:
    return f"{int(total) & (2**64 - 1):016x}"


def _digest(name: str, start: int, values: torch.Tensor) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    name_hash = torch.tensor(zlib.crc32(name.encode()), device=values.device) * INCREMENT
    words = values.view(_WORDS[values.element_size()])
    for first in range(0, len(words), _CHUNK):
        part = words[first : first + _CHUNK].long()
        index = torch.arange(start + first, start + first + len(part), device=part.device)
        # Integers wrap around, so that this is arithmetic modulo 2**64.
        total += mixed((part + index * 2**32 ^ name_hash) * INCREMENT).sum()
    return total
