"""PyTorch's built-in flash kernel, with one call for all documents.

The kernel calls the operators that implement ``torch.nn.attention.varlen`` directly: ``varlen_attn`` does not accept a
log-sum-exp in its backward, and in torch 2.11 does not support grouped queries. Arguments follow torch 2.11.0 and
2.13.0 (``native_functions.yaml``, ``_meta_registrations.py``, ``nn/attention/varlen.py``). Legend: see ``call.py``; W
padded head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ray_ulysses.attention.kernels.call import Demand, Gradients, KernelCall, KernelEntry, Whole
from ray_ulysses.attention.kernels.flash import ampere_refusal, fitted, padded_head_size, window_of


def _forward(call: KernelCall) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v = _inputs(call)
    causal, options = _options(call)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(q, k, v, *_extents(call), 0.0, causal, False, **options)
    if call.spans is None:
        # [1, T, H, W] and [1, H, T]
        out, lse = out[0], lse[0]
    return out[..., : call.value_UKE.shape[2]].contiguous(), lse.contiguous()


def _backward(call: KernelCall, whole: Whole, into: Callable[[], Gradients] | None = None) -> Gradients:
    q, k, v = _inputs(call)
    causal, options = _options(call)
    upstream, out = (fitted(t, q.shape[-1]) for t in (whole.grad_out_THE, whole.out_THE))
    lse = whole.lse_HT
    if call.spans is None:
        upstream, out, lse = upstream.unsqueeze(0), out.unsqueeze(0), lse.unsqueeze(0)
    # The operator requires a random state even without dropout; the shape is from varlen_attn's backward.
    rng_state = torch.zeros(2, dtype=torch.uint64, device=q.device)
    unused = torch.empty(0, device=q.device)
    grads = torch.ops.aten._flash_attention_backward(
        upstream, q, k, v, out, lse, *_extents(call), 0.0, causal, rng_state, unused, **options
    )
    dq, dk, dv = (grad[0] for grad in grads) if call.spans is None else grads
    return call.trimmed(dq, dk, dv)


def _inputs(call: KernelCall) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    width = padded_head_size(call.query_THD.shape[2], call.value_UKE.shape[2])
    q, k, v = (fitted(t, width) for t in call.inputs)
    # Without cu_seqlens, the operator requires a batch dim: [T, H, W] -> [1, T, H, W]
    return (q, k, v) if call.spans is not None else (q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0))


def _extents(call: KernelCall) -> tuple[torch.Tensor | None, torch.Tensor | None, int, int]:
    if call.spans is None:
        return None, None, call.query_THD.shape[0], call.key_UKD.shape[0]
    return call.spans.cu_seqlens, call.spans.cu_seqlens, call.spans.max_seqlen, call.spans.max_seqlen


def _options(call: KernelCall) -> tuple[bool, dict[str, Any]]:
    """Return ``is_causal`` and keyword arguments, as in ``varlen_attn``: (left, 0) and False for causal windows."""
    left, right = window_of(call)
    return (left, right) == (-1, 0), {"scale": call.scale, "window_size_left": left, "window_size_right": right}


def _refuses(demand: Demand) -> str | None:
    if demand.has_softcap:
        # The kernel supports soft-capping, but both operators pass 0 (aten/src/ATen/native/transformers/cuda).
        return "it does not support soft-capping"
    return ampere_refusal(demand)


VARLEN = KernelEntry(
    name="varlen",
    needs="a CUDA device",
    # ROCm builds run other, untested kernels behind the same operators.
    runs_on=lambda device_type: device_type == "cuda" and torch.version.cuda is not None,
    refuses=_refuses,
    forward=_forward,
    backward=_backward,
)
