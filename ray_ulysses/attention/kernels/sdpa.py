"""Torch's fused CPU attention, once a document, so that no mask is needed to keep documents apart.

The op below ``scaled_dot_product_attention`` is called, since it hands out the log-sum-exp and takes one in its
backward. Legend: see ``call.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from ray_ulysses.attention.kernels.call import Demand, Gradients, KernelCall, KernelEntry

_HALF = (torch.bfloat16, torch.float16)
_WINDOW_CHUNK_TOKENS = 1024
"""Queries a masked step of a sliding window: bounds the mask at 1024 x (1024 + window) instead of T x U."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Piece:
    """A part of a stretch that one call of the op does; the mask is 0 where a query sees a key and -inf elsewhere."""

    query: slice
    key: slice
    causal: bool
    mask_TU: torch.Tensor | None


class _Sdpa:
    """``aten::_scaled_dot_product_flash_attention_for_cpu`` a document, masked pieces of it where there is a window."""

    def forward(self, call: KernelCall) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, heads, value_size = *call.query_THD.shape[:2], call.value_UKE.shape[2]
        pieces = list(_pieces(call))
        if _is_whole(call, pieces):
            q, k, v = _inputs(call, pieces[0])
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q, k, v, 0.0, pieces[0].causal, scale=call.scale
            )
            return out[0].transpose(0, 1), lse[0]
        out_THE = call.query_THD.new_empty(tokens, heads, value_size)
        precision = torch.float64 if out_THE.dtype == torch.float64 else torch.float32
        lse_HT = torch.empty(heads, tokens, dtype=precision, device=out_THE.device)
        for piece in pieces:
            q, k, v = _inputs(call, piece)
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q, k, v, 0.0, piece.causal, attn_mask=piece.mask_TU, scale=call.scale
            )
            out_THE[piece.query] = out[0].transpose(0, 1)[..., :value_size]
            lse_HT[:, piece.query] = lse[0]
        return out_THE, lse_HT

    def backward(
        self,
        call: KernelCall,
        grad_out_THE: torch.Tensor,
        out_THE: torch.Tensor,
        lse_HT: torch.Tensor,
        into: Gradients | None = None,
    ) -> Gradients:
        if call.query_THD.dtype in _HALF:
            # The op adds the gradients of the query heads that share a KV head in the inputs' dtype.
            inputs = {name: getattr(call, name).float() for name in ("query_THD", "key_UKD", "value_UKE")}
            return self.backward(replace(call, **inputs), grad_out_THE.float(), out_THE.float(), lse_HT)
        pieces = list(_pieces(call))
        if _is_whole(call, pieces):
            q, k, v = _inputs(call, pieces[0])
            upstream, out = (_widened(t, q.shape[3]) for t in (grad_out_THE, out_THE))
            parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                upstream, q, k, v, out, lse_HT.unsqueeze(0), 0.0, pieces[0].causal, scale=call.scale
            )
            # [1, H, T, D] -> [T, H, D]
            dq, dk, dv = (part[0].transpose(0, 1) for part in parts)
            return dq, dk, dv
        grad_q = torch.empty_like(call.query_THD, memory_format=torch.contiguous_format)
        # Pieces of one stretch share keys, so their gradients are added up.
        make = torch.zeros_like if call.left is not None else torch.empty_like
        grad_k, grad_v = (make(t, memory_format=torch.contiguous_format) for t in (call.key_UKD, call.value_UKE))
        for piece in pieces:
            q, k, v = _inputs(call, piece)
            upstream, out = (_widened(t[piece.query], q.shape[3]) for t in (grad_out_THE, out_THE))
            parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                upstream, q, k, v, out, lse_HT[:, piece.query].unsqueeze(0).contiguous(), 0.0, piece.causal,
                attn_mask=piece.mask_TU, scale=call.scale,
            )  # fmt: skip
            # [1, H, t, D] -> [t, H, D]
            dq, dk, dv = (part[0].transpose(0, 1) for part in parts)
            grad_q[piece.query] = dq[..., : call.query_THD.shape[2]]
            dk, dv = dk[..., : call.key_UKD.shape[2]], dv[..., : call.value_UKE.shape[2]]
            if call.left is None:
                grad_k[piece.key], grad_v[piece.key] = dk, dv
            else:
                grad_k[piece.key] += dk
                grad_v[piece.key] += dv
        return grad_q, grad_k, grad_v


def _is_whole(call: KernelCall, pieces: list[_Piece]) -> bool:
    """Tell whether one unmasked piece of one head size is all there is, so that nothing is put together or cut."""
    return len(pieces) == 1 and pieces[0].mask_TU is None and call.query_THD.shape[2] == call.value_UKE.shape[2]


def _pieces(call: KernelCall) -> Iterator[_Piece]:
    for query, key in call.stretches():
        num_queries, num_keys = query.stop - query.start, key.stop - key.start
        if call.left is None or call.left >= num_keys - 1:
            # The op aligns its causal mask to the top left: the same for a square, and only squares are causal.
            assert not call.causal or num_queries == num_keys
            yield _Piece(query=query, key=key, causal=call.causal, mask_TU=None)
            continue
        shift = num_keys - num_queries
        for begin in range(0, num_queries, _WINDOW_CHUNK_TOKENS):
            end = min(begin + _WINDOW_CHUNK_TOKENS, num_queries)
            low = max(0, begin + shift - call.left)
            high = min(num_keys, end + shift) if call.causal else num_keys
            mask_TU = call.query_THD.new_full((end - begin, high - low), float("-inf"))
            mask_TU.masked_fill_(_visible(call, range(begin, end), range(low, high), shift), 0.0)
            yield _Piece(
                query=slice(query.start + begin, query.start + end),
                key=slice(key.start + low, key.start + high),
                causal=False,
                mask_TU=mask_TU,
            )


def _visible(call: KernelCall, queries: range, keys: range, shift: int) -> torch.Tensor:
    assert call.left is not None
    query_at = torch.arange(queries.start, queries.stop).unsqueeze(1) + shift
    key_at = torch.arange(keys.start, keys.stop).unsqueeze(0)
    visible = key_at >= query_at - call.left
    return visible & (key_at <= query_at) if call.causal else visible


def _inputs(call: KernelCall, piece: _Piece) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    width = max(call.query_THD.shape[2], call.value_UKE.shape[2])
    return (
        _widened(call.query_THD[piece.query], width),
        _widened(call.key_UKD[piece.key], width),
        _widened(call.value_UKE[piece.key], width),
    )


def _widened(heads_THD: torch.Tensor, width: int) -> torch.Tensor:
    """Return ``[1, H, T, width]``: the op wants one head size, and zeros beyond the own one change no sum."""
    if heads_THD.shape[2] < width:
        heads_THD = torch.nn.functional.pad(heads_THD, (0, width - heads_THD.shape[2]))
    return heads_THD.transpose(0, 1).unsqueeze(0)


def _refuses(demand: Demand) -> str | None:
    if demand.has_softcap:
        return "it has no soft-capping"
    if demand.dtype not in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        return f"it has no {demand.dtype}"
    return None


SDPA = KernelEntry(
    name="sdpa",
    needs="a CPU",
    runs_on=lambda device_type: device_type == "cpu",
    refuses=_refuses,
    kernel=_Sdpa(),
)
"""The fastest on a CPU."""
