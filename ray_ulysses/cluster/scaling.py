"""Chooses how many workers Ray Train starts, on which nodes, and when it restarts them at another number.

Each start uses as many workers as the nodes have room for, within `cluster.workers`. While they train, new nodes may
make a larger number worth a restart, and draining nodes make other places or a smaller number necessary: the workers
then save and end, which loses no step, and are started again. A fixed number of workers is a range of one number.

On new nodes, workers start beside Ray Train's group, so that a run grows without a restart, and train with the others
from the next generation on. Ray Train, whose group has a fixed size, does not know them: only the coordinator does, and
they end when Ray restarts its workers. The placement group keeps a lost worker's resources reserved, so its replacement
starts in the same bundle.

Ray Train 2.60 has no public way to replace its scaling policy or to choose nodes. The seams used here are private:
the scaling policy of a `TrainController`, the context of a worker group before it starts, and its polls (canary tests
stand beside them).
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import ray
from ray._private import state
from ray._raylet import RAY_NODE_ID_KEY  # type: ignore[attr-defined]
from ray.exceptions import RayError
from ray.train.v2._internal.execution.scaling_policy import NoopDecision, ResizeDecision, ScalingPolicy

from ray_ulysses.clock import Clock, SystemClock
from ray_ulysses.cluster.capacity import Demand, Node, node_of, room_for_workers
from ray_ulysses.cluster.session import draining_nodes, steady_nodes
from ray_ulysses.cluster.worker import supervise
from ray_ulysses.elastic.placement import (
    Sizing,
    WorkerRange,
    decide_placement,
    decide_resize,
    is_worth_growing,
    nodes_to_use,
    place_workers,
)
from ray_ulysses.elastic.reform import Group, MoveAsked, NodesUnusable, NoReplacement
from ray_ulysses.errors import RunError
from ray_ulysses.logging import get_logger
from ray_ulysses.run.requests import clear_stop, excluded_nodes, request_stop, stop_requested
from ray_ulysses.supervision.supervisor import Announcement
from ray_ulysses.tracking.events import RESIZED
from ray_ulysses.tracking.history import run_pace

if TYPE_CHECKING:
    from ray.air.config import ScalingConfig
    from ray.train.v2._internal.execution.scaling_policy import ScalingDecision
    from ray.train.v2._internal.execution.worker_group import WorkerGroupPollStatus, WorkerGroupState

    from ray_ulysses.run.settings import ResolvedRun
    from ray_ulysses.supervision.coordinator import Coordinator

_log = get_logger(__name__)
_LOOK_EVERY_S = 1.0
_PING_S = 2.0
"""A node whose Ray takes no connection within this time is gone, even if the cluster's head does not know it yet."""


class Resized(RunError):
    """The workers have saved and ended, and will be started again; not a failure."""


