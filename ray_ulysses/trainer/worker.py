"""A worker of an attempt, as its launcher describes it to the training loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ray_ulysses.clock import Clock, SystemClock

if TYPE_CHECKING:
    import torch

    from ray_ulysses.checkpoint.notice import Notice
    from ray_ulysses.data.plan.plan import Plan
    from ray_ulysses.data.read.reader import RowReader
    from ray_ulysses.data.read.row_source import DirectSource
    from ray_ulysses.elastic.hang import Phase
    from ray_ulysses.parallel.layout import ParallelLayout
    from ray_ulysses.peer_memory.store import AgentAddresses

SourceMaker = Callable[["Plan", "RowReader", "ParallelLayout", int], "DirectSource"]
"""Makes a rank's source of rows: ``(plan, reader, layout, rank)``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Worker:
    """One worker of an attempt; the default process group exists already."""

    rank: int
    """Global rank."""
    local_rank: int
    """Rank on its node."""
    world_size: int
    node: str
    """Name of the node it runs on."""
    device: torch.device
    """Where it computes."""
    session: str
    """Identifies the running command; its attempts share it."""
    command_started: float | None = None
    """When that command began, in seconds since the epoch; None if unknown."""
    workers_asked: float | None = None
    """When it requested its workers."""
    make_source: SourceMaker
    """Makes its source of rows."""
    notice: Callable[[], Notice | None] = lambda: None
    """Returns the notice that a node will be preempted, or ``None``; called after every step."""
    peer_memory: AgentAddresses | None = None
    """Addresses of peer memory; either every worker has them or none."""
    cluster_nodes: tuple[str, ...] = ()
    """The cluster's name of each rank's node, by rank; empty without a cluster."""
    is_watched: bool = False
    """Whether the launcher sees every worker's end and records why an attempt failed; rank 0 alone can't distinguish a
    cause from its consequences."""
    is_tested: bool = False
    """Whether the devices of all ranks have passed a self-test of this command; the same on every rank."""
    beat: Callable[[Phase, int], Any] = lambda phase, step: None
    """Called with the phase and step as a sign of life, before each micro-batch."""
    wait_for_row: Callable[[bool], Any] = lambda waits: None
    """Called with whether the rank now waits for its next row."""
    on_hang: Callable[[Callable[[], str | None]], Any] = lambda leave: None
    """Registers a function that another thread calls when the ranks hang; it writes diagnostics and returns their
    location."""
    clock: Clock = field(default_factory=SystemClock)
    """Time."""
    on_event: Callable[[str, int], Any] = lambda name, step: None
    """Called with the name and step of each event of the loop; a seam for fault tests."""

    def command(self) -> dict[str, Any]:
        """Return the journal's fields about the running command; unknown times are left out."""
        times = {"command_started": self.command_started, "workers_asked": self.workers_asked}
        return {"session": self.session, **{name: time for name, time in times.items() if time is not None}}
