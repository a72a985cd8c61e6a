"""Attention by definition, softmax(QKᵀ·scale + mask)V, with S x S scores in memory: the reference for all kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def attention_by_definition(
    query_THD: torch.Tensor,
    key_UKD: torch.Tensor,
    value_UKE: torch.Tensor,
    visible_TU: torch.Tensor,
    scale: float,
    softcap: float | None = None,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the attention output ``[T, H, E]``, differentiable by autograd.

    Args:
        query_THD: Queries.
        key_UKD: Keys. Each KV head is shared by ``H / K`` consecutive query heads.
        value_UKE: Values.
        visible_TU: Boolean mask, true where a query sees a key.
        scale: Factor on the scores.
        softcap: Cap ``c`` in ``c * tanh(score / c)``.
        sinks_H: Attention sinks: one additional softmax score per head, without a value.
    """
    copies = query_THD.shape[1] // key_UKD.shape[1]
    key_UHD, value_UHE = (t.repeat_interleave(copies, dim=1) for t in (key_UKD, value_UKE))
    scores_HTU = torch.einsum("thd,uhd->htu", query_THD, key_UHD) * scale
    if softcap is not None:
        scores_HTU = softcap * torch.tanh(scores_HTU / softcap)
    scores_HTU = scores_HTU.masked_fill(~visible_TU, float("-inf"))
    if sinks_H is not None:
        column_HT1 = sinks_H.to(scores_HTU.dtype)[:, None, None].expand(-1, scores_HTU.shape[1], 1)
        scores_HTU = torch.cat([scores_HTU, column_HT1], dim=-1)
    weights_HTU = scores_HTU.softmax(dim=-1)[..., : key_UKD.shape[0]]
    return torch.einsum("htu,uhe->the", weights_HTU, value_UHE)


def visible_tokens(
    lengths: Sequence[int],
    num_tokens: int,
    window: int | None = None,
    device: torch.device | str = "cpu",
    *,
    causal: bool = True,
) -> torch.Tensor:
    """Return a row's boolean mask ``[S, S]``, within each document. Padding is treated as one more document.

    Args:
        lengths: Lengths of the row's documents in tokens.
        num_tokens: Length of the row in tokens.
        window: Number of tokens that each token sees, including itself; in a bidirectional mask, on either side.
        device: Device of the mask.
        causal: Whether a token sees no later token.
    """
    visible = torch.zeros(num_tokens, num_tokens, dtype=torch.bool, device=device)
    start = 0
    for length in (*lengths, num_tokens - sum(lengths)):
        inside = torch.ones(length, length, dtype=torch.bool, device=device)
        if window is not None:
            inside = inside.triu(1 - window).tril(window - 1)
        if causal:
            inside = inside.tril()
        visible[start : start + length, start : start + length] = inside
        start += length
    return visible
