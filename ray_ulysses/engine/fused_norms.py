"""Runs RMS norms in PyTorch's fused kernel, instead of Transformers' separate operations.

Transformers' norms convert their input to fp32, and read and write it in each of six operations. On a GPU, PyTorch's
``rms_norm`` reads the input once, computes in fp32 and rounds once, where Transformers rounds the normalized values and
their products. Not yet tested on a GPU.
"""

from __future__ import annotations

from types import MethodType
from typing import Any, cast

import torch
from torch import nn

from ray_ulysses.engine.model_parts import own_forward, unhooked
from ray_ulysses.engine.partition_view import shape_of
from ray_ulysses.engine.tiled_mlp import find_norms

_EPS_NAMES = ("variance_epsilon", "eps", "epsilon")


def fuse_norms(model: nn.Module) -> list[nn.Module]:
    """Replace the forward of a model's RMS norms. Call this function before `tile_mlps`, which skips these norms.

    On a CPU, ``rms_norm`` consists of separate operations whose fp32 results are as large as a complete row.

    Returns:
        The norms that are fused. Other norms, such as Gemma's, which multiply by ``1 + weight``, are left unchanged.
    """
    fused = []
    for norm in find_norms(model):
        eps = _eps_of_rms_norm(norm)
        if eps is not None:
            norm._fused_eps = eps  # type: ignore[assignment]
            norm.forward = MethodType(_forward, norm)
            fused.append(norm)
    return fused


def _eps_of_rms_norm(norm: nn.Module) -> float | None:
    """Return the epsilon of a module that computes ``weight * x / sqrt(mean(x ** 2) + eps)``, and None for others.

    The module's own forward is compared with ``rms_norm`` on random vectors, which are so small that epsilon matters.
    """
    shapes = {name: shape_of(one) for name, one in norm.named_parameters()}
    eps = next((getattr(norm, name) for name in _EPS_NAMES if hasattr(norm, name)), None)
    shape = shapes.get("weight", ())
    if len(shapes) != 1 or len(shape) != 1 or not isinstance(eps, float):
        return None
    random = torch.Generator().manual_seed(0)
    weight, x_2H = (torch.randn(size, generator=random, device="cpu") for size in (shape, (2, *shape)))
    x_2H *= eps**0.5
    bare = unhooked(norm)
    bare._parameters = {"weight": nn.Parameter(weight, requires_grad=False)}
    try:
        result = own_forward(norm)(bare, x_2H)
    except Exception:
        # The forward has been replaced, or requires more than one input.
        return None
    fused_2H = nn.functional.rms_norm(x_2H, shape, weight, eps)
    return eps if isinstance(result, torch.Tensor) and torch.allclose(result, fused_2H, atol=1e-6) else None


def _forward(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    hidden = args[0] if len(args) == 1 and not kwargs else None
    if hidden is None or hidden.dtype != self.weight.dtype:
        # The kernel requires one dtype.
        return cast("torch.Tensor", type(self).forward(self, *args, **kwargs))
    return nn.functional.rms_norm(hidden, self.weight.shape, self.weight, self._fused_eps)
