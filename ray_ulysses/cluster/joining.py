"""Starts workers beside Ray Train's worker group, on nodes that have joined: a run grows without a restart.

They train with the others from the next generation on. To Ray Train, whose group has a fixed size, they don't exist:
the coordinator alone knows them, and when Ray restarts its workers, these end. The group's placement group keeps the
resources of a lost worker reserved, so its replacement is started in the same bundle.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray._raylet import RAY_NODE_ID_KEY  # type: ignore[attr-defined]
from ray.exceptions import RayError

from ray_ulysses.cluster.capacity import Demand
from ray_ulysses.cluster.worker import supervise
from ray_ulysses.elastic.reform import Group
from ray_ulysses.logging import get_logger
from ray_ulysses.supervision.channel import Announcement

_log = get_logger(__name__)


class JoinedWorker:
    """The actor of one worker."""

    def gpus(self) -> list[str]:
        """Return the GPUs that Ray has given it."""
        return [str(one) for one in ray.get_gpu_ids()]

    def supervise(
        self, job: Mapping[str, Any], announcement: Announcement, worker: int, local_rank: int, shown: list[str]
    ) -> str:
        """Supervise this worker's attempts, as the workers of Ray Train do; joins once a child could start at once.

        Args:
            job: What `ray_ulysses.cluster.worker.train_worker` takes.
            announcement: How the coordinator is reached.
            worker: The worker's number.
            local_rank: The worker's number on its node.
            shown: GPUs of all workers that start on the node with it, which NCCL reaches directly where it sees them;
                it reaches those of workers that were there before through host memory.
        """
        if shown:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(shown)
        return supervise(job, announcement, worker, local_rank, joins_late=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """The place of a worker in Ray Train's group.

    Attributes:
        node: Ray's id of the node.
        actor: The worker that Ray Train has started there.
        strategy: The scheduling strategy that puts another one there.
    """

    node: str
    actor: Any
    strategy: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class _Joining:
    """Workers that were started together, and are waited for.

    Attributes:
        actors: Their actors, by number.
        asked: The GPUs of each, once it has its place, by number.
        nodes: Their nodes, by number.
        until: When they are given up.
        running: What they return in the end, by number, once they supervise.
    """

    actors: Mapping[int, Any]
    asked: Mapping[int, Any]
    nodes: Mapping[int, str]
    until: float
    running: dict[int, Any]


class JoiningWorkers:
    """The workers that have joined one worker group, and those that are about to.

    Args:
        job: What every worker is given.
        demand: The run's demand for resources per worker.
        patience_s: Longest wait for workers that start, in seconds.
    """

    def __init__(self, job: Mapping[str, Any], demand: Demand, patience_s: float) -> None:
        self._job, self._demand, self._patience_s = job, demand, patience_s
        self._announcement: Announcement | None = None
        # Ray Train's own workers too, as far as their places are known.
        self._actors: dict[int, Any] = {}
        self._seats: dict[int, Seat] = {}
        self._vacant: list[Seat] = []
        self._nodes: dict[int, str] = {}
        self._joining: _Joining | None = None
        self._next = 0

    @property
    def placed(self) -> Counter[str]:
        """How many of them each node has, by node id."""
        return Counter(self._nodes.values())

    @property
    def beside(self) -> Counter[str]:
        """How many places they hold beside those of Ray Train's group, by node id."""
        return Counter(node for number, node in self._nodes.items() if number not in self._seats)

    @property
    def vacant(self) -> Counter[str]:
        """How many places of Ray Train's group are those of workers that are lost, by node id."""
        return Counter(seat.node for seat in self._vacant)

    @property
    def are_awaited(self) -> bool:
        """Whether some were started that have not joined."""
        return self._joining is not None

    def begin(self, announcement: Announcement, seats: Mapping[int, Seat]) -> None:
        """Note how the coordinator of a new worker group is reached, and the places of Ray Train's workers."""
        self._announcement, self._seats = announcement, dict(seats)
        self._actors = {number: seat.actor for number, seat in seats.items()}

    def start(self, group: Group, places: Mapping[str, int], now: float) -> None:
        """Start workers; returns at once.

        Args:
            group: The workers that there are.
            places: How many to start on each node, by node id.
            now: Seconds on a clock that only moves forward.
        """
        # A number is never used again: whoever had it may be cut off, and come back.
        number = max((self._next, *(worker + 1 for worker in group.workers)))
        nodes = dict(enumerate((node for node, count in places.items() for _ in range(count)), number))
        self._next = number + len(nodes)
        actor: Any = ray.remote(num_cpus=self._demand.cpus, num_gpus=self._demand.gpus, max_restarts=0)(JoinedWorker)
        actors = {number: actor.options(**self._place(number, node)).remote() for number, node in nodes.items()}
        asked = {number: actor.gpus.remote() for number, actor in actors.items()}
        self._nodes |= nodes
        self._joining = _Joining(actors=actors, asked=asked, nodes=nodes, until=now + self._patience_s, running={})
        _log.info("starting %d more workers on %d nodes", len(actors), len(places))

    def _place(self, number: int, node: str) -> dict[str, Any]:
        """Return the options that put a worker on a node, in a place of Ray Train's group where one is vacant."""
        seat = next((one for one in self._vacant if one.node == node), None)
        if seat is None:
            return {"label_selector": {RAY_NODE_ID_KEY: node}}
        self._vacant.remove(seat)
        self._seats[number] = seat
        return {"scheduling_strategy": seat.strategy}

    def have_joined(self, group: Group, now: float) -> bool:
        """Look after the workers that were started, and return whether all could train now and do not do so yet.

        Args:
            group: The workers that there are.
            now: Seconds on a clock that only moves forward.
        """
        joining = self._joining
        assert joining is not None
        try:
            self._go_on(joining, group)
        except RayError as error:
            return self._give_up(joining, group, str(error).splitlines()[0])
        if all(number in group.workers and group.workers[number].is_there for number in joining.nodes):
            self._actors |= joining.actors
            self._joining = None
            # After a fault they may have become members already.
            return not joining.nodes.keys() <= set(group.members)
        return self._give_up(joining, group, "they did not start in time") if now >= joining.until else False

    def _go_on(self, joining: _Joining, group: Group) -> None:
        """Have the workers supervise once all have their places.

        Raises:
            RayError: One of them has failed.
        """
        if joining.running:
            ended, _ = ray.wait(list(joining.running.values()), timeout=0)
            ray.get(ended)
            return
        _, missing = ray.wait(list(joining.asked.values()), num_returns=len(joining.asked), timeout=0)
        if missing:
            return
        gpus = dict(zip(joining.asked, ray.get(list(joining.asked.values())), strict=True))
        for node in set(joining.nodes.values()):
            here = [number for number, its_node in joining.nodes.items() if its_node == node]
            shown = sorted((one for number in here for one in gpus[number]), key=lambda one: (len(one), one))
            others = (one.place for number, one in group.workers.items() if number not in joining.nodes)
            before = sum(place is not None and place.node == node for place in others)
            for local_rank, number in enumerate(here, before):
                joining.running[number] = joining.actors[number].supervise.remote(
                    self._job, self._announcement, number, local_rank, shown
                )

    def _give_up(self, joining: _Joining, group: Group, reason: str) -> bool:
        _log.warning("%d workers that were started beside the others did not join: %s", len(joining.actors), reason)
        # A fault meanwhile may have made members of those that were there.
        self._actors |= {number: actor for number, actor in joining.actors.items() if number in group.members}
        self._joining = None
        self._end({number: actor for number, actor in joining.actors.items() if number not in group.members})
        return False

    def forget(self, lost: Collection[int]) -> None:
        """End workers that are lost, in case they are only stopped, and give their places back.

        Args:
            lost: The numbers of all workers that are lost.
        """
        self._end({number: self._actors.pop(number) for number in self._actors.keys() & lost})

    def _end(self, actors: Mapping[int, Any]) -> None:
        _kill(actors)
        for number in actors:
            self._nodes.pop(number, None)
            if number in self._seats:
                self._vacant.append(self._seats.pop(number))

    def end(self) -> None:
        """End all of them, since the worker group has ended."""
        _kill({number: actor for number, actor in self._actors.items() if number in self._nodes})
        if self._joining is not None:
            _kill(self._joining.actors)
        self._actors, self._seats, self._vacant, self._nodes = {}, {}, [], {}
        self._joining, self._announcement, self._next = None, None, 0


def _kill(actors: Mapping[int, Any]) -> None:
    for actor in actors.values():
        with contextlib.suppress(RayError, ValueError, RuntimeError):
            ray.kill(actor)
