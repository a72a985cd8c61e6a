"""FlashAttention 4 (CuTe DSL) as a candidate for the table of kernels, called below autograd. Not yet tested on a GPU.

``torch.nn.attention.activate_flash_attention_impl("FA4")`` of torch 2.13 unpacks two results of ``_flash_attn_fwd``, of
which flash-attn-4 4.0.0b36 returns five, so it is called directly.

Legend: see ``ray_ulysses/attention/kernels/call.py``.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from ray_ulysses.attention.kernels.call import Demand, KernelCall, KernelEntry, Whole
from ray_ulysses.attention.kernels.flash import (
    compute_capability,
    fitted,
    half_precision_refusal,
    padded_head_size,
    window_of,
)


def _arguments(call: KernelCall) -> dict[str, Any]:
    left, _ = window_of(call)
    width = padded_head_size(call.query_THD.shape[2], call.value_UKE.shape[2])
    q, k, v = (fitted(tensor, width) for tensor in call.inputs)
    given: dict[str, Any] = {
        "softmax_scale": call.scale,
        "causal": call.causal and left == -1,
        "softcap": call.softcap or None,
        "window_size_left": None if left == -1 else left,
        "window_size_right": 0 if call.causal and left != -1 else None,
    }
    if call.spans is None:
        q, k, v = (tensor.unsqueeze(0) for tensor in (q, k, v))
    else:
        cu_seqlens, longest = call.spans.cu_seqlens, call.spans.max_seqlen
        given |= {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
        given |= {"max_seqlen_q": longest, "max_seqlen_k": longest}
    return {"q": q, "k": k, "v": v, **given}


def _forward(call: KernelCall) -> tuple[torch.Tensor, torch.Tensor]:
    from flash_attn.cute.interface import _flash_attn_fwd

    out, lse, *_ = _flash_attn_fwd(**_arguments(call), return_lse=True)
    if call.spans is None:
        out, lse = out[0], lse[0]
    return out[..., : call.value_UKE.shape[2]].contiguous(), lse.contiguous()


def _backward(call: KernelCall, whole: Whole, into: Any = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from flash_attn.cute.interface import _flash_attn_bwd

    given = _arguments(call)
    width = given["q"].shape[-1]
    dout, out = (fitted(tensor, width) for tensor in (whole.grad_out_THE, whole.out_THE))
    lse = whole.lse_HT
    if call.spans is None:
        dout, out, lse = dout.unsqueeze(0), out.unsqueeze(0), lse.unsqueeze(0)
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    dq, dk, dv = _flash_attn_bwd(**given, out=out, dout=dout, lse=lse, deterministic=is_deterministic)
    if call.spans is None:
        dq, dk, dv = dq[0], dk[0], dv[0]
    return call.trimmed(dq, dk, dv)


def _refusal(demand: Demand) -> str | None:
    capability = compute_capability()
    if capability is not None and capability[0] not in (9, 10):
        return "it is for Hopper and Blackwell"
    return half_precision_refusal(demand)


def _is_installed(device_type: str) -> bool:
    find = importlib.util.find_spec
    return device_type == "cuda" and find("flash_attn") is not None and find("flash_attn.cute") is not None


FLASH_4 = KernelEntry(
    name="flash_attn_4",
    needs="a Hopper GPU and flash-attn-4",
    runs_on=_is_installed,
    refuses=_refusal,
    forward=_forward,
    backward=_backward,
)
