"""AdamW whose moments are stored in bf16 with stochastic rounding; master weights remain fp32.

Rounding to nearest would lose most updates of the second moment, which changes by a twentieth per step or less. With
stochastic rounding, the stored moments are correct on average. The random bits are a hash of the seed, the parameter's
name, the element's index and the step, and each operation is rounded separately, so the same gradient bits give the
same update bits for every layout.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from ray_ulysses.engine.partition_view import GroupView, Partition, Zero3View
from ray_ulysses.engine.splitmix import INCREMENT, mixed
from ray_ulysses.planner.state_memory import BF16_MOMENTS_CHUNK as CHUNK


class AdamWBf16Moments(torch.optim.AdamW):
    """AdamW with moments in bf16.

    Args:
        groups: Parameter groups; see `engine.optimizer.parameter_groups`.
        seed: Seed of the rounding.
        options: Arguments of ``torch.optim.AdamW``.
    """

    def __init__(self, groups: list[dict[str, Any]], *, seed: int, **options: Any) -> None:
        super().__init__(groups, **options)
        self._seed = seed
        self._pieces: dict[int, list[tuple[str, Partition]]] = {}

    def locate(self, view: GroupView | Zero3View, parameters: Sequence[tuple[str, Any]]) -> None:
        """Locate the named, trained parameters in the flat tensors that ZeRO has created."""
        for name, parameter in parameters:
            piece = view.partition_of(parameter)
            self._pieces.setdefault(id(view.flats[piece.flat]), []).append((name, piece))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the flat tensors in all parameter groups."""
        for group in self.param_groups:
            for flat in group["params"]:
                self._step_flat(flat, group)

    def _step_flat(self, flat: torch.Tensor, group: dict[str, Any]) -> None:
        state, gradient = self.state[flat], flat.grad
        assert gradient is not None
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(flat, dtype=torch.bfloat16) for _ in range(2))
        state["step"] += 1
        step = int(state["step"])
        for name, piece in self._pieces[id(flat)]:
            key = _key(self._seed, name, step)
            for begin in range(0, piece.length, CHUNK):
                size = min(CHUNK, piece.length - begin)
                tensors = (flat, gradient, state["exp_avg"], state["exp_avg_sq"])
                views = [one.narrow(0, piece.offset + begin, size) for one in tensors]
                _update(*views, group=group, step=step, key=key, first=piece.start + begin)


def _update(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    mean: torch.Tensor,
    variance: torch.Tensor,
    *,
    group: dict[str, Any],
    step: int,
    key: int,
    first: int,
) -> None:
    """Update one chunk in place.

    Fused operations such as ``addcmul`` are avoided: on CPU, they round differently in the last elements of a tensor,
    which are not vectorized.
    """
    beta1, beta2 = group["betas"]
    # SplitMix64's outputs from number `first`, for the seed `key`.
    states = torch.arange(first + 1, first + weight.numel() + 1, dtype=torch.int64, device=weight.device)
    bits = mixed(states.mul_(INCREMENT).add_(key))
    new_mean = (mean.float() * beta1).add_(gradient * (1 - beta1))
    new_variance = (variance.float() * beta2).add_((gradient * gradient).mul_(1 - beta2))
    mean.copy_(_rounded(new_mean, bits & 0xFFFF))
    variance.copy_(_rounded(new_variance, (bits >> 16) & 0xFFFF))
    scale = (1 - beta2**step) ** 0.5
    denominator = new_variance.sqrt_().div_(scale).add_(group["eps"])
    weight.mul_(1 - group["lr"] * group["weight_decay"])
    weight.sub_(new_mean.mul_(group["lr"] / (1 - beta1**step)).div_(denominator))


def _rounded(values: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Return fp32 values rounded up or down to bf16, according to 16 random bits per value."""
    raised = values.view(torch.int32) + bits.to(torch.int32)
    return (raised & -0x10000).view(torch.float32).bfloat16()


def _key(seed: int, name: str, step: int) -> int:
    digest = hashlib.blake2b(f"{seed}/{step}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
