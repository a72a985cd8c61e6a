"""Compares a run's demand for resources with the nodes of a cluster, in whole workers, and bounds the wait for them."""

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
"""Ray counts in ten-thousandths; in floating point 0.3 / 0.1 is less than 3."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A live node with the CPUs and GPUs that it offers to Ray."""

    cpus: float
    gpus: float

    def __str__(self) -> str:
        return f"{_count(self.cpus, 'CPU')} and {_count(self.gpus, 'GPU')}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """A run's demand for resources."""

    wanted: WorkerRange
    cpus: float
    gpus: int
    data_cpus: float
    """CPUs per task of the data stream; 0 if there is none."""

    @classmethod
    def of(cls, run: ResolvedRun) -> Demand:
        """Return the demand of a run."""
        cluster = run.config.cluster
        return cls(
            wanted=WorkerRange(least=cluster.workers.min, most=cluster.workers.max, sp_size=run.layout.sp_size),
            cpus=cluster.cpus_per_worker,
            gpus=cluster.gpus_per_worker,
            data_cpus=cluster.data_cpus if run.config.data.engine == "ray" else 0.0,
        )

    def __str__(self) -> str:
        if self.gpus == 0:
            return f"{_count(self.cpus, 'CPU')} each (cluster.cpus_per_worker)"
        each = f"{_count(self.cpus, 'CPU')} and {_count(self.gpus, 'GPU')} each"
        return f"{each} (cluster.cpus_per_worker, cluster.gpus_per_worker)"

    @property
    def setting(self) -> str:
        """The setting that gives the fewest workers."""
        return "cluster.workers.min" if self.is_elastic else "cluster.workers"

    @property
    def total_cpus(self) -> float:
        """CPUs of all workers, and of two tasks of the data stream beside them, so that neither waits."""
        return self.wanted.most * self.cpus + 2 * self.data_cpus

    @property
    def is_elastic(self) -> bool:
        """Whether the number of workers follows the nodes."""
        return self.wanted.least < self.wanted.most

    def workers_on(self, node: Node) -> int:
        """Return how many whole workers a node holds."""
        by_cpus = math.floor(node.cpus / self.cpus + _ROUNDING)
        return by_cpus if self.gpus == 0 else min(by_cpus, math.floor(node.gpus / self.gpus + _ROUNDING))


def places(demand: Demand, nodes: Sequence[Node]) -> int:
    """Return how many whole workers the nodes hold."""
    return sum(demand.workers_on(node) for node in nodes)


def room_for_workers(demand: Demand, nodes: Mapping[str, Node]) -> dict[str, int]:
    """Return how many workers each node has room for, once the data stream has its CPUs."""
    room = {name: demand.workers_on(node) for name, node in nodes.items()}
    left = [node.cpus - room[name] * demand.cpus for name, node in nodes.items()]
    if (
        demand.data_cpus > 0
        and sum(room.values()) <= demand.wanted.most
        and max(left, default=0.0) < demand.data_cpus - _ROUNDING
    ):
        # A task of the stream displaces as many workers as it needs, on the node with the most.
        largest = max(room, key=lambda name: (room[name], name), default=None)
        if largest is not None:
            room[largest] = max(0, room[largest] - math.ceil(demand.data_cpus / demand.cpus - _ROUNDING))
    return room


def shortfall(demand: Demand, nodes: Sequence[Node]) -> str | None:
    """Describe what the nodes lack even when idle; ``None`` if they can hold the run."""
    held = places(demand, nodes)
    if demand.is_elastic:
        by_name = {str(number): node for number, node in enumerate(nodes)}
        fits = place_workers(room_for_workers(demand, by_name), demand.wanted) is not None
        beside = f" beside the data stream (cluster.data_cpus={demand.data_cpus:g})" * (demand.data_cpus > 0)
        needs = f"{demand.setting}={demand.wanted.least} needs {demand}{beside}"
        return None if fits else f"{needs}; {_counted(demand, nodes, held)}"
    if held < demand.wanted.least:
        return f"{demand.setting}={demand.wanted.least} needs {demand}; {_counted(demand, nodes, held)}"
    # The workers must still fit once the stream has taken its CPUs from one of the nodes.
    if not any(
        held - demand.workers_on(node) + demand.workers_on(replace(node, cpus=node.cpus - demand.data_cpus))
        >= demand.wanted.most
        for node in nodes
        if node.cpus >= demand.data_cpus - _ROUNDING
    ):
        return (
            f"cluster.data_cpus={demand.data_cpus:g}: the workers leave no node with that many CPUs for the data "
            "stream; lower it, or cluster.cpus_per_worker, or set data.engine=local"
        )
    return None


