"""The exchange for layers that carry state: slices of every channel for whole rows of this rank's channels, and back.

Both operators are one all-to-all, and each is the gradient of the other. They are operators of ``torch.library``, so
that a checkpointing policy can save their results. What is made of the channels of all ranks is added up by a third.

Legend: B rows, L tokens of a slice, S = L * U tokens of a row, U ranks of the group, C channels of one rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ray_ulysses.parallel.collectives import BlockExchange, group_named


def gather_channels(slice_BLUC: torch.Tensor, group: str) -> torch.Tensor:
    """Exchange a slice of the channels of every rank for whole rows of this rank's channels; differentiable.

    Every rank of the group must call.

    Args:
        slice_BLUC: This rank's slice, with the channels of rank ``u`` at ``[:, :, u]``.
        group: Name of the process group; empty for a single rank.

    Returns:
        ``[B, S, C]``, contiguous.
    """
    if not group:
        return slice_BLUC.flatten(1, 2)
    rows: torch.Tensor = torch.ops.ray_ulysses.gather_channels(slice_BLUC, group)
    return rows


def scatter_channels(rows_BSC: torch.Tensor, group: str) -> torch.Tensor:
    """Exchange whole rows of this rank's channels for its slice of the channels of every rank; differentiable.

    The inverse of :func:`gather_channels`. Every rank of the group must call.

    Returns:
        ``[B, L, U, C]``, contiguous.
    """
    if not group:
        return rows_BSC.unsqueeze(2)
    slices: torch.Tensor = torch.ops.ray_ulysses.scatter_channels(rows_BSC, group)
    return slices


def sum_over_ranks(part: torch.Tensor, group: str) -> torch.Tensor:
    """Add up what each rank has made of its channels; differentiable. One all-reduce, and one in the backward pass.

    Every rank of the group must call. Each rank goes on with the sum for its own channels, so that its gradient is a
    part as well: that of a rank's summand is the sum of them all.

    Returns:
        The sum, in the dtype of the summands.
    """
    if not group:
        return part
    total: torch.Tensor = torch.ops.ray_ulysses.sum_over_ranks(part, group)
    return total


def _exchanged(payload_UBLC: torch.Tensor, group: str) -> torch.Tensor:
    """Send block ``u`` to rank ``u``; return the blocks of all ranks, ``[U, B, L, C]``."""
    process_group = group_named(group)
    received_UBLC = torch.empty_like(payload_UBLC)
    exchange = BlockExchange(payload_UBLC.unbind(), received_UBLC.unbind(), process_group)
    received_UBLC[process_group.rank()].copy_(payload_UBLC[process_group.rank()])
    exchange.wait()
    return received_UBLC


@torch.library.custom_op("ray_ulysses::gather_channels", mutates_args=(), schema="(Tensor slices, str group) -> Tensor")
def _gather(slice_BLUC: torch.Tensor, group: str) -> torch.Tensor:
    # [B, L, U, C] -> [U, B, L, C]
    received_UBLC = _exchanged(slice_BLUC.permute(2, 0, 1, 3).contiguous(), group)
    # [U, B, L, C] -> [B, U * L, C]; flatten would return a view for a single row, which is fine: it is a new tensor.
    return received_UBLC.transpose(0, 1).flatten(1, 2)


@_gather.register_fake
def _gather_shape(slice_BLUC: torch.Tensor, group: str) -> torch.Tensor:
    rows, tokens, ranks, width = slice_BLUC.shape
    return slice_BLUC.new_empty(rows, tokens * ranks, width)


@torch.library.custom_op("ray_ulysses::scatter_channels", mutates_args=(), schema="(Tensor rows, str group) -> Tensor")
def _scatter(rows_BSC: torch.Tensor, group: str) -> torch.Tensor:
    ranks = group_named(group).size()
    # [B, U * L, C] -> [U, B, L, C]
    received_UBLC = _exchanged(rows_BSC.unflatten(1, (ranks, -1)).transpose(0, 1).contiguous(), group)
    return received_UBLC.permute(1, 2, 0, 3).contiguous()


@_scatter.register_fake
def _scatter_shape(rows_BSC: torch.Tensor, group: str) -> torch.Tensor:
    rows, tokens, width = rows_BSC.shape
    ranks = group_named(group).size()
    return rows_BSC.new_empty(rows, tokens // ranks, ranks, width)


@torch.library.custom_op("ray_ulysses::sum_over_ranks", mutates_args=(), schema="(Tensor part, str group) -> Tensor")
def _sum(part: torch.Tensor, group: str) -> torch.Tensor:
    total = part.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group_named(group))
    return total


@_sum.register_fake
def _sum_shape(part: torch.Tensor, group: str) -> torch.Tensor:
    return part.new_empty(part.shape)


def _keep_group(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.group = inputs[1]


def _gather_gradient(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
    return torch.ops.ray_ulysses.scatter_channels(grad, ctx.group), None


def _scatter_gradient(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
    return torch.ops.ray_ulysses.gather_channels(grad, ctx.group), None


def _sum_gradient(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
    return torch.ops.ray_ulysses.sum_over_ranks(grad, ctx.group), None


_gather.register_autograd(_gather_gradient, setup_context=_keep_group)
_scatter.register_autograd(_scatter_gradient, setup_context=_keep_group)
_sum.register_autograd(_sum_gradient, setup_context=_keep_group)
