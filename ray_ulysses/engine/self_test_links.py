"""The self-test of the links: one exchange per process group, timed on the live groups."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ray_ulysses.parallel.collectives import BlockExchange, Circulation
from ray_ulysses.parallel.gpu_environment import nccl_log, transports

if TYPE_CHECKING:
    from ray_ulysses.clock import Clock
    from ray_ulysses.parallel.mesh import Role, SequenceMesh

_GPU_BYTES, _CPU_BYTES = 256 << 20, 1 << 20
"""Bytes of each rank: on a GPU about those of a layer of 8B parameters, so that latency weighs as much as in a step."""
_TIMES = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkTime:
    """The time of one exchange, the same on every rank."""

    role: Role
    """The groups that exchanged, all at once."""
    ranks: int
    sent_bytes: int
    """Bytes that each rank sends."""
    seconds: float
    """The shortest of a few times on the slowest rank."""
    slowest_rank: int
    transports: tuple[str, ...] = ()
    """What NCCL sends by from that rank, as far as its log tells."""

    @property
    def bandwidth(self) -> float:
        """Bytes per second that the slowest rank sends."""
        return self.sent_bytes / self.seconds

    def __str__(self) -> str:
        by = f" by {', '.join(self.transports)}" if self.transports else ""
        return f"{self.role} of {self.ranks} ranks {self.bandwidth / 1e9:.3g} GB/s{by}"


def time_links(mesh: SequenceMesh, device: torch.device, clock: Clock) -> tuple[LinkTime, ...]:
    """Time an exchange as a step makes it on each kind of group; every rank of the world must call.

    Heads are exchanged over ``ulysses``, a block is passed on over ``ring``, and weights are gathered over ``shard``.
    """
    num_bytes = _GPU_BYTES if device.type == "cuda" else _CPU_BYTES
    kinds: list[tuple[Role, int, Callable[[dist.ProcessGroup, int], Callable[[], object]]]] = [
        ("ulysses", mesh.ulysses_size, lambda group, ranks: _exchange(group, ranks, num_bytes, device)),
        ("ring", mesh.ring_size, lambda group, ranks: _circulation(group, num_bytes, device)),
        ("shard", mesh.world_size, lambda group, ranks: _gathering(group, ranks, num_bytes, device)),
    ]
    found = []
    for role, ranks, prepare in kinds:
        if ranks == 1:
            continue
        log_before = nccl_log(os.environ)
        seconds = _seconds(prepare(mesh.group(role), ranks), device, clock)
        log = nccl_log(os.environ)
        # Connections are made at their first use, unless another exchange has used them.
        own = transports(log[len(log_before) :]) or transports(log)
        every: list[tuple[float, tuple[str, ...]]] = [(0.0, ())] * dist.get_world_size()
        dist.all_gather_object(every, (seconds, own))
        slowest = max(range(len(every)), key=lambda rank: every[rank][0])
        found.append(
            LinkTime(
                role=role,
                ranks=ranks,
                sent_bytes=num_bytes if role == "ring" else num_bytes // ranks * (ranks - 1),
                seconds=every[slowest][0],
                slowest_rank=slowest,
                transports=every[slowest][1],
            )
        )
    return tuple(found)


def _exchange(group: dist.ProcessGroup, ranks: int, num_bytes: int, device: torch.device) -> Callable[[], object]:
    sent, received = (torch.zeros(ranks, num_bytes // ranks, dtype=torch.uint8, device=device) for _ in range(2))
    return lambda: BlockExchange(list(sent), list(received), group).wait()


def _circulation(group: dist.ProcessGroup, num_bytes: int, device: torch.device) -> Callable[[], object]:
    sent = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    return lambda: Circulation(sent, group, tag=0).wait()


def _gathering(group: dist.ProcessGroup, ranks: int, num_bytes: int, device: torch.device) -> Callable[[], object]:
    own = torch.zeros(num_bytes // ranks, dtype=torch.uint8, device=device)
    gathered = torch.empty(ranks * len(own), dtype=torch.uint8, device=device)
    return lambda: dist.all_gather_into_tensor(gathered, own, group=group)


def _seconds(do: Callable[[], object], device: torch.device, clock: Clock) -> float:
    """Return the shortest of a few times, after one in which connections are made."""
    times = []
    for _ in range(_TIMES + 1):
        started = clock.monotonic()
        do()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(clock.monotonic() - started)
    return min(times[1:])