def displaced(demand: Demand, nodes: Sequence[Node]) -> str | None:
    """Describe how many workers of an elastic run the data stream displaces; ``None`` if none."""
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
        f"the data stream takes the place of {places}, since no node has cluster.data_cpus={demand.data_cpus:g} CPUs "
        "beside its workers; lower cluster.cpus_per_worker, or set data.engine=local"
    )


def hint(demand: Demand, nodes: Sequence[Node]) -> str:
    """Return the way out of a shortfall."""
    least, sp_size = demand.wanted.least, demand.wanted.sp_size
    fitting = places(demand, nodes) // sp_size * sp_size
    if 0 < fitting < least:
        return f"set {demand.setting}={fitting}, which fits (a run resumes at any number), or add nodes"
    if demand.gpus and not any(node.gpus >= demand.gpus for node in nodes):
        return "add nodes with GPUs, or set cluster.gpus_per_worker=0 to train on CPUs"
    if fitting >= least:
        return "add CPUs, or set data.engine=local" if demand.data_cpus > 0 else "add CPUs"
    fewest = f"at least parallel.sp_size={sp_size} of them" if sp_size > 1 else "at least one of them"
    return f"add nodes that hold workers, {fewest}"


def _counted(demand: Demand, nodes: Sequence[Node], held: int) -> str:
    kinds = Counter(nodes).most_common()
    shown = ", ".join(f"{count} of {node} ({count * demand.workers_on(node)})" for node, count in kinds)
    number = "1 node of the cluster holds" if len(nodes) == 1 else f"{len(nodes)} nodes of the cluster hold"
    return f"the {number} {held}: {shown}"


def _count(number: float, name: str) -> str:
    return f"{number:g} {name}{'s' * (number != 1)}"


def node_of(resources: Mapping[str, float]) -> Node:
    """Return a node from Ray's amounts of its resources."""
    return Node(cpus=resources.get("CPU", 0.0), gpus=resources.get("GPU", 0.0))


_LOOK_EVERY_S = 1.0
_REMIND_EVERY_S = 60.0
_QUIET_S = 2.0
"""Restarting workers are missing briefly although no node was lost."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterView:
    """The cluster at one moment."""

    nodes: tuple[Node, ...]
    """Live nodes that are not draining, with all of their resources."""
    workers: int
    worker_nodes: Mapping[str, str] = field(default_factory=dict)
    """The addresses of the workers' nodes, by id."""


class WorkersMissing(RunError):
    """Workers have been missing for too long."""

    def __init__(self, reason: str, hint: str) -> None:
        super().__init__(f"{reason}; {hint}")
        self.reason, self.hint = reason, hint


class WorkerWatch:
    """Tracks whether all workers have started, and how long some have been missing."""

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
        """Begin the wait for the first workers."""
        self._demand, self._limit_s, self._look, self._say, self._clock = demand, limit_s, look, say, clock
        self._is_training = is_training
        self._looked_at = -float("inf")
        self._said, self._said_at = "", -float("inf")
        self._displaced: str | None = None
        self._missing_since: float | None = clock.monotonic()
        self._started: int | None = None
        self.nodes: Mapping[str, str] = {}
        """The addresses of the workers' nodes, by id."""

    @property
    def is_whole(self) -> bool:
        """Whether every worker had started at the last look."""
        return self._missing_since is None

    @property
    def awaited(self) -> str:
        """What the command waits for until the workers report their own phases."""
        workers = self._demand.wanted.least
        number = f"{workers} worker{'s' * (workers > 1)}"
        if self._started is None:
            return f"waiting for {number}"
        is_short = self._started < workers
        return f"waiting for {number} ({self._started} started)" if is_short else f"loading libraries on {number}"

    def check(self) -> None:
        """Look at the cluster once a second, and print what the command waits for.

        Raises:
            WorkersMissing: Workers have been missing for too long.
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
        # An elastic run may start with fewer workers than it could take: it has started when the attempt says so.
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
        started = f"{view.workers} of {self._demand.setting}={self._demand.wanted.least} workers have started"
        reason = f"{started} after {self._limit_s:g} s (elastic.worker_start_timeout_s)"
        if lack is not None:
            return WorkersMissing(f"{reason}: {lack}", hint(self._demand, view.nodes))
        return WorkersMissing(
            f"{reason}: the nodes can hold them all, so other work occupies them (see `ray status`), or the workers "
            "start too slowly",
            "end the other work, or raise the limit",
        )
