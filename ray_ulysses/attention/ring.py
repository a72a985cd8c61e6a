"""Ring attention of one layer: circulates keys and values, and merges partial results by log-sum-exp.

Implements Ring Attention (https://arxiv.org/abs/2310.01889) with zigzag sharding (see :mod:`.documents`). Without a
ring, attention takes a single step. Attention sinks are merged as an additional term of the softmax.

Legend: T tokens of this ring rank (rows concatenated), H query heads and K KV heads of this rank, D head size of Q and
K, E head size of V.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from ray_ulysses.attention.documents import Rectangle
from ray_ulysses.attention.kernels import KernelCall, KernelEntry, Spans, choose_kernel
from ray_ulysses.attention.kernels.call import Gradients, Whole, demand_of
from ray_ulysses.parallel.collectives import Circulation

_KEYS, _GRADIENTS = 0, 1
"""Tags of the ring's messages: one for keys and values, one for their gradients."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RingLayer:
    """A layer's attention settings, and this rank's document tables and heads."""

    kernel: str
    scale: float
    window: int | None
    """Number of tokens of its document that each token sees, including itself, or None for no limit; in bidirectional
    attention, on either side."""
    causal: bool
    softcap: float | None
    spans: Spans
    """Spans of this rank's tokens."""
    rectangles: tuple[Rectangle, ...]
    """Blocks of this rank's queries and other keys, for all ring steps."""
    calls: tuple[tuple[slice, slice], ...]
    """``(query heads, KV heads)`` of each kernel call."""
    ring: dist.ProcessGroup | None
    """Process group of the ring, or None if there is no ring."""


class _Tokens(NamedTuple):
    """The queries and keys of a kernel call. ``spans`` is set only for the call over this rank's own tokens."""

    query: slice
    key: slice
    left: int | None
    right: int | None
    spans: Spans | None


