"""Collectives on the mesh's process groups: block exchange, ring circulation, and a differentiable gather."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]


def group_named(name: str) -> dist.ProcessGroup:
    """Return the process group with a given name. Custom operators accept only group names as arguments."""
    # This private function is used by torch's functional collectives. A test checks that it exists.
    group: dist.ProcessGroup = _resolve_process_group(name)  # type: ignore[arg-type]
    return group


class BlockExchange:
    """An all-to-all in progress that exchanges one block with every other rank of a group; not differentiable.

    The exchange is a batch of sends and receives, like NCCL's own all-to-all. A rank's own block is not copied, so the
    caller can process that block while the other blocks are in flight.
    """

    def __init__(
        self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor], group: dist.ProcessGroup
    ) -> None:
        """Start the exchange. All ranks of ``group`` must create this object, with matching block sizes.

        Args:
            sent: One contiguous block per destination rank, which must not be modified before `wait` returns. This
                rank's own block and empty blocks are not sent.
            received: One contiguous output block per source rank. This rank's own block is not written.
            group: Process group for the exchange.
        """
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        assert len(sent) == len(received) == size
        # gloo silently accesses wrong memory if a tensor is not contiguous.
        assert all(block.is_contiguous() for block in (*sent, *received))
        operations = []
        for shift in range(1, size):
            to, source = (rank + shift) % size, (rank - shift) % size
            for function, block, peer in ((dist.isend, sent[to], to), (dist.irecv, received[source], source)):
                if block.numel():
                    peer = dist.get_global_rank(group, peer)
                    operations.append(dist.P2POp(function, block, peer, group))
        self._sent = sent  # Kept alive until it is sent.
        self._works = dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> None:
        """Wait until all blocks have been sent and received. Repeated calls return immediately."""
        for work in self._works:
            work.wait()
        self._works, self._sent = [], ()


class Circulation:
    """One step of a ring exchange: sends a tensor to the next rank and receives the previous rank's tensor."""

    def __init__(self, send: torch.Tensor, group: dist.ProcessGroup, tag: int) -> None:
        """Start the exchange. All ranks of the ring must create this object, with tensors of the same shape."""
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        assert send.is_contiguous()
        self._sent = send  # Kept alive until it is sent.
        self._received = torch.empty(send.shape, dtype=send.dtype, device=send.device)
        to, source = (dist.get_global_rank(group, (rank + shift) % size) for shift in (1, -1))
        self._works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, send, to, group, tag), dist.P2POp(dist.irecv, self._received, source, group, tag)]
        )

    def wait(self) -> torch.Tensor:
        """Wait for the exchange to finish, and return the previous rank's tensor."""
        for work in self._works:
            work.wait()
        return self._received


class _GatherSequence(torch.autograd.Function):
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
        # Every rank uses the gathered tensor, so a slice's gradient is the sum over all ranks.
        dist.all_reduce(grad, group=ctx.group)
        start = dist.get_rank(ctx.group) * ctx.local_length
        return grad[:, start : start + ctx.local_length].contiguous(), None


def gather_sequence(local: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Gather equal slices along dim 1 into the complete sequence; differentiable.

    All ranks of ``group`` must call this function. The backward sums gradients over ranks, so a loss that every rank
    computes from the result contributes once per rank.
    """
    gathered: torch.Tensor = _GatherSequence.apply(local, group)  # type: ignore[no-untyped-call]
    return gathered
