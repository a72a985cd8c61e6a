"""The Ulysses exchange: switches between sequence slices with all heads and complete sequences with some heads.

One all-to-all sends Q, K and V as a flat payload, and a second one sends the output. DeepSpeed-Ulysses
(https://arxiv.org/abs/2309.14509) needs three and one. The backward of each is an all-to-all in the other direction.
The number of ranks need not divide the number of heads: each rank receives its query heads and the KV heads that those
query heads use (:mod:`ray_ulysses.parallel.layout`).

For recurrent layers, one all-to-all exchanges slices of all channels for complete rows of one rank's channels, and
another reverses this. Each is the gradient of the other. An all-reduce sums the ranks' results over their channels.

All exchanges are ``torch.library`` operators, so that a checkpointing policy can save their results.

Legend: B rows, L tokens of a slice, S = L * U tokens of a row (with a ring, of a ring rank's share of the row), H query
heads, K KV heads, D head size of Q and K, E head size of V, U ranks of the group, h and k heads of this rank,
F = h D + k (D + E) features of this rank, C channels of one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist

from ray_ulysses.errors import UserError
from ray_ulysses.parallel.collectives import BlockExchange, group_named
from ray_ulysses.parallel.layout import HeadPlan, RankHeads, assign_heads

HeadKind = Literal["query", "kv"]
QKV: tuple[HeadKind, ...] = ("query", "kv", "kv")
"""Kind of head that queries, keys and values have, in this order."""


def gather_heads(
    query_BHLD: torch.Tensor, key_BKLD: torch.Tensor, value_BKLE: torch.Tensor, group: str
) -> torch.Tensor:
    """Exchange slices of all heads for complete sequences of this rank's heads, in one all-to-all; differentiable.

    All ranks of ``group`` must call this function. The inputs may have any strides.

    Returns:
        The payload ``[U, B, L, F]``. Each token's features are its queries, keys and values, in head order.
    """
    payload: torch.Tensor = torch.ops.ray_ulysses.gather_heads(query_BHLD, key_BKLD, value_BKLE, group)
    return payload


def scatter_heads(out_BShE: torch.Tensor, num_heads: int, num_kv_heads: int, group: str) -> torch.Tensor:
    """Exchange complete sequences of this rank's heads for slices of all heads, in one all-to-all; differentiable.

    All ranks of ``group`` must call this function.

    Returns:
        A contiguous tensor ``[B, L, H, E]``.
    """
    out: torch.Tensor = torch.ops.ray_ulysses.scatter_heads(out_BShE, num_heads, num_kv_heads, group)
    return out


def send_heads(
    tensors_BHLD: Sequence[torch.Tensor], kinds: Sequence[HeadKind], plan: HeadPlan, group: dist.ProcessGroup
) -> torch.Tensor:
    """Send each rank its heads from this rank's slice, in one all-to-all; not differentiable.

    All ranks of ``group`` must call this function. ``tensors_BHLD`` have shape ``[B, H or K, L, any]`` and any strides.

    Returns:
        The payload ``[U, B, L, F]``. Use :func:`split_heads` to split it by tensor.
    """
    rank, (num_rows, _, tokens, _) = dist.get_rank(group), tensors_BHLD[0].shape
    widths = [sum(_widths(heads, kinds, tensors_BHLD)) for heads in plan.ranks]
    payload_UBLF = tensors_BHLD[0].new_empty(len(widths), num_rows, tokens, widths[rank])
    blocks = _blocks(payload_UBLF, [0 if to == rank else width for to, width in enumerate(widths)])

    def write(to: int, block_BLF: torch.Tensor) -> None:
        parts = split_heads(block_BLF, plan.ranks[to], kinds, _head_sizes(tensors_BHLD))
        for part_BLhD, kind, whole in zip(parts, kinds, tensors_BHLD, strict=True):
            # [B, h, L, D] -> [B, L, h, D]
            part_BLhD.copy_(whole[:, _own(plan.ranks[to], kind)].transpose(1, 2))

    for to, block_BLF in enumerate(blocks):
        if to != rank:
            write(to, block_BLF)
    exchange = BlockExchange(blocks, payload_UBLF.unbind(), group)
    write(rank, payload_UBLF[rank])
    exchange.wait()
    return payload_UBLF


def return_heads(
    payload_UBLF: torch.Tensor,
    into_BHLD: Sequence[torch.Tensor],
    kinds: Sequence[HeadKind],
    plan: HeadPlan,
    group: dist.ProcessGroup,
    written_kv: set[int] | None = None,
) -> None:
    """Send each rank its slice of this rank's heads, in one all-to-all; not differentiable.

    This is the inverse of :func:`send_heads`. All ranks of ``group`` must call this function.

    Args:
        payload_UBLF: Contiguous payload. Block ``u`` is the slice of rank ``u``.
        into_BHLD: Output tensors for this rank's slice of all heads; they may be uninitialized. If several ranks send
            the same KV head, the function stores the sum.
        kinds: Kind of head in each output tensor.
        plan: Assignment of heads to ranks.
        group: The Ulysses group.
        written_kv: KV heads that earlier calls for the same outputs have written; updated in place.
    """
    written_kv = set() if written_kv is None else written_kv
    rank, widths = dist.get_rank(group), [sum(_widths(heads, kinds, into_BHLD)) for heads in plan.ranks]
    blocks = _blocks(payload_UBLF, [0 if source == rank else width for source, width in enumerate(widths)])
    exchange = BlockExchange(payload_UBLF.unbind(), blocks, group)
    blocks[rank] = payload_UBLF[rank]
    # Write this rank's own block while the others are in flight. Sums of copies must be in rank order instead.
    others = [source for source in range(len(blocks)) if source != rank]
    for source in [rank, *others] if plan.kv_copies == 1 else range(len(blocks)):
        if source != rank:
            exchange.wait()
        _put_back(blocks[source], plan.ranks[source], into_BHLD, kinds, written_kv)
    exchange.wait()


def _blocks(payload_UBLF: torch.Tensor, widths: Sequence[int]) -> list[torch.Tensor]:
    num_rows, tokens = payload_UBLF.shape[1:3]
    sizes = [num_rows * tokens * width for width in widths]
    parts = payload_UBLF.new_empty(sum(sizes)).split(sizes)
    return [part.view(num_rows, tokens, width) for part, width in zip(parts, widths, strict=True)]


def _put_back(
    block_BLF: torch.Tensor,
    heads: RankHeads,
    into_BHLD: Sequence[torch.Tensor],
    kinds: Sequence[HeadKind],
    written_kv: set[int],
) -> None:
    parts = split_heads(block_BLF, heads, kinds, _head_sizes(into_BHLD))
    added = [head in written_kv for head in range(heads.first_kv, heads.stop_kv)]
    for part_BLhD, kind, whole in zip(parts, kinds, into_BHLD, strict=True):
        own, part = whole[:, _own(heads, kind)], part_BLhD.transpose(1, 2)
        if kind == "query" or not any(added):
            own.copy_(part)
            continue
        for head, is_added in enumerate(added):
            (own[:, head].add_ if is_added else own[:, head].copy_)(part[:, head])
    written_kv.update(range(heads.first_kv, heads.stop_kv))


def split_heads(
    features_F: torch.Tensor, heads: RankHeads, kinds: Sequence[HeadKind], head_sizes: Sequence[int]
) -> list[torch.Tensor]:
    """Split features ``[..., F]`` into views ``[..., heads, D]``, one per tensor passed to :func:`send_heads`."""
    counts = [heads.num_heads if kind == "query" else heads.num_kv_heads for kind in kinds]
    parts = features_F.split([count * size for count, size in zip(counts, head_sizes, strict=True)], dim=-1)
    return [part.unflatten(-1, (count, size)) for part, count, size in zip(parts, counts, head_sizes, strict=True)]


def tokens_first(payload_UBLF: torch.Tensor) -> torch.Tensor:
    """Return the payload as ``[T, F]`` with rows concatenated. With a single row, the result is a view."""
    return payload_UBLF.transpose(0, 1).flatten(0, 2)


def ranks_first(features_TF: torch.Tensor, ranks: int, num_rows: int) -> torch.Tensor:
    """Return the contiguous payload ``[U, B, L, F]``; the inverse of :func:`tokens_first`."""
    tokens = features_TF.shape[0] // (num_rows * ranks)
    return features_TF.view(num_rows, ranks, tokens, features_TF.shape[1]).transpose(0, 1).contiguous()


def _own(heads: RankHeads, kind: HeadKind) -> slice:
    return slice(heads.first, heads.stop) if kind == "query" else slice(heads.first_kv, heads.stop_kv)


def _head_sizes(tensors_BHLD: Sequence[torch.Tensor]) -> list[int]:
    return [tensor.shape[3] for tensor in tensors_BHLD]


def _widths(heads: RankHeads, kinds: Sequence[HeadKind], tensors_BHLD: Sequence[torch.Tensor]) -> list[int]:
    counts = (heads.num_heads if kind == "query" else heads.num_kv_heads for kind in kinds)
    return [count * size for count, size in zip(counts, _head_sizes(tensors_BHLD), strict=True)]


def gradient_buffers(
    like: torch.Tensor, plan: HeadPlan, num_rows: int, tokens: int, head_size: int, value_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Allocate the gradients of Q, K and V, ``[B, H or K, L, D or E]``.

    If several ranks have a copy of a KV head, their gradients are summed, so the buffers of K and V are at least fp32.
    """
    dtype = like.dtype if plan.kv_copies == 1 else torch.promote_types(like.dtype, torch.float32)
    # In the model's memory layout: [B, L, H, D] -> [B, H, L, D]
    query = like.new_empty(num_rows, tokens, plan.num_heads, head_size).transpose(1, 2)
    key, value = (
        like.new_empty(num_rows, tokens, plan.num_kv_heads, size, dtype=dtype).transpose(1, 2)
        for size in (head_size, value_size)
    )
    return query, key, value


