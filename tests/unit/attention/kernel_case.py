"""Inputs for a kernel, and the results of attention by definition to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from ray_ulysses.attention.kernels.call import KernelCall, KernelEntry, Spans, Whole
from ray_ulysses.attention.kernels.reference import attention_by_definition

# Law 1's floor: fp32 against fp64, norm-wise per tensor.
BOUND = 1e-5
SCALE = 0.3
Tensor = torch.Tensor


def make_tensors(
    num_queries: int, num_keys: int, head_size: int, value_size: int, heads: tuple[int, int] = (4, 2), seed: int = 0
) -> list[Tensor]:
    """Return Q, K and V as strided parts of one payload, and an upstream gradient, in fp64."""
    generator = torch.Generator().manual_seed(seed)
    num_heads, num_kv = heads
    shapes = [(num_queries, num_heads, head_size), (num_keys, num_kv, head_size), (num_keys, num_kv, value_size)]
    wide = [torch.randn(t, 3 + h * d, generator=generator, dtype=torch.float64) for t, h, d in shapes]
    parts = [t[:, 3:].unflatten(1, (h, d)) for t, (_, h, d) in zip(wide, shapes, strict=True)]
    return [*parts, torch.randn(num_queries, num_heads, value_size, generator=generator, dtype=torch.float64)]


def make_call(tensors: Sequence[Tensor], **options: Any) -> KernelCall:
    q, k, v = (t.float() for t in tensors[:3])
    return KernelCall(query_THD=q, key_UKD=k, value_UKE=v, **{"spans": None, "scale": SCALE, "causal": True, **options})


def spans_of(lengths: Sequence[int]) -> Spans:
    borders = (0, *accumulate(lengths))
    return Spans(cu_seqlens=torch.tensor(borders, dtype=torch.int32), borders=borders, max_seqlen=max(lengths))


def wanted_of(tensors: Sequence[Tensor], visible: Tensor, softcap: float | None = None) -> list[Tensor]:
    """Return the output and the gradients of Q, K and V by definition."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors[:3]]
    out = attention_by_definition(*leaves, visible, SCALE, softcap)
    return [out.detach(), *torch.autograd.grad(out, leaves, tensors[3])]


def results_of(kernel: KernelEntry, call: KernelCall, upstream: Tensor) -> list[Tensor]:
    out, lse = kernel.forward(call)
    assert lse.shape == (call.query_THD.shape[1], call.query_THD.shape[0]) and lse.dtype == torch.float32
    return [out, *kernel.backward(call, Whole(upstream.float(), out, lse))]


def assert_close(ours: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    whole = max(float(tensor.norm()) for tensor in wanted)
    for name, a, b in zip(("output", "dQ", "dK", "dV"), ours, wanted, strict=True):
        assert a.shape == b.shape and a.dtype == torch.float32, name
        # Attention over one token has no gradient for Q and K: compare such a tensor with the largest norm.
        scale = float(b.norm()) if float(b.norm()) > 1e-7 * whole else whole
        assert float((a.double() - b).norm()) <= BOUND * scale, name
