"""Attention with plain matrix products, for all devices and options. It is the fallback if no fused kernel is suitable.

Scores are computed in fp32 (in fp64 for fp64 inputs), one block of queries at a time, so memory is linear in the number
of keys. Legend: see ``call.py``; G = H / K query heads per KV head, t and u queries and keys of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from ray_ulysses.attention.kernels.call import Block, Gradients, KernelCall, KernelEntry, Whole

_BLOCK_SCORES = 2**24
"""Scores per block over all heads. Several tensors of this size (64 MiB in fp32) exist at the same time."""


def _forward(call: KernelCall) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, heads, value_size = *call.query_THD.shape[:2], call.value_UKE.shape[2]
    out_THE = call.query_THD.new_empty(tokens, heads, value_size)
    lse_HT = torch.empty(heads, tokens, dtype=_precision(call), device=out_THE.device)
    for block in _blocks(call):
        scores_KGtu, _ = _scores(call, block)
        lse_KGt = scores_KGtu.logsumexp(dim=-1)
        weights_KGtu = (scores_KGtu - lse_KGt.unsqueeze(-1)).exp_()
        value_uKE = call.value_UKE[block.key].to(weights_KGtu.dtype)
        out_tKGE = torch.einsum("kgtu,uke->tkge", weights_KGtu, value_uKE)
        out_THE[block.query] = out_tKGE.flatten(1, 2).to(out_THE.dtype)
        lse_HT[:, block.query] = lse_KGt.flatten(0, 1)
    return out_THE, lse_HT


def _backward(call: KernelCall, whole: Whole, into: Callable[[], Gradients] | None = None) -> Gradients:
    precision, num_kv = _precision(call), call.key_UKD.shape[1]
    grads = [torch.zeros(t.shape, dtype=precision, device=t.device) for t in call.inputs]
    for block in _blocks(call):
        scores_KGtu, slope_KGtu = _scores(call, block)
        lse_KGt = whole.lse_HT[:, block.query].unflatten(0, (num_kv, -1))
        weights_KGtu = (scores_KGtu - lse_KGt.unsqueeze(-1)).exp_()
        upstream_tKGE, out_tKGE = (
            t[block.query].to(precision).unflatten(1, (num_kv, -1)) for t in (whole.grad_out_THE, whole.out_THE)
        )
        query_tKGD, key_uKD, value_uKE = _parts(call, block)
        grads[2][block.key] += torch.einsum("kgtu,tkge->uke", weights_KGtu, upstream_tKGE)
        delta_KGt = (upstream_tKGE * out_tKGE).sum(dim=-1).permute(1, 2, 0)
        weight_grads_KGtu = torch.einsum("tkge,uke->kgtu", upstream_tKGE, value_uKE)
        score_grads_KGtu = weights_KGtu.mul_(weight_grads_KGtu.sub_(delta_KGt.unsqueeze(-1)))
        if slope_KGtu is not None:
            score_grads_KGtu = score_grads_KGtu.mul_(slope_KGtu)
        score_grads_KGtu = score_grads_KGtu.mul_(call.scale)
        grads[0][block.query] = torch.einsum("kgtu,ukd->tkgd", score_grads_KGtu, key_uKD).flatten(1, 2)
        grads[1][block.key] += torch.einsum("kgtu,tkgd->ukd", score_grads_KGtu, query_tKGD)
    dq, dk, dv = (grad.to(t.dtype) for grad, t in zip(grads, call.inputs, strict=True))
    return dq, dk, dv


def _precision(call: KernelCall) -> torch.dtype:
    return torch.float64 if call.query_THD.dtype == torch.float64 else torch.float32


def _blocks(call: KernelCall) -> Iterator[Block]:
    for query, key in call.each_span():
        size = max(1, _BLOCK_SCORES // (call.query_THD.shape[1] * (key.stop - key.start)))
        yield from call.blocks(query, key, size)


def _parts(call: KernelCall, block: Block) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    precision, num_kv = _precision(call), call.key_UKD.shape[1]
    query_tKGD = call.query_THD[block.query].to(precision).unflatten(1, (num_kv, -1))
    return query_tKGD, call.key_UKD[block.key].to(precision), call.value_UKE[block.key].to(precision)


def _scores(call: KernelCall, block: Block) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return scaled, capped and masked scores, and the derivative ``1 - tanh(score / c) ** 2`` of the cap, if any."""
    query_tKGD, key_uKD, _ = _parts(call, block)
    scores_KGtu = torch.einsum("tkgd,ukd->kgtu", query_tKGD, key_uKD).mul_(call.scale)
    slope_KGtu = None
    if call.softcap is not None:
        capped = scores_KGtu.div_(call.softcap).tanh_()
        slope_KGtu = 1 - capped.square()
        scores_KGtu = capped.mul(call.softcap)
    if block.hidden_tu is not None:
        scores_KGtu.masked_fill_(block.hidden_tu, float("-inf"))
    return scores_KGtu, slope_KGtu


MATH = KernelEntry(
    name="math",
    needs="nothing",
    runs_on=lambda device_type: True,
    refuses=lambda demand: None,
    forward=_forward,
    backward=_backward,
)