def plan_of(num_heads: int, num_kv_heads: int, group: str) -> tuple[HeadPlan, RankHeads]:
    """Return the head plan for a named group, and this rank's heads. An empty name denotes a single rank."""
    if not group:
        plan = assign_heads(num_heads, num_kv_heads, 1)
        return plan, plan.ranks[0]
    process_group = group_named(group)
    plan = assign_heads(num_heads, num_kv_heads, process_group.size())
    return plan, plan.ranks[process_group.rank()]


@torch.library.custom_op(
    "ray_ulysses::gather_heads", mutates_args=(), schema="(Tensor query, Tensor key, Tensor value, str group) -> Tensor"
)
def _gather(query_BHLD: torch.Tensor, key_BKLD: torch.Tensor, value_BKLE: torch.Tensor, group: str) -> torch.Tensor:
    plan, _ = plan_of(query_BHLD.shape[1], key_BKLD.shape[1], group)
    return send_heads((query_BHLD, key_BKLD, value_BKLE), QKV, plan, group_named(group))


@_gather.register_fake
def _gather_shape(
    query_BHLD: torch.Tensor, key_BKLD: torch.Tensor, value_BKLE: torch.Tensor, group: str
) -> torch.Tensor:
    plan, mine = plan_of(query_BHLD.shape[1], key_BKLD.shape[1], group)
    width = sum(_widths(mine, QKV, (query_BHLD, key_BKLD, value_BKLE)))
    return query_BHLD.new_empty(len(plan.ranks), query_BHLD.shape[0], query_BHLD.shape[2], width)


