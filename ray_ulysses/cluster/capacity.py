"""Compares a run's resource demand with the cluster's nodes, and limits the wait for missing workers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ray_ulysses.clock import Clock
from ray_ulysses.elastic.placement import WorkerRange, place_workers
from ray_ulysses.errors import RunError

if TYPE_CHECKING:
    from ray_ulysses.run.settings import ResolvedRun

_ROUNDING = 1e-6
"""Rounding tolerance: Ray counts ten-thousandths of a resource, and 0.3 / 0.1 is less than 3 in floating point."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """CPUs and GPUs that a live node offers to Ray."""

    cpus: float
    gpus: float

    def __str__(self) -> str:
        return f"{_count(self.cpus, 'CPU')} and {_count(self.gpus, 'GPU')}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """The run's range of workers, and the resources that each worker and each data-stream task needs."""

    wanted: WorkerRange
    cpus: float
    gpus: int
    data_cpus: float
    """CPUs per data-stream task; 0 if rows are not read through Ray Data."""

    @classmethod
    def of(cls, run: ResolvedRun) -> Demand:
        """Return the resource demand of `run`."""
        cluster = run.config.cluster
        return cls(
            wanted=WorkerRange(least=cluster.workers.min, most=cluster.workers.max, sp_size=run.layout.sp_size),
            cpus=cluster.cpus_per_worker,
            gpus=cluster.gpus_per_worker,
            data_cpus=cluster.data_cpus if run.config.data.engine == "ray" else 0.0,
        )

    def __str__(self) -> str:
        if self.gpus == 0:
            return f"{_count(self.cpus, 'CPU')} per worker (cluster.cpus_per_worker)"
        each = f"{_count(self.cpus, 'CPU')} and {_count(self.gpus, 'GPU')} per worker"
        return f"{each} (cluster.cpus_per_worker, cluster.gpus_per_worker)"

    @property
    def setting(self) -> str:
        """Name of the setting that determines the smallest number of workers."""
        return "cluster.workers.min" if self.is_elastic else "cluster.workers"

    @property
    def total_cpus(self) -> float:
        """CPUs for all workers and two data-stream tasks, so that neither waits for the other."""
        return self.wanted.most * self.cpus + 2 * self.data_cpus

    @property
    def is_elastic(self) -> bool:
        """Whether the number of workers may change with the available nodes."""
        return self.wanted.least < self.wanted.most

    def workers_on(self, node: Node) -> int:
        """Return the number of workers that fit on `node`."""
        by_cpus = math.floor(node.cpus / self.cpus + _ROUNDING)
        return by_cpus if self.gpus == 0 else min(by_cpus, math.floor(node.gpus / self.gpus + _ROUNDING))


def places(demand: Demand, nodes: Sequence[Node]) -> int:
    """Return the number of workers that fit on the nodes."""
    return sum(demand.workers_on(node) for node in nodes)


def room_for_workers(demand: Demand, nodes: Mapping[str, Node]) -> dict[str, int]:
    """Return the number of workers that fit on each node, after reserving CPUs for one data-stream task."""
    room = {name: demand.workers_on(node) for name, node in nodes.items()}
    left = [node.cpus - room[name] * demand.cpus for name, node in nodes.items()]
    is_full = sum(room.values()) <= demand.wanted.most and max(left, default=0.0) < demand.data_cpus - _ROUNDING
    if room and demand.data_cpus > 0 and is_full:
        # No node has enough spare CPUs for a stream task: free them on the node with the most workers.
        largest = max(room, key=lambda name: (room[name], name))
        room[largest] = max(0, room[largest] - math.ceil(demand.data_cpus / demand.cpus - _ROUNDING))
    return room


def shortfall(demand: Demand, nodes: Sequence[Node]) -> str | None:
    """Describe why the run does not fit on the nodes even when they are idle, or return None if it fits."""
    held = places(demand, nodes)
    if demand.is_elastic:
        by_name = {str(number): node for number, node in enumerate(nodes)}
        fits = place_workers(room_for_workers(demand, by_name), demand.wanted) is not None
        beside = f" in addition to the data stream (cluster.data_cpus={demand.data_cpus:g})" * (demand.data_cpus > 0)
        needs = f"{demand.setting}={demand.wanted.least} needs {demand}{beside}"
        return None if fits else f"{needs}; {_counted(demand, nodes, held)}"
    if held < demand.wanted.least:
        return f"{demand.setting}={demand.wanted.least} needs {demand}; {_counted(demand, nodes, held)}"
    # All workers must still fit after one node has given up the data stream's CPUs.
    if not any(
        held - demand.workers_on(node) + demand.workers_on(replace(node, cpus=node.cpus - demand.data_cpus))
        >= demand.wanted.most
        for node in nodes
        if node.cpus >= demand.data_cpus - _ROUNDING
    ):
        return (
            f"cluster.data_cpus={demand.data_cpus:g}: the workers leave no node with that many CPUs for the data "
            "stream; lower cluster.data_cpus or cluster.cpus_per_worker, or set data.engine=local"
        )
    return None


def displaced(demand: Demand, nodes: Sequence[Node]) -> str | None:
    """Describe how many workers an elastic run loses to the data stream, or return None if it loses none."""
    if not demand.is_elastic:
        return None
    by_name = {str(number): node for number, node in enumerate(nodes)}
    with_stream, without = (
        sum((place_workers(room_for_workers(one, by_name), one.wanted) or {}).values())
        for one in (demand, replace(demand, data_cpus=0.0))
    )
    if with_stream == without:
        return None
    places = f"{without - with_stream} worker{'s' * (without - with_stream != 1)}"
    return (
        f"the data stream displaces {places}, because no node has cluster.data_cpus={demand.data_cpus:g} CPUs left "
        "after its workers; lower cluster.cpus_per_worker, or set data.engine=local"
    )


