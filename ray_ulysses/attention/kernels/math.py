"""Attention in plain matrix products, a chunk of queries at a time: runs everywhere and does everything.

It is what is left where no fused kernel can do what a layer asks for. Scores are kept in fp32 (fp64 for fp64), a chunk
at a time, so that memory grows with the keys and not with their square. Legend: see ``call.py``; G = H / K query heads
a KV head, t and u queries and keys of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ray_ulysses.attention.kernels.call import Gradients, KernelCall, KernelEntry

_CHUNK_SCORES = 2**24
"""Scores of a chunk over all heads: 64 MiB in fp32, a few times over."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Chunk:
    query: slice
    key: slice
    hidden_tu: torch.Tensor | None


class _Math:
    """Scores, softmax and products by hand, with their derivatives."""

    def forward(self, call: KernelCall) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, heads, value_size = *call.query_THD.shape[:2], call.value_UKE.shape[2]
        out_THE = call.query_THD.new_empty(tokens, heads, value_size)
        lse_HT = torch.empty(heads, tokens, dtype=_precision(call), device=out_THE.device)
        for chunk in _chunks(call):
            scores_KGtu, _ = _scores(call, chunk)
            lse_KGt = scores_KGtu.logsumexp(dim=-1)
            weights_KGtu = (scores_KGtu - lse_KGt.unsqueeze(-1)).exp_()
            value_uKE = call.value_UKE[chunk.key].to(weights_KGtu.dtype)
            out_tKGE = torch.einsum("kgtu,uke->tkge", weights_KGtu, value_uKE)
            out_THE[chunk.query] = out_tKGE.flatten(1, 2).to(out_THE.dtype)
            lse_HT[:, chunk.query] = lse_KGt.flatten(0, 1)
        return out_THE, lse_HT

    def backward(
        self,
        call: KernelCall,
        grad_out_THE: torch.Tensor,
        out_THE: torch.Tensor,
        lse_HT: torch.Tensor,
        into: Gradients | None = None,
    ) -> Gradients:
        precision, num_kv = _precision(call), call.key_UKD.shape[1]
        grads = [torch.zeros(t.shape, dtype=precision, device=t.device) for t in _tensors(call)]
        for chunk in _chunks(call):
            scores_KGtu, slope_KGtu = _scores(call, chunk)
            lse_KGt = lse_HT[:, chunk.query].unflatten(0, (num_kv, -1))
            weights_KGtu = (scores_KGtu - lse_KGt.unsqueeze(-1)).exp_()
            upstream_tKGE, out_tKGE = (
                t[chunk.query].to(precision).unflatten(1, (num_kv, -1)) for t in (grad_out_THE, out_THE)
            )
            query_tKGD, key_uKD, value_uKE = _parts(call, chunk)
            grads[2][chunk.key] += torch.einsum("kgtu,tkge->uke", weights_KGtu, upstream_tKGE)
            delta_KGt = (upstream_tKGE * out_tKGE).sum(dim=-1).permute(1, 2, 0)
            weight_grads_KGtu = torch.einsum("tkge,uke->kgtu", upstream_tKGE, value_uKE)
            score_grads_KGtu = weights_KGtu.mul_(weight_grads_KGtu.sub_(delta_KGt.unsqueeze(-1)))
            if slope_KGtu is not None:
                score_grads_KGtu = score_grads_KGtu.mul_(slope_KGtu)
            score_grads_KGtu = score_grads_KGtu.mul_(call.scale)
            grads[0][chunk.query] = torch.einsum("kgtu,ukd->tkgd", score_grads_KGtu, key_uKD).flatten(1, 2)
            grads[1][chunk.key] += torch.einsum("kgtu,tkgd->ukd", score_grads_KGtu, query_tKGD)
        dq, dk, dv = (grad.to(t.dtype) for grad, t in zip(grads, _tensors(call), strict=True))
        return dq, dk, dv


def _tensors(call: KernelCall) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return call.query_THD, call.key_UKD, call.value_UKE


def _precision(call: KernelCall) -> torch.dtype:
    return torch.float64 if call.query_THD.dtype == torch.float64 else torch.float32


def _chunks(call: KernelCall) -> Iterator[_Chunk]:
    device = call.query_THD.device
    for query, key in call.stretches():
        num_queries, num_keys = query.stop - query.start, key.stop - key.start
        shift = num_keys - num_queries
        size = max(1, _CHUNK_SCORES // (call.query_THD.shape[1] * num_keys))
        for begin in range(0, num_queries, size):
            end = min(begin + size, num_queries)
            low = 0 if call.left is None else max(0, begin + shift - call.left)
            high = min(num_keys, end + shift) if call.causal else num_keys
            query_at = torch.arange(begin, end, device=device).unsqueeze(1) + shift
            key_at = torch.arange(low, high, device=device).unsqueeze(0)
            hidden_tu = key_at > query_at if call.causal else None
            if call.left is not None:
                early = key_at < query_at - call.left
                hidden_tu = early if hidden_tu is None else hidden_tu | early
            yield _Chunk(
                query=slice(query.start + begin, query.start + end),
                key=slice(key.start + low, key.start + high),
                hidden_tu=hidden_tu,
            )


def _parts(call: KernelCall, chunk: _Chunk) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    precision, num_kv = _precision(call), call.key_UKD.shape[1]
    query_tKGD = call.query_THD[chunk.query].to(precision).unflatten(1, (num_kv, -1))
    return query_tKGD, call.key_UKD[chunk.key].to(precision), call.value_UKE[chunk.key].to(precision)


def _scores(call: KernelCall, chunk: _Chunk) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return scaled, capped and masked scores and, with a cap ``c``, its slope ``1 - tanh(score / c) ** 2``."""
    query_tKGD, key_uKD, _ = _parts(call, chunk)
    scores_KGtu = torch.einsum("tkgd,ukd->kgtu", query_tKGD, key_uKD).mul_(call.scale)
    slope_KGtu = None
    if call.softcap is not None:
        capped = scores_KGtu.div_(call.softcap).tanh_()
        slope_KGtu = 1 - capped.square()
        scores_KGtu = capped.mul(call.softcap)
    if chunk.hidden_tu is not None:
        scores_KGtu.masked_fill_(chunk.hidden_tu, float("-inf"))
    return scores_KGtu, slope_KGtu


MATH = KernelEntry(
    name="math",
    needs="nothing",
    runs_on=lambda device_type: True,
    refuses=lambda demand: None,
    kernel=_Math(),
)
"""The one that always runs."""