@torch.library.custom_op(
    "ray_ulysses::gather_heads_backward",
    mutates_args=(),
    schema="(Tensor grad, int num_heads, int num_kv_heads, int head_size, int value_size, str group) "
    "-> (Tensor, Tensor, Tensor)",
)
def _gather_backward(
    grad_UBLF: torch.Tensor, num_heads: int, num_kv_heads: int, head_size: int, value_size: int, group: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    plan, _ = plan_of(num_heads, num_kv_heads, group)
    grads = gradient_buffers(grad_UBLF, plan, grad_UBLF.shape[1], grad_UBLF.shape[2], head_size, value_size)
    return_heads(grad_UBLF.contiguous(), grads, QKV, plan, group_named(group))
    grad_q, grad_k, grad_v = (grad.to(grad_UBLF.dtype) for grad in grads)
    return grad_q, grad_k, grad_v


@_gather_backward.register_fake
def _gather_backward_shape(
    grad_UBLF: torch.Tensor, num_heads: int, num_kv_heads: int, head_size: int, value_size: int, group: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    plan, _ = plan_of(num_heads, num_kv_heads, group)
    grads = gradient_buffers(grad_UBLF, plan, grad_UBLF.shape[1], grad_UBLF.shape[2], head_size, value_size)
    grad_q, grad_k, grad_v = (grad.to(grad_UBLF.dtype) for grad in grads)
    return grad_q, grad_k, grad_v


@torch.library.custom_op(
    "ray_ulysses::scatter_heads",
    mutates_args=(),
    schema="(Tensor out, int num_heads, int num_kv_heads, str group) -> Tensor",
)
def _scatter(out_BShE: torch.Tensor, num_heads: int, num_kv_heads: int, group: str) -> torch.Tensor:
    plan, _ = plan_of(num_heads, num_kv_heads, group)
    payload_UBLF = ranks_first(out_BShE.flatten(0, 1).flatten(1, 2), len(plan.ranks), out_BShE.shape[0])
    out_BLHE = out_BShE.new_empty(out_BShE.shape[0], payload_UBLF.shape[2], num_heads, out_BShE.shape[3])
    return_heads(payload_UBLF, [out_BLHE.transpose(1, 2)], ["query"], plan, group_named(group))
    return out_BLHE


@_scatter.register_fake
def _scatter_shape(out_BShE: torch.Tensor, num_heads: int, num_kv_heads: int, group: str) -> torch.Tensor:
    num_rows, ring_tokens, _, value_size = out_BShE.shape
    return out_BShE.new_empty(num_rows, ring_tokens // group_named(group).size(), num_heads, value_size)


@torch.library.custom_op(
    "ray_ulysses::scatter_heads_backward",
    mutates_args=(),
    schema="(Tensor grad, int num_kv_heads, str group) -> Tensor",
)
def _scatter_backward(grad_BLHE: torch.Tensor, num_kv_heads: int, group: str) -> torch.Tensor:
    num_rows, _, num_heads, value_size = grad_BLHE.shape
    plan, mine = plan_of(num_heads, num_kv_heads, group)
    payload_UBLF = send_heads([grad_BLHE.transpose(1, 2)], ["query"], plan, group_named(group))
    # [T, h * E] -> [B, S, h, E]
    return tokens_first(payload_UBLF).view(num_rows, -1, mine.num_heads, value_size)


@_scatter_backward.register_fake
def _scatter_backward_shape(grad_BLHE: torch.Tensor, num_kv_heads: int, group: str) -> torch.Tensor:
    num_rows, tokens, num_heads, value_size = grad_BLHE.shape
    plan, mine = plan_of(num_heads, num_kv_heads, group)
    return grad_BLHE.new_empty(num_rows, tokens * len(plan.ranks), mine.num_heads, value_size)


def _keep_gather(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    query, key, value, ctx.group = inputs
    ctx.sizes = (query.shape[1], key.shape[1], query.shape[3], value.shape[3])


def _gather_gradient(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return (*torch.ops.ray_ulysses.gather_heads_backward(grad, *ctx.sizes, ctx.group), None)


def _keep_scatter(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, _, ctx.num_kv_heads, ctx.group = inputs


def _scatter_gradient(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return torch.ops.ray_ulysses.scatter_heads_backward(grad, ctx.num_kv_heads, ctx.group), None, None, None


def refuse_second_order(ctx: Any, *grads: torch.Tensor) -> None:
    """Raise an error in a double backward, before any collective."""
    raise UserError(
        "Ulysses attention does not support second derivatives (create_graph=True); remove create_graph=True, or call "
        "remove_ulysses(model) and compute the second derivatives in one process with attn_implementation='eager'"
    )


_gather.register_autograd(_gather_gradient, setup_context=_keep_gather)
_scatter.register_autograd(_scatter_gradient, setup_context=_keep_scatter)
_gather_backward.register_autograd(refuse_second_order)
_scatter_backward.register_autograd(refuse_second_order)


def gather_channels(slice_BLUC: torch.Tensor, group: str) -> torch.Tensor:
    """Exchange a slice of all channels for complete rows of this rank's channels; differentiable.

    All ranks of ``group`` must call this function. An empty ``group`` denotes a single rank. ``slice_BLUC[:, :, u]``
    are the channels of rank ``u``.

    Returns:
        A contiguous tensor ``[B, S, C]``.
    """
    if not group:
        return slice_BLUC.flatten(1, 2)
    rows: torch.Tensor = torch.ops.ray_ulysses.gather_channels(slice_BLUC, group)
    return rows


def scatter_channels(rows_BSC: torch.Tensor, group: str) -> torch.Tensor:
    """Exchange complete rows of this rank's channels for a slice of all channels; differentiable.

    This is the inverse of :func:`gather_channels`. All ranks of ``group`` must call this function.

    Returns:
        A contiguous tensor ``[B, L, U, C]``.
    """
    if not group:
        return rows_BSC.unsqueeze(2)
    slices: torch.Tensor = torch.ops.ray_ulysses.scatter_channels(rows_BSC, group)
    return slices


def sum_over_ranks(part: torch.Tensor, group: str) -> torch.Tensor:
    """Sum ``part`` over the group with an all-reduce; differentiable.

    All ranks of ``group`` must call this function. Each rank uses the sum for its own channels only, so the backward
    sums the ranks' gradients with a second all-reduce.

    Returns:
        The sum, in the dtype of ``part``.
    """
    if not group:
        return part
    total: torch.Tensor = torch.ops.ray_ulysses.sum_over_ranks(part, group)
    return total


def _exchanged(payload_UBLC: torch.Tensor, group: str) -> torch.Tensor:
    process_group = group_named(group)
    received_UBLC = torch.empty_like(payload_UBLC)
    exchange = BlockExchange(payload_UBLC.unbind(), received_UBLC.unbind(), process_group)
    received_UBLC[process_group.rank()].copy_(payload_UBLC[process_group.rank()])
    exchange.wait()
    return received_UBLC


@torch.library.custom_op("ray_ulysses::gather_channels", mutates_args=(), schema="(Tensor slices, str group) -> Tensor")
def _gather_rows(slice_BLUC: torch.Tensor, group: str) -> torch.Tensor:
    # [B, L, U, C] -> [U, B, L, C]
    received_UBLC = _exchanged(slice_BLUC.permute(2, 0, 1, 3).contiguous(), group)
    # [U, B, L, C] -> [B, U * L, C]
    return received_UBLC.transpose(0, 1).flatten(1, 2)


@_gather_rows.register_fake
def _rows_shape(slice_BLUC: torch.Tensor, group: str) -> torch.Tensor:
    rows, tokens, ranks, width = slice_BLUC.shape
    return slice_BLUC.new_empty(rows, tokens * ranks, width)


@torch.library.custom_op("ray_ulysses::scatter_channels", mutates_args=(), schema="(Tensor rows, str group) -> Tensor")
def _scatter_rows(rows_BSC: torch.Tensor, group: str) -> torch.Tensor:
    ranks = group_named(group).size()
    # [B, U * L, C] -> [U, B, L, C]
    received_UBLC = _exchanged(rows_BSC.unflatten(1, (ranks, -1)).transpose(0, 1).contiguous(), group)
    return received_UBLC.permute(1, 2, 0, 3).contiguous()


@_scatter_rows.register_fake
def _slices_shape(rows_BSC: torch.Tensor, group: str) -> torch.Tensor:
    rows, tokens, width = rows_BSC.shape
    ranks = group_named(group).size()
    return rows_BSC.new_empty(rows, tokens // ranks, ranks, width)


@torch.library.custom_op("ray_ulysses::sum_over_ranks", mutates_args=(), schema="(Tensor part, str group) -> Tensor")
def _sum_up(part: torch.Tensor, group: str) -> torch.Tensor:
    total = part.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group_named(group))
    return total


@_sum_up.register_fake
def _sum_shape(part: torch.Tensor, group: str) -> torch.Tensor:
    return part.new_empty(part.shape)


def _keep_group(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.group = inputs[1]


def _rows_gradient(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
    return torch.ops.ray_ulysses.scatter_channels(grad, ctx.group), None


def _slices_gradient(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
    return torch.ops.ray_ulysses.gather_channels(grad, ctx.group), None


def _sum_gradient(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
    return torch.ops.ray_ulysses.sum_over_ranks(grad, ctx.group), None


_gather_rows.register_autograd(_rows_gradient, setup_context=_keep_group)
_scatter_rows.register_autograd(_slices_gradient, setup_context=_keep_group)
_sum_up.register_autograd(_sum_gradient, setup_context=_keep_group)