def hint(demand: Demand, nodes: Sequence[Node]) -> str:
    """Suggest how to resolve the shortfall."""
    least, sp_size = demand.wanted.least, demand.wanted.sp_size
    fitting = places(demand, nodes) // sp_size * sp_size
    if 0 < fitting < least:
        return f"set {demand.setting}={fitting}, which fits (a run can resume with any number of workers), or add nodes"
    if demand.gpus and not any(node.gpus >= demand.gpus for node in nodes):
        return "add nodes with GPUs, or set cluster.gpus_per_worker=0 to train on CPUs"
    if fitting >= least:
        return "add CPUs, or set data.engine=local" if demand.data_cpus > 0 else "add CPUs"
    fewest = f"parallel.sp_size={sp_size} workers" if sp_size > 1 else "one worker"
    return f"add nodes for at least {fewest}"


def _counted(demand: Demand, nodes: Sequence[Node], held: int) -> str:
    kinds = Counter(nodes).most_common()
    shown = ", ".join(f"{count} with {node} ({count * demand.workers_on(node)})" for node, count in kinds)
    number = "1 node fits" if len(nodes) == 1 else f"{len(nodes)} nodes fit"
    return f"the cluster's {number} {_count(held, 'worker')}: {shown}"


def _count(number: float, name: str) -> str:
    return f"{number:g} {name}{'s' * (number != 1)}"


def node_of(resources: Mapping[str, float]) -> Node:
    """Return the CPUs and GPUs in a Ray resource mapping."""
    return Node(cpus=resources.get("CPU", 0.0), gpus=resources.get("GPU", 0.0))


_LOOK_EVERY_S = 1.0
_REMIND_EVERY_S = 60.0
_QUIET_S = 2.0
"""Seconds before missing workers are reported: restarting workers are briefly missing although no node was lost."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterView:
    """Nodes and workers of the cluster at one moment."""

    nodes: tuple[Node, ...]
    """Live nodes that are not draining, with their total resources."""
    workers: int
    worker_nodes: Mapping[str, str] = field(default_factory=dict)
    """Addresses of the nodes that run workers, by node ID."""


class WorkersMissing(RunError):
    """Workers did not start within the time limit, or were missing for longer."""

    def __init__(self, reason: str, hint: str) -> None:
        super().__init__(f"{reason}; {hint}")
        self.reason, self.hint = reason, hint


class WorkerWatch:
    """Tracks whether all workers are running, and how long workers have been missing."""

    def __init__(
        self,
        demand: Demand,
        *,
        limit_s: float,
        look: Callable[[], ClusterView | None],
        say: Callable[[str], object],
        clock: Clock,
        is_training: Callable[[], bool] = lambda: True,
    ) -> None:
        """Start waiting for the first workers."""
        self._demand, self._limit_s, self._look, self._say, self._clock = demand, limit_s, look, say, clock
        self._is_training = is_training
        self._looked_at = -float("inf")
        self._said, self._said_at = "", -float("inf")
        self._displaced: str | None = None
        self._missing_since: float | None = clock.monotonic()
        self._started: int | None = None
        self.nodes: Mapping[str, str] = {}
        """Addresses of the nodes that run workers, by node ID."""

    @property
    def is_whole(self) -> bool:
        """Whether every worker was running at the last check."""
        return self._missing_since is None

    @property
    def awaited(self) -> str:
        """Progress text to show until the workers report their own phases."""
        workers = self._demand.wanted.least
        number = f"{workers} worker{'s' * (workers > 1)}"
        if self._started is None:
            return f"waiting for {number}"
        is_short = self._started < workers
        return f"waiting for {number} ({self._started} started)" if is_short else f"loading libraries on {number}"

    def check(self) -> None:
        """Inspect the cluster at most once per second, and report missing nodes.

        Raises:
            WorkersMissing: Workers have been missing for longer than the limit.
        """
        now = self._clock.monotonic()
        if now - self._looked_at < _LOOK_EVERY_S:
            return
        self._looked_at = now
        view = self._look()
        if view is None:
            return
        self._started, self.nodes = view.workers, view.worker_nodes
        wanted = self._demand.wanted
        # An elastic run may start with fewer workers than its maximum; then only the attempt shows that it has started.
        if view.workers >= wanted.most or (view.workers >= wanted.least and self._is_training()):
            self._missing_since, self._said = None, ""
            lack = displaced(self._demand, view.nodes)
            if lack not in (None, self._displaced):
                self._displaced = lack
                self._say(f"warning: {lack}")
            return
        if self._missing_since is None:
            self._missing_since = now
        waited_s = now - self._missing_since
        lack = shortfall(self._demand, view.nodes)
        if waited_s >= self._limit_s:
            raise self._end(view, lack)
        is_news = lack != self._said or now - self._said_at >= _REMIND_EVERY_S
        if lack is not None and waited_s >= _QUIET_S and is_news:
            self._said, self._said_at = lack, now
            self._say(f"waiting up to {self._limit_s - waited_s:.0f} s for nodes: {lack}")

    def _end(self, view: ClusterView, lack: str | None) -> WorkersMissing:
        started = f"{view.workers} of {self._demand.setting}={self._demand.wanted.least} workers started"
        reason = f"{started} within {self._limit_s:g} s (elastic.worker_start_timeout_s)"
        if lack is not None:
            return WorkersMissing(f"{reason}: {lack}", hint(self._demand, view.nodes))
        return WorkersMissing(
            f"{reason}: all workers fit on the nodes, so other jobs occupy them (see `ray status`), or the workers "
            "start too slowly",
            "end the other jobs, or increase elastic.worker_start_timeout_s",
        )
