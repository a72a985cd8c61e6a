"""Torch's own flash kernel, all documents at once: the operators below ``torch.nn.attention.varlen``.

``varlen_attn`` hands out a log-sum-exp but takes none in its backward, and in torch 2.11 it has no fewer KV heads than
query heads; the operators have both. Read in torch 2.11.0 and 2.13.0 (``native_functions.yaml``,
``_meta_registrations.py``, ``nn/attention/varlen.py``). Legend: see ``call.py``.
"""

from __future__ import annotations

from typing import Any

import torch

from ray_ulysses.attention.kernels.call import Demand, Gradients, KernelCall, KernelEntry
from ray_ulysses.attention.kernels.flash import (
    compute_capability,
    fitted,
    half_precision_refusal,
    padded_head_size,
    window_of,
)


class _Varlen:
    """``aten::_flash_attention_forward`` and its backward, over all stretches in one call."""

    def forward(self, call: KernelCall) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = _inputs(call)
        causal, options = _options(call)
        out, lse, *_ = torch.ops.aten._flash_attention_forward(q, k, v, *_extents(call), 0.0, causal, False, **options)
        if call.spans is None:
            # [1, T, H, W] and [1, H, T]
            out, lse = out[0], lse[0]
        return out[..., : call.value_UKE.shape[2]].contiguous(), lse.contiguous()

    def backward(
        self,
        call: KernelCall,
        grad_out_THE: torch.Tensor,
        out_THE: torch.Tensor,
        lse_HT: torch.Tensor,
        into: Gradients | None = None,
    ) -> Gradients:
        q, k, v = _inputs(call)
        causal, options = _options(call)
        upstream, out = (fitted(t, q.shape[-1]) for t in (grad_out_THE, out_THE))
        if call.spans is None:
            upstream, out, lse_HT = upstream.unsqueeze(0), out.unsqueeze(0), lse_HT.unsqueeze(0)
        # The state of a dropout that is not there, shaped as varlen_attn's own backward shapes it.
        rng_state = torch.zeros(2, dtype=torch.uint64, device=q.device)
        unused = torch.empty(0, device=q.device)
        grads = torch.ops.aten._flash_attention_backward(
            upstream, q, k, v, out, lse_HT, *_extents(call), 0.0, causal, rng_state, unused, **options
        )
        dq, dk, dv = (grad[0] for grad in grads) if call.spans is None else grads
        head_size = call.query_THD.shape[2]
        return dq[..., :head_size], dk[..., :head_size], dv[..., : call.value_UKE.shape[2]]


def _inputs(call: KernelCall) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    width = padded_head_size(call.query_THD.shape[2], call.value_UKE.shape[2])
    q, k, v = (fitted(t, width) for t in (call.query_THD, call.key_UKD, call.value_UKE))
    # Without tables the operator takes the dense path, which wants a batch: [T, H, W] -> [1, T, H, W]
    return (q, k, v) if call.spans is not None else (q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0))


def _extents(call: KernelCall) -> tuple[torch.Tensor | None, torch.Tensor | None, int, int]:
    if call.spans is None:
        return None, None, call.query_THD.shape[0], call.key_UKD.shape[0]
    return call.spans.cu_seqlens, call.spans.cu_seqlens, call.spans.max_seqlen, call.spans.max_seqlen


def _options(call: KernelCall) -> tuple[bool, dict[str, Any]]:
    """Return ``is_causal`` and the keywords, as ``varlen_attn`` sets them: a causal window is (left, 0), not causal."""
    left, right = window_of(call)
    return (left, right) == (-1, 0), {"scale": call.scale, "window_size_left": left, "window_size_right": right}


def _refuses(demand: Demand) -> str | None:
    if demand.has_softcap:
        # The kernel has it, but both operators set it to 0 (aten/src/ATen/native/transformers/cuda).
        return "it has no soft-capping"
    capability = compute_capability()
    if capability is not None and capability[0] < 8:
        return f"it needs compute capability 8.0, and the GPU has {capability[0]}.{capability[1]}"
    return half_precision_refusal(demand)


VARLEN = KernelEntry(
    name="varlen",
    needs="a CUDA device",
    # ROCm's build has other kernels behind the same operators, which nobody here has tried.
    runs_on=lambda device_type: device_type == "cuda" and torch.version.cuda is not None,
    refuses=_refuses,
    kernel=_Varlen(),
)
"""In every CUDA build of torch 2.11 and later."""