def attend(
    query_THD: torch.Tensor,
    key_TKD: torch.Tensor,
    value_TKE: torch.Tensor,
    sinks_H: torch.Tensor | None,
    layer: RingLayer,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the output ``[T, H, E]`` and the log-sum-exp ``[H, T]``, both contiguous; not differentiable.

    All ranks of the ring must call this function.
    """
    kernel = _kernel(query_THD, value_TKE, layer)
    if layer.ring is None and len(layer.calls) == 1:
        out_THE, lse_HT = kernel.forward(_call(query_THD, key_TKD, value_TKE, layer, _own(layer)))
    else:
        shape = (*query_THD.shape[:2], value_TKE.shape[2])
        precision = torch.promote_types(query_THD.dtype, torch.float32)
        out_THE = torch.empty(shape, dtype=precision, device=query_THD.device)
        lse_HT = torch.empty(shape[1], shape[0], dtype=precision, device=query_THD.device)
        for step, key, value in _circulate(key_TKD, value_TKE, layer.ring):
            for block in _blocks(layer, step):
                for heads, kv_heads in layer.calls:
                    call = _call(query_THD[:, heads], key[:, kv_heads], value[:, kv_heads], layer, block)
                    part = kernel.forward(call)
                    if block.spans is not None:
                        out_THE[:, heads], lse_HT[heads] = part
                    else:
                        _merge(out_THE[block.query, heads], lse_HT[heads, block.query], *part)
    if sinks_H is not None:
        # A sink adds to the softmax's denominator but has no value.
        whole_HT = torch.logaddexp(lse_HT, sinks_H.to(lse_HT.dtype).unsqueeze(1))
        out_THE = out_THE * (lse_HT - whole_HT).exp().transpose(0, 1).unsqueeze(-1)
        lse_HT = whole_HT
    return out_THE.to(query_THD.dtype).contiguous(), lse_HT.contiguous()


def attend_backward(
    grad_out_THE: torch.Tensor,
    query_THD: torch.Tensor,
    key_TKD: torch.Tensor,
    value_TKE: torch.Tensor,
    sinks_H: torch.Tensor | None,
    out_THE: torch.Tensor,
    lse_HT: torch.Tensor,
    layer: RingLayer,
    into: Callable[[], Gradients],
) -> torch.Tensor | None:
    """Write the gradients of queries, keys and values to the tensors from ``into``, and return the sinks' gradient.

    All ranks of the ring must call this function. ``into`` allocates the gradients at its first call and returns the
    same memory at later calls; the tensors may be strided views with a contiguous last dim. To save memory, the first
    call is made after the kernel has run, unless the kernel writes to the tensors directly.
    """
    kernel = _kernel(query_THD, value_TKE, layer)
    grad_sinks = None
    if sinks_H is not None:
        # d loss / d sink = - sum over tokens of the sink's weight times sum_E(grad_out * out).
        delta_TH = (grad_out_THE.to(lse_HT.dtype) * out_THE.to(lse_HT.dtype)).sum(dim=-1)
        weight_HT = (sinks_H.to(lse_HT.dtype).unsqueeze(1) - lse_HT).exp()
        grad_sinks = -(weight_HT * delta_TH.transpose(0, 1)).sum(dim=1).to(sinks_H.dtype)
    if layer.ring is None and len(layer.calls) == 1:
        call = _call(query_THD, key_TKD, value_TKE, layer, _own(layer))
        grads = kernel.backward(call, Whole(grad_out_THE, out_THE, lse_HT), into)
        _write(into(), grads)
        return grad_sinks
    precision = torch.promote_types(query_THD.dtype, torch.float32)
    grad_query = torch.zeros(query_THD.shape, dtype=precision, device=query_THD.device)
    incoming: Circulation | None = None
    grad_kv = torch.zeros(key_TKD.numel() + value_TKE.numel(), dtype=precision, device=query_THD.device)
    for step, key, value in _circulate(key_TKD, value_TKE, layer.ring):
        if step:
            grad_kv = torch.zeros_like(grad_kv)
        grad_key, grad_value = _unpacked(grad_kv, key_TKD, value_TKE)
        for block in _blocks(layer, step):
            for heads, kv_heads in layer.calls:
                call = _call(query_THD[:, heads], key[:, kv_heads], value[:, kv_heads], layer, block)
                upstream, out = (t[block.query, heads].contiguous() for t in (grad_out_THE, out_THE))
                dq, dk, dv = kernel.backward(call, Whole(upstream, out, lse_HT[heads, block.query].contiguous()))
                grad_query[block.query, heads] += dq
                grad_key[block.key, kv_heads] += dk
                grad_value[block.key, kv_heads] += dv
        if layer.ring is not None:
            # The gradients of keys and values follow them around the ring, one step behind, and end at their owner.
            if incoming is not None:
                grad_kv += incoming.wait()
            incoming = Circulation(grad_kv, layer.ring, _GRADIENTS)
    if incoming is not None:
        grad_kv = incoming.wait()
    _write(into(), (grad_query, *_unpacked(grad_kv, key_TKD, value_TKE)))
    return grad_sinks


def _write(into: Gradients, grads: Gradients) -> None:
    for written, grad in zip(into, grads, strict=True):
        # If the kernel wrote to the given tensors, source and target are the same memory.
        if written.data_ptr() != grad.data_ptr():
            written.copy_(grad)


def _kernel(query_THD: torch.Tensor, value_TKE: torch.Tensor, layer: RingLayer) -> KernelEntry:
    sizes, has_window = (query_THD.shape[2], value_TKE.shape[2]), layer.window is not None
    demand = demand_of(query_THD, *sizes, has_window, layer.softcap is not None, layer.causal)
    return choose_kernel(layer.kernel, demand)[0]


def _own(layer: RingLayer) -> _Tokens:
    # A window at least as long as the longest span hides nothing.
    hides = layer.window is not None and layer.window < layer.spans.max_seqlen
    left = layer.window - 1 if layer.window is not None and hides else None
    return _Tokens(slice(None), slice(None), left, None if layer.causal else left, layer.spans)


def _blocks(layer: RingLayer, step: int) -> Iterator[_Tokens]:
    """Yield the kernel calls of a ring step. The first call of step 0 covers all of this rank's tokens."""
    if step == 0:
        yield _own(layer)
    for rectangle in layer.rectangles:
        if rectangle.step == step and not (layer.causal and rectangle.distance < 0):
            block = _trimmed(rectangle, layer.window)
            if block is not None:
                yield block


def _trimmed(rectangle: Rectangle, window: int | None) -> _Tokens | None:
    """Trim a rectangle to the queries and keys within the window's reach of each other; return None if none remain."""
    _, query_start, query_stop, key_start, key_stop, distance = rectangle
    if window is None:
        return _Tokens(slice(query_start, query_stop), slice(key_start, key_stop), None, None, None)
    if distance < 0:
        # All queries precede all keys, and query i sees key j if j - i - distance < window.
        skipped = max(0, 1 - window - distance)
        num_queries = query_stop - query_start - skipped
        num_keys = min(key_stop - key_start, num_queries + (distance + skipped) + window - 1)
        if num_keys <= 0 or num_queries <= 0:
            return None
        right = num_queries - num_keys + (distance + skipped) + window - 1
        return _Tokens(
            slice(query_start + skipped, query_stop),
            slice(key_start, key_start + num_keys),
            None,
            right if right < num_queries - 1 else None,
            None,
        )
    # All keys precede all queries, and query i sees key j if distance + i - j < window.
    skipped = max(0, distance - window + 1)
    num_keys = key_stop - key_start - skipped
    num_queries = min(query_stop - query_start, window + num_keys - (distance - skipped) - 1)
    if num_keys <= 0 or num_queries <= 0:
        return None
    left = num_keys - num_queries - (distance - skipped) + window - 1
    return _Tokens(
        slice(query_start, query_start + num_queries),
        slice(key_start + skipped, key_stop),
        left if left < num_keys - 1 else None,
        None,
        None,
    )


def _call(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: RingLayer, block: _Tokens) -> KernelCall:
    return KernelCall(
        query_THD=query[block.query],
        key_UKD=key[block.key],
        value_UKE=value[block.key],
        spans=block.spans,
        scale=layer.scale,
        causal=layer.causal and block.spans is not None,
        left=block.left,
        right=block.right,
        softcap=layer.softcap,
    )


def _merge(out_THE: torch.Tensor, lse_HT: torch.Tensor, part_THE: torch.Tensor, part_lse_HT: torch.Tensor) -> None:
    whole_HT = torch.logaddexp(lse_HT, part_lse_HT.to(lse_HT.dtype))
    kept, added = (
        (lse - whole_HT).exp().transpose(0, 1).unsqueeze(-1) for lse in (lse_HT, part_lse_HT.to(lse_HT.dtype))
    )
    out_THE.mul_(kept).add_(part_THE.to(out_THE.dtype) * added)
    lse_HT.copy_(whole_HT)


def _circulate(
    key_TKD: torch.Tensor, value_TKE: torch.Tensor, ring: dist.ProcessGroup | None
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Yield ``(step, keys, values)`` for each ring rank, starting with this rank. Prefetch the next tensors."""
    if ring is None:
        yield 0, key_TKD, value_TKE
        return
    held = torch.cat([key_TKD.flatten(), value_TKE.flatten()])
    for step in range(ring.size()):
        incoming = Circulation(held, ring, _KEYS) if step + 1 < ring.size() else None
        yield (step, *_unpacked(held, key_TKD, value_TKE))
        if incoming is not None:
            held = incoming.wait()


def _unpacked(flat: torch.Tensor, key_TKD: torch.Tensor, value_TKE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    key, value = flat.split([key_TKD.numel(), value_TKE.numel()])
    return key.view(key_TKD.shape), value.view(value_TKE.shape)