class WorkerScaling(ScalingPolicy):
    """Ray Train's scaling policy of a run, in whole sequence-parallel groups; it lives in Ray's controller.

    Args:
        run: The run.
        job: The job of every worker; its ``session`` identifies the command in requests to workers.
        scaling_config: Ray Train's, for its requests to an autoscaler.
        coordinator: Chooses the members among the workers.
        use_nodes: Called with the addresses, by id, of nodes on which more workers are about to start.
        clock: Time.
    """

    def __init__(
        self,
        run: ResolvedRun,
        job: Mapping[str, Any],
        scaling_config: ScalingConfig,
        coordinator: Coordinator,
        use_nodes: Callable[[Mapping[str, str]], object],
        clock: Clock | None = None,
    ) -> None:
        super().__init__(cast("Any", scaling_config))
        self._config, self._session, self._clock = run.config, str(job["session"]), clock or SystemClock()
        self._demand, self._coordinator, self._use_nodes = Demand.of(run), coordinator, use_nodes
        self._joining = JoiningWorkers(job, self._demand, run.config.elastic.worker_start_timeout_s)
        self._placed: dict[str, int] = {}
        self._holds_room = False
        self._seen, self._slow, self._broken = Sizing(), dict[str, float](), frozenset[str]()
        self._looked_at = -_LOOK_EVERY_S

    def _get_num_workers_for_resource_request(self) -> int:
        return self._demand.wanted.most

    def make_decision_for_non_running_worker_group(self) -> ScalingDecision:
        """Start as many workers as the nodes have room for, or none while there are too few places."""
        self._maybe_send_resource_request()  # type: ignore[no-untyped-call]
        placed = self.choose()
        if placed is None:
            return NoopDecision()
        return ResizeDecision(
            num_workers=sum(placed.values()), resources_per_worker=self.scaling_config._resources_per_worker_not_none
        )

    def choose(self) -> dict[str, int] | None:
        """Return how many workers start on which nodes; None, after a pause, while there are too few places."""
        placed = None
        # A head that does not answer now is asked again.
        with contextlib.suppress(OSError, RuntimeError, RayError):
            nodes = reachable(self._steady())
            self._seen, placed = decide_placement(
                self._seen,
                free=self._room(nodes, self._held),
                total=room_for_workers(self._demand, {node: node_of(one["Resources"]) for node, one in nodes.items()}),
                wanted=self._demand.wanted,
                now=self._clock.monotonic(),
            )
        if placed is None:
            # The controller asks again at once, without a pause of its own.
            time.sleep(_LOOK_EVERY_S)
            return None
        if stop_requested(self._config.run_dir, self._session) == "resize":
            # Where it can't be removed, the workers remove it as they start.
            with contextlib.suppress(OSError):
                clear_stop(self._config.run_dir, retry_s=_LOOK_EVERY_S)
        self._placed = placed
        return placed

    def make_decision_for_running_worker_group(
        self, worker_group_state: WorkerGroupState, worker_group_status: WorkerGroupPollStatus
    ) -> ScalingDecision:
        """Never resize running workers directly: a request asks them to save and end first."""
        self._maybe_send_resource_request()  # type: ignore[no-untyped-call]
        return NoopDecision()

    def selectors(self) -> list[dict[str, str]]:
        """Return the label selector of each worker that is about to start, which names its node."""
        return [{RAY_NODE_ID_KEY: node} for node, workers in self._placed.items() for _ in range(workers)]

    def leave_out(self, broken: frozenset[str]) -> None:
        """Exclude nodes whose devices have failed, unless the others are too few; any thread may call."""
        self._broken |= broken

    def begin(self, announcement: Announcement, seats: Mapping[int, Seat]) -> None:
        """Note that a worker group has started, and holds its places."""
        self._holds_room = True
        self._joining.begin(announcement, seats)

    def end(self) -> None:
        """Note that the worker group has ended, which frees its places for the next group."""
        self._holds_room = False
        self._joining.end()

    def polled(self, status: WorkerGroupPollStatus) -> None:
        """Ask the workers to end where another number is better, and have Ray restart workers that did."""
        statuses, group = status.worker_statuses.values(), self._coordinator.group
        # All of Ray's workers may be lost: then only workers that joined have seen the end.
        ends = {one.return_value for one in statuses} | {None if group is None else group.status}
        if status.finished and RESIZED in ends:
            for one in statuses:
                # To Ray Train, workers that end without an error have finished the run.
                one.error = one.error or Resized("the workers are started again at another number")
            return
        now = self._clock.monotonic()
        if not status.errors and now - self._looked_at >= _LOOK_EVERY_S:
            self._looked_at = now
            try:
                self._look(now)
            except (OSError, RuntimeError, RayError) as error:
                _log.debug("the nodes can't be looked at now: %s", error)
            except Exception:
                # The number of workers stays; the error must not end Ray's controller.
                _log.exception("the number of workers can't be looked at")

    def _look(self, now: float) -> None:
        config, group = self._config, self._coordinator.group
        if group is None or group.phase not in ("training", "short"):
            return
        self._joining.forget({number for number, worker in group.workers.items() if worker.is_lost})
        placed, nodes, deadlines = group.num_placed, self._steady(), draining_nodes()
        self._coordinator.announce(deadlines)
        draining = frozenset(deadlines)
        there, free, vacant = _present(group), self._room(nodes, {}), self._joining.vacant
        room = {node: there[node] + free[node] + vacant[node] for node in nodes}
        if group.phase == "short":
            if not self._fill(group, room, nodes, now):
                self._coordinator.post(NoReplacement())
            return
        new = (draining & placed.keys()) - group.unusable
        announced = group.unusable | new
        if new:
            # The loss of such a node is not charged, even if it goes before its workers have left it.
            self._coordinator.post(NodesUnusable(nodes=announced, draining=announced & draining))
        self._seen, resize = decide_resize(
            self._seen,
            placed=placed,
            room=room,
            wanted=self._demand.wanted,
            now=now,
            grow_interval_s=config.elastic.grow_interval_s,
        )
        if stop_requested(config.run_dir, self._session) is not None:
            return
        if resize is not None and resize.must:
            # Keep nodes excluded that were left before: a slow node is alive, and its worker would be taken back.
            left = announced | (frozenset(placed) - frozenset(nodes))
            self._coordinator.post(NodesUnusable(nodes=left, draining=left & draining))
            # The remaining workers continue on their own if they are enough.
            if not self._fill(group, room, nodes, now):
                self._move()
        elif self._joining.are_awaited:
            if self._joining.have_joined(group, now):
                self._move()
        elif resize is not None:
            self._grow(group, resize.workers, room, nodes, now)

    def _fill(self, group: Group, room: Mapping[str, int], nodes: Mapping[str, Any], now: float) -> bool:
        """Start workers if too few are left, or wait for started ones; return whether any are on the way."""
        there = _present(group)
        if place_workers({node: there[node] for node in nodes}, self._demand.wanted) is not None:
            return False
        if self._joining.are_awaited and not self._joining.have_joined(group, now):
            return self._joining.are_awaited
        # The head learns late of a lost node, and one worker that dies there ends the whole start. A stopped node
        # accepts connections, but a worker starts there only once the node continues.
        answering = {node: room[node] for node in reachable(nodes)}
        others = {node: answering[node] for node in answering.keys() - group.silent}
        return any(self._start(group, self._demand.wanted, some, nodes, now) for some in (others, answering))

    def _start(
        self, group: Group, wanted: WorkerRange, room: Mapping[str, int], nodes: Mapping[str, Any], now: float
    ) -> bool:
        """Start the missing workers; return whether any are missing and have room."""
        there = _present(group)
        more = Counter(place_workers(room, wanted, there.keys())) - there
        if more:
            self._use_nodes({node: nodes[node]["NodeManagerAddress"] for node in more})
            self._joining.start(group, more, now)
        return bool(more)

    def _grow(self, group: Group, possible: int, room: Mapping[str, int], nodes: Mapping[str, Any], now: float) -> None:
        """Start more workers where that pays; the others keep training until they are ready."""
        pace = run_pace(self._config.run_dir)
        if pace is None or len(reachable(nodes)) < len(nodes):
            # The cost of growth is unknown, or the head does not know of a lost node yet: do not count this look.
            self._seen = replace(self._seen, grew_at=None)
            return
        if not is_worth_growing(len(group.members), possible, seconds_left=pace.seconds_left, restart_s=pace.start_s):
            return
        if not self._start(group, replace(self._demand.wanted, most=possible), room, nodes, now):
            # All the workers it needs are present.
            self._move()

    def _move(self) -> None:
        """Have the workers save, end and form again at the number that is best then."""
        self._coordinator.post(MoveAsked())
        request_stop(self._config.run_dir, self._session, "resize")

    def _steady(self) -> dict[str, Any]:
        """Return the nodes that stay, without broken and slow ones where excluding them pays."""
        nodes = steady_nodes()
        self._slow |= excluded_nodes(self._config.run_dir, self._session) | dict.fromkeys(self._broken, math.inf)
        if not self._slow.keys() & nodes.keys():
            return nodes

        def workers(some: Collection[str]) -> int:
            room = self._room({node: nodes[node] for node in some}, self._held)
            return sum((place_workers(room, self._demand.wanted) or {}).values())

        group = self._coordinator.group
        usable = nodes_to_use(nodes, self._slow, () if group is None else group.num_placed, workers)
        return {node: nodes[node] for node in usable}

    @property
    def _held(self) -> Mapping[str, int]:
        return Counter(self._placed if self._holds_room else {}) + self._joining.beside

    def _room(self, nodes: Mapping[str, Any], held: Mapping[str, int]) -> dict[str, int]:
        """Return how many workers each node has room for, counting held places as free."""
        free = state.state.available_resources_per_node()
        cpus, gpus = self._demand.cpus, self._demand.gpus
        there = {node: node_of(free.get(node, {})) for node in nodes}
        return room_for_workers(
            self._demand,
            {
                node: Node(cpus=one.cpus + held.get(node, 0) * cpus, gpus=one.gpus + held.get(node, 0) * gpus)
                for node, one in there.items()
            },
        )


