"""Describes a worker to the training loop. The launcher creates the description."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ray_ulysses.checkpoint.notice import Notice
from ray_ulysses.clock import Clock, SystemClock
from ray_ulysses.data.plan.plan import Plan
from ray_ulysses.data.read.reader import RowReader
from ray_ulysses.data.read.row_source import DirectSource
from ray_ulysses.elastic.hang import Phase
from ray_ulysses.parallel.layout import ParallelLayout
from ray_ulysses.peer_memory.store import AgentAddresses

SourceMaker = Callable[["Plan", "RowReader", "ParallelLayout", int], "DirectSource"]
"""Function that creates a rank's source of rows from ``(plan, reader, layout, rank)``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Worker:
    """One worker of an attempt. The default process group must already exist."""

    rank: int
    """Global rank."""
    local_rank: int
    """Rank on the worker's node."""
    world_size: int
    node: str
    """Name of the worker's node."""
    device: torch.device
    session: str
    """Identifier of the running command, shared by all attempts of that command."""
    command_started: float | None = None
    """Start time of the command, in seconds since the epoch, or None if unknown."""
    workers_asked: float | None = None
    """Time at which the command requested workers, in seconds since the epoch, or None if unknown."""
    make_source: SourceMaker
    notice: Callable[[], Notice | None] = lambda: None
    """Function that returns the preemption notice, or None if there is none; called after every step."""
    peer_memory: AgentAddresses | None = None
    """Addresses of the peer-memory agents, set either on every worker or on none."""
    cluster_nodes: tuple[str, ...] = ()
    """Cluster node ID of each rank, indexed by rank; empty if there is no cluster."""
    is_watched: bool = False
    """Whether the launcher observes every worker's exit and records why an attempt failed. Rank 0 alone can't
    distinguish the cause of a failure from its consequences."""
    is_tested: bool = False
    """Whether all ranks' devices have passed a self-test during this command; identical on every rank."""
    beat: Callable[[Phase, int], Any] = lambda phase, step: None
    """Function called with the phase and step before each micro-batch, as a heartbeat."""
    wait_for_row: Callable[[bool], Any] = lambda waits: None
    """Function called with True before the rank waits for its next row, and with False afterwards."""
    on_hang: Callable[[Callable[[], str | None]], Any] = lambda leave: None
    """Function that registers a callback to run in another thread if the ranks hang. The callback writes diagnostics
    and returns their location."""
    clock: Clock = field(default_factory=SystemClock)
    on_event: Callable[[str, int], Any] = lambda name, step: None
    """Function called with the name and step of each event in the training loop; used by fault tests."""

    def command(self) -> dict[str, Any]:
        """Return the journal fields that describe the running command. Unknown times are omitted."""
        times = {"command_started": self.command_started, "workers_asked": self.workers_asked}
        return {"session": self.session, **{name: time for name, time in times.items() if time is not None}}
