"""The collectives that the engine runs, with their gradients and their traps closed."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]


def group_named(name: str) -> dist.ProcessGroup:
    """Return the process group of a name; custom operators are handed names, as torch's own collectives are."""
    # torch's own functional collectives resolve names by this private function; a canary test stands beside it.
    group: dist.ProcessGroup = _resolve_process_group(name)  # type: ignore[arg-type]
    return group


def all_to_all_flat(
    send: torch.Tensor, send_sizes: list[int], receive_sizes: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """Send a block to each rank of the group and receive one from each; not differentiable.

    Every rank of the group must call; what one sends another is what that one expects.

    Args:
        send: Flat and contiguous: the blocks for rank 0, 1, ... end to end.
        send_sizes: Elements of each.
        receive_sizes: Elements of the block that each rank sends here.
        group: Process group to exchange over.

    Returns:
        The received blocks end to end.
    """
    assert len(send_sizes) == len(receive_sizes) == dist.get_world_size(group)
    # gloo silently writes wrong data into a non-contiguous output, and empty_like of a permuted tensor keeps the
    # permutation: allocate by shape, and hold both sides to it.
    receive = torch.empty(sum(receive_sizes), dtype=send.dtype, device=send.device)
    assert send.dim() == 1 and send.is_contiguous() and send.numel() == sum(send_sizes)
    if len(set(send_sizes)) == len(set(receive_sizes)) == 1:
        dist.all_to_all_single(receive, send, group=group)
    else:
        dist.all_to_all_single(receive, send, receive_sizes, send_sizes, group=group)
    return receive


class Circulation:
    """A tensor on its way round a ring: sent to the next rank while the one from the rank before comes in."""

    def __init__(self, send: torch.Tensor, group: dist.ProcessGroup, tag: int) -> None:
        """Start; every rank of the ring must, with tensors of the same shape.

        Args:
            send: Contiguous.
            group: The ring.
            tag: Keeps two circulations that are under way together apart.
        """
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        assert send.is_contiguous()
        self._sent = send  # Alive until it has left.
        self._received = torch.empty(send.shape, dtype=send.dtype, device=send.device)
        to, source = (dist.get_global_rank(group, (rank + shift) % size) for shift in (1, -1))
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, send, to, group, tag),
                dist.P2POp(dist.irecv, self._received, source, group, tag),
            ]
        )

    def wait(self) -> torch.Tensor:
        """Return what the rank before has sent."""
        for work in self._works:
            work.wait()
        return self._received


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
