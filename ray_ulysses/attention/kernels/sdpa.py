"""Torch's fused CPU attention, called once per document, so no mask is needed to separate documents.

The kernel calls the operator that implements ``scaled_dot_product_attention`` directly, because the operator returns
the log-sum-exp and its backward accepts a different one. Legend: see ``call.py``; W padded head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from ray_ulysses.attention.kernels.call import Block, Demand, Gradients, KernelCall, KernelEntry, Whole

_HALF = (torch.bfloat16, torch.float16)
_WINDOW_BLOCK_TOKENS = 1024
"""Queries per block with a sliding window. Limits the mask to 1024 x (1024 + window) instead of T x U."""


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
        # The operator would sum the KV gradients over query heads in half precision.
        query, key, value = call.query_THD.float(), _float_by_head(call.key_UKD), _float_by_head(call.value_UKE)
        same = replace(call, query_THD=query, key_UKD=key, value_UKE=value)
        return _backward(same, Whole(whole.grad_out_THE.float(), whole.out_THE.float(), whole.lse_HT))
    blocks = list(_blocks(call))
    if _is_whole(call, blocks):
        return _backward_block(call, blocks[0], whole)
    grad_q = torch.empty_like(call.query_THD, memory_format=torch.contiguous_format)
    # With a window, blocks of the same span share keys, so their gradients are summed.
    make = torch.zeros_like if call.has_window else torch.empty_like
    grad_k, grad_v = (make(t, memory_format=torch.contiguous_format) for t in (call.key_UKD, call.value_UKE))
    for block in blocks:
        grad_q[block.query], dk, dv = call.trimmed(*_backward_block(call, block, whole))
        if not call.has_window:
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
    """Return whether a single unmasked block with D = E covers the call, so that its result need not be copied."""
    return len(blocks) == 1 and blocks[0].hidden_tu is None and call.query_THD.shape[2] == call.value_UKE.shape[2]


def _blocks(call: KernelCall) -> Iterator[Block]:
    for query, key in call.each_span():
        num_queries, num_keys = query.stop - query.start, key.stop - key.start
        hides_early = call.left is not None and call.left < num_keys - 1
        if hides_early or (call.right is not None and call.right < num_queries - 1):
            yield from call.blocks(query, key, _WINDOW_BLOCK_TOKENS)
        else:
            # The operator aligns its causal mask to the top left, which is KernelCall's mask only in a square.
            assert not call.causal or num_queries == num_keys
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
        # The operator reads keys and values once per block of queries: 2% faster if each head is contiguous.
        _widened(call.key_UKD[block.key], width).contiguous(),
        _widened(call.value_UKE[block.key], width).contiguous(),
    )


def _float_by_head(heads_UKD: torch.Tensor) -> torch.Tensor:
    """Convert to fp32 ``[U, K, D]`` with memory layout ``[K, U, D]``, so that `_inputs` need not copy a full row."""
    return heads_UKD.transpose(0, 1).to(torch.float32, memory_format=torch.contiguous_format).transpose(0, 1)


def _widened(heads_THD: torch.Tensor, width: int) -> torch.Tensor:
    """Return ``[1, H, T, width]``, padded with zeros, because the operator requires D = E."""
    if heads_THD.shape[2] < width:
        heads_THD = torch.nn.functional.pad(heads_THD, (0, width - heads_THD.shape[2]))
    return heads_THD.transpose(0, 1).unsqueeze(0)


def _refuses(demand: Demand) -> str | None:
    if demand.has_softcap:
        return "it does not support soft-capping"
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
