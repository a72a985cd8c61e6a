"""The Ulysses exchange: sequence slices of all heads become whole sequences of some heads, and back.

One all-to-all carries Q, K and V as a flat payload, a second one the output (DeepSpeed-Ulysses,
https://arxiv.org/abs/2309.14509, sends three and one). The backward of each is the same exchange.

Legend: B rows, L tokens of a slice, S = L * sp tokens of a row, H query heads, K KV heads, D head size of Q and K,
E head size of V, P ranks of the group, h and k heads a rank after the exchange, F features a rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ray_ulysses.parallel.collectives import all_to_all

if TYPE_CHECKING:
    import torch.distributed as dist


def kv_copies(num_heads: int, num_kv_heads: int, ulysses_size: int) -> int:
    """Return how often each KV head is repeated before the exchange.

    1 where KV heads divide over the ranks; ``ulysses_size / num_kv_heads`` where whole groups of ranks share one
    KV head; else one copy a query head, which is exact at a higher cost.
    """
    if num_kv_heads % ulysses_size == 0:
        return 1
    if ulysses_size % num_kv_heads == 0:
        return ulysses_size // num_kv_heads
    return num_heads // num_kv_heads


def gather_heads(
    query_BHLD: torch.Tensor, key_BKLD: torch.Tensor, value_BKLE: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Exchange slices of every head for whole sequences of this rank's heads, in one all-to-all.

    Every rank of the group must call.

    Returns:
        ``[B, S, h, D]``, ``[B, S, k, D]`` and ``[B, S, k, E]``: strided views of one buffer.
    """
    ranks = group.size()
    copies = kv_copies(query_BHLD.shape[1], key_BKLD.shape[1], ranks)
    if copies > 1:
        # The copies' gradients are summed by repeat_interleave's own backward.
        key_BKLD = key_BKLD.repeat_interleave(copies, dim=1)
        value_BKLE = value_BKLE.repeat_interleave(copies, dim=1)
    parts = [_for_ranks(part, ranks) for part in (query_BHLD, key_BKLD, value_BKLE)]
    sent_PBLF = torch.cat(parts, dim=-1)
    received_PBLF = all_to_all(sent_PBLF, group)
    num_rows, local_tokens = received_PBLF.shape[1:3]
    # [P, B, L, F] -> [B, P, L, F] -> [B, S, F]; a view for one row, since then P and L are adjacent.
    received_BSF = received_PBLF.transpose(0, 1).reshape(num_rows, ranks * local_tokens, -1)
    widths = [part.shape[-1] for part in parts]
    head_sizes = [query_BHLD.shape[-1], key_BKLD.shape[-1], value_BKLE.shape[-1]]
    q, k, v = (
        part.unflatten(-1, (-1, head_size))
        for part, head_size in zip(received_BSF.split(widths, dim=-1), head_sizes, strict=True)
    )
    return q, k, v


def scatter_heads(output_BShE: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Exchange whole sequences of this rank's heads for its slice of every head, in one all-to-all.

    Every rank of the group must call.

    Args:
        output_BShE: ``[B, S, h, E]``.
        group: Process group to exchange over.

    Returns:
        ``[B, L, H, E]``, contiguous.
    """
    ranks = group.size()
    # [B, S, h, E] -> [B, P, L, h, E] -> [P, B, L, h, E]
    sent = output_BShE.unflatten(1, (ranks, -1)).transpose(0, 1).contiguous()
    received_PBLhE = all_to_all(sent, group)
    # [P, B, L, h, E] -> [B, L, P, h, E] -> [B, L, H, E]
    return received_PBLhE.permute(1, 2, 0, 3, 4).flatten(2, 3)


def _for_ranks(heads_BHLD: torch.Tensor, ranks: int) -> torch.Tensor:
    # [B, H, L, D] -> [B, P, h, L, D] -> [P, B, L, h, D] -> [P, B, L, h * D]
    split: torch.Tensor = heads_BHLD.unflatten(1, (ranks, -1)).permute(1, 0, 3, 2, 4)
    return split.flatten(3, 4)