def _present(group: Group) -> Counter[str]:
    return Counter(one.place.node for one in group.workers.values() if one.place is not None and one.is_there)


def reachable(nodes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the nodes whose Ray accepts a connection: the cluster's head learns late of a lost node."""
    if not nodes:
        return {}
    with ThreadPoolExecutor(max_workers=min(32, len(nodes))) as pool:
        answers = pool.map(lambda one: _answers(one["NodeManagerAddress"], one["NodeManagerPort"]), nodes.values())
        return {node: one for (node, one), answer in zip(nodes.items(), answers, strict=True) if answer}


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=_PING_S).close()
    except OSError:
        return False
    return True


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
            shown: GPUs of all workers that start on the node with it: NCCL reaches GPUs that it sees directly, and
                GPUs of earlier workers through host memory.
        """
        if shown:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(shown)
        return supervise(job, announcement, worker, local_rank, joins_late=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """The place of a worker in Ray Train's group."""

    node: str
    actor: Any
    strategy: Any
    """The scheduling strategy that puts another one there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Joining:
    """Workers that were started together and have not all joined."""

    actors: Mapping[int, Any]
    asked: Mapping[int, Any]
    """The GPUs of each, once it has its place, by number."""
    nodes: Mapping[int, str]
    until: float
    """When the wait for them ends."""
    running: dict[int, Any]
    """Their eventual return values, by number, once they supervise."""


class JoiningWorkers:
    """The workers that have joined one worker group, and the ones that are joining."""

    def __init__(self, job: Mapping[str, Any], demand: Demand, patience_s: float) -> None:
        self._job, self._demand, self._patience_s = job, demand, patience_s
        self._announcement: Announcement | None = None
        # Includes Ray Train's own workers whose places are known.
        self._actors: dict[int, Any] = {}
        self._seats: dict[int, Seat] = {}
        self._vacant: list[Seat] = []
        self._nodes: dict[int, str] = {}
        self._joining: _Joining | None = None
        self._next = 0

    @property
    def beside(self) -> Counter[str]:
        """Number of places that they hold outside Ray Train's group, by node id."""
        return Counter(node for number, node in self._nodes.items() if number not in self._seats)

    @property
    def vacant(self) -> Counter[str]:
        """Number of places of Ray Train's group whose workers are lost, by node id."""
        return Counter(seat.node for seat in self._vacant)

    @property
    def are_awaited(self) -> bool:
        """Whether any started worker has not joined yet."""
        return self._joining is not None

    def begin(self, announcement: Announcement, seats: Mapping[int, Seat]) -> None:
        """Note how the coordinator of a new worker group is reached, and the places of Ray Train's workers."""
        self._announcement, self._seats = announcement, dict(seats)
        self._actors = {number: seat.actor for number, seat in seats.items()}

    def start(self, group: Group, places: Mapping[str, int], now: float) -> None:
        """Start workers; returns at once."""
        # Never reuse a number: its worker may only be cut off, and come back.
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
        """Advance the started workers; return whether all could train now and do not yet."""
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
        """Let the workers supervise once all have their places."""
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
        # A fault may meanwhile have made members of the ones that joined.
        self._actors |= {number: actor for number, actor in joining.actors.items() if number in group.members}
        self._joining = None
        self._end({number: actor for number, actor in joining.actors.items() if number not in group.members})
        return False

    def forget(self, lost: Collection[int]) -> None:
        """End lost workers, in case they are only stopped, and free their places."""
        self._end({number: self._actors.pop(number) for number in self._actors.keys() & lost})

    def _end(self, actors: Mapping[int, Any]) -> None:
        _kill(actors)
        for number in actors:
            self._nodes.pop(number, None)
            if number in self._seats:
                self._vacant.append(self._seats.pop(number))

    def end(self) -> None:
        """End all of them when the worker group has ended."""
        _kill({number: actor for number, actor in self._actors.items() if number in self._nodes})
        if self._joining is not None:
            _kill(self._joining.actors)
        self._actors, self._seats, self._vacant, self._nodes = {}, {}, [], {}
        self._joining, self._announcement, self._next = None, None, 0


def _kill(actors: Mapping[int, Any]) -> None:
    for actor in actors.values():
        with contextlib.suppress(RayError, ValueError, RuntimeError):
            ray.kill(actor)
