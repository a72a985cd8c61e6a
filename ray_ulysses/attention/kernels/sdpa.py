"""Torch's fused CPU attention, one call per document, so that no mask is needed to keep documents apart.

It calls the operator below ``scaled_dot_product_attention``, which returns the log-sum-exp and takes one in its
backward. Legend: see ``call.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from ray_ulysses.attention.kernels.call import Block, Demand, Gradients, KernelCall, KernelEntry, Whole

_HALF = (torch.bfloat16, torch.float16)
_WINDOW_BLOCK_TOKENS = 1024
"""Queries of a masked block of a sliding window: bounds the mask at 1024 x (1024 + window) instead of T x U."""


def _forward(call: KernelCall) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, heads, value_size = *call.query_THD.shape[:2], call.value_UKE.shape[2]
    blocks = list(_blocks(call))
    if _is_whole(call, blocks):
        return _forward_block(call, blocks[0])
    out_THE = call.query_THD.new_empty(tokens, heads, value_size)
    precision = torch.float64 if out_THE.dtype == torch.float64 else torch.float32
    lse_HT = torch.empty(heads, tokens, dtype=precision, device=out_THE.device)
    for block in blocks:
        out_tHW, lse_HT[:, block.query] = _forward_block(call, block)
        out_THE[block.query] = out_tHW[..., :value_size]
    return out_THE, lse_HT


def _backward(call: KernelCall, whole: Whole, into: Callable[[], Gradients] | None = None) -> Gradients:
    if call.query_THD.dtype in _HALF:
        # The operator sums the gradients of query heads that share a KV head in the inputs' dtype.
        query, key, value = call.query_THD.float(), _float_by_head(call.key_UKD), _float_by_head(call.value_UKE)
        same = replace(call, query_THD=query, key_UKD=key, value_UKE=value)
        return _backward(same, Whole(whole.grad_out_THE.float(), whole.out_THE.float(), whole.lse_HT))
    blocks = list(_blocks(call))
    if _is_whole(call, blocks):
        return _backward_block(call, blocks[0], whole)
    grad_q = torch.empty_like(call.query_THD, memory_format=torch.contiguous_format)
    # Blocks of one span share keys, so their gradients are added up.
    make = torch.zeros_like if call.left is not None else torch.empty_like
    grad_k, grad_v = (make(t, memory_format=torch.contiguous_format) for t in (call.key_UKD, call.value_UKE))
    for block in blocks:
        grad_q[block.query], dk, dv = call.trimmed(*_backward_block(call, block, whole))
        if call.left is None:
            grad_k[block.key], grad_v[block.key] = dk, dv
        else:
            grad_k[block.key] += dk
            grad_v[block.key] += dv
    return grad_q, grad_k, grad_v


def _forward_block(call: KernelCall, block: Block) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v = _inputs(call, block)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, _is_causal(call, block), attn_mask=_mask(block, q), scale=call.scale
    )
    # [1, H, t, W] -> [t, H, W]
    return out[0].transpose(0, 1), lse[0]


def _backward_block(call: KernelCall, block: Block, whole: Whole) -> Gradients:
    q, k, v = _inputs(call, block)
    upstream, out = (_widened(t[block.query], q.shape[3]) for t in (whole.grad_out_THE, whole.out_THE))
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        upstream, q, k, v, out, whole.lse_HT[:, block.query].unsqueeze(0).contiguous(), 0.0, _is_causal(call, block),
        attn_mask=_mask(block, q), scale=call.scale,
    )  # fmt: skip
    # [1, H, t, W] -> [t, H, W]
    dq, dk, dv = (grad[0].transpose(0, 1) for grad in grads)
    return dq, dk, dv


def _is_whole(call: KernelCall, blocks: list[Block]) -> bool:
    """Return whether one unmasked block of one head size covers the call, so that no result is copied or trimmed."""
    return len(blocks) == 1 and blocks[0].hidden_tu is None and call.query_THD.shape[2] == call.value_UKE.shape[2]


def _blocks(call: KernelCall) -> Iterator[Block]:
    for query, key in call.each_span():
        num_keys = key.stop - key.start
        if call.left is not None and call.left < num_keys - 1:
            yield from call.blocks(query, key, _WINDOW_BLOCK_TOKENS)
        else:
            # The operator aligns its causal mask to the top left, which is the same for a square.
            assert not call.causal or query.stop - query.start == num_keys
            yield Block(query, key, None)


def _is_causal(call: KernelCall, block: Block) -> bool:
    return call.causal and block.hidden_tu is None


def _mask(block: Block, like: torch.Tensor) -> torch.Tensor | None:
    hidden = block.hidden_tu
    return None if hidden is None else like.new_zeros(hidden.shape).masked_fill_(hidden, float("-inf"))


def _inputs(call: KernelCall, block: Block) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    width = max(call.query_THD.shape[2], call.value_UKE.shape[2])
    return (
        _widened(call.query_THD[block.query], width),
        # The operator reads them once per block of queries, which is 2% faster if each head's tokens are contiguous.
        _widened(call.key_UKD[block.key], width).contiguous(),
        _widened(call.value_UKE[block.key], width).contiguous(),
    )


def _float_by_head(heads_UKD: torch.Tensor) -> torch.Tensor:
    """Return ``[U, K, D]`` in fp32 as a view of ``[K, U, D]``, which `_inputs` does not copy again for a whole row."""
    return heads_UKD.transpose(0, 1).to(torch.float32, memory_format=torch.contiguous_format).transpose(0, 1)


def _widened(heads_THD: torch.Tensor, width: int) -> torch.Tensor:
    """Return ``[1, H, T, width]``: the operator needs one head size, and padding with zeros changes no sum."""
    if heads_THD.shape[2] < width:
        heads_THD = torch.nn.functional.pad(heads_THD, (0, width - heads_THD.shape[2]))
    return heads_THD.transpose(0, 1).unsqueeze(0)


def _refuses(demand: Demand) -> str | None:
    if demand.has_softcap:
        return "it has no soft-capping"
    if demand.dtype not in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        return f"it does not support {demand.dtype}"
    return None


SDPA = KernelEntry(
    name="sdpa",
    needs="a CPU",
    runs_on=lambda device_type: device_type == "cpu",
    refuses=_refuses,
    forward=_forward,
    backward=_backward,
)
