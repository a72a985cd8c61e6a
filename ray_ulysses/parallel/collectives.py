"""The collectives that the engine runs, with their gradients and their traps closed."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class _AllToAll(torch.autograd.Function):
    """Equal-split all-to-all over dim 0; its own transpose, so the backward is the same exchange."""

    @staticmethod
    def forward(ctx: Any, send: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _exchange(send, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _exchange(grads[0].contiguous(), ctx.group), None


def _exchange(send: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    # gloo silently writes wrong data into a non-contiguous output, and empty_like of a permuted tensor keeps the
    # permutation: allocate by shape, and hold both sides to it.
    receive = torch.empty(send.shape, dtype=send.dtype, device=send.device)
    assert send.is_contiguous() and receive.is_contiguous()
    dist.all_to_all_single(receive, send, group=group)
    return receive


def all_to_all(send: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Send block ``i`` of dim 0 to rank ``i`` of the group and receive one from each; differentiable.

    Every rank of the group must call with the same shape.

    Args:
        send: Contiguous tensor whose dim 0 is the group's size.
        group: Process group to exchange over.

    Returns:
        A contiguous tensor of the same shape: block ``i`` is what rank ``i`` sent here.
    """
    assert send.shape[0] == dist.get_world_size(group)
    received: torch.Tensor = _AllToAll.apply(send, group)  # type: ignore[no-untyped-call]
    return received


class _GatherSequence(torch.autograd.Function):
    """Concatenate the ranks' slices along dim 1; the gradient is summed over ranks and sliced back."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        ctx.local_length = local.shape[1]
        size = dist.get_world_size(group)
        local = local.contiguous()
        parts = [torch.empty(local.shape, dtype=local.dtype, device=local.device) for _ in range(size)]
        dist.all_gather(parts, local, group=group)
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grads[0].contiguous().clone()
        # Every rank holds the whole gathered tensor, so the true gradient of a slice is the sum over ranks.
        dist.all_reduce(grad, group=ctx.group)
        start = dist.get_rank(ctx.group) * ctx.local_length
        return grad[:, start : start + ctx.local_length].contiguous(), None


def gather_sequence(local: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the whole sequence from every rank's equal slice along dim 1; differentiable.

    Every rank of the group must call. A loss computed from the result on every rank counts once a rank.
    """
    gathered: torch.Tensor = _GatherSequence.apply(local, group)  # type: ignore[no-untyped-call]
    return gathered
