"""Decides how many workers Ray Train starts and where, and when it restarts with a different number of workers.

Each start uses as many workers as fit on the nodes, within `cluster.workers`. During training, new nodes may make a
restart with more workers worthwhile, and draining nodes may require other nodes or fewer workers. The workers then save
and end, which loses no step, and are restarted. A fixed number of workers is a range with equal limits.

On new nodes, workers start outside Ray Train's group, so that a run grows without a restart; they train with the others
from the next generation on. Ray Train's group has a fixed size, so only the coordinator knows of these workers, and
they end when Ray Train restarts its own workers. The placement group keeps a lost worker's resources reserved, so that
the replacement starts in the same bundle.

Ray Train 2.60 has no public API to replace its scaling policy or to choose nodes. This module uses private APIs:
`TrainController`'s scaling policy, a worker group's context before its start, and its polls (canary tests cover them).
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
from ray.train.v2._internal.execution.scaling_policy import NoopDecision, ResizeDecision, ScalingDecision, ScalingPolicy

from ray_ulysses.clock import Clock, SystemClock
from ray_ulysses.cluster.capacity import Demand, Node, node_of, room_for_workers
from ray_ulysses.cluster.session import draining_nodes, is_embedded, steady_nodes
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
    from ray.train.v2._internal.execution.worker_group import WorkerGroupPollStatus, WorkerGroupState

    from ray_ulysses.run.settings import ResolvedRun
    from ray_ulysses.supervision.coordinator import Coordinator

_log = get_logger(__name__)
_LOOK_EVERY_S = 1.0
_PING_S = 2.0
"""Seconds after which a node that accepts no connection is gone, even if the cluster's head has not noticed yet."""


class Resized(RunError):
    """The workers have saved and ended, and a different number of workers will be started. This is not a failure."""


class WorkerScaling(ScalingPolicy):
    """Ray Train scaling policy that starts complete sequence-parallel groups; runs in Ray Train's controller.

    Args:
        run: The run.
        job: Job fields that every worker receives; ``session`` identifies the command in requests to workers.
        scaling_config: Ray Train's configuration, used for requests to an autoscaler.
        coordinator: Coordinator of the workers.
        use_nodes: Called with the addresses, by node ID, of nodes on which more workers are about to start.
        clock: Time source.
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

    def _maybe_send_resource_request(self) -> None:
        # Without an autoscaler, the actor that forwards requests to it would only cost seconds at the start.
        if not is_embedded():
            super()._maybe_send_resource_request()  # type: ignore[no-untyped-call]

    def _send_resource_request(self) -> None:
        if not is_embedded():
            super()._send_resource_request()  # type: ignore[no-untyped-call]

    def _cancel_resource_request(self) -> None:
        if not is_embedded():
            super()._cancel_resource_request()  # type: ignore[no-untyped-call]

    def make_decision_for_non_running_worker_group(self) -> ScalingDecision:
        """Start as many workers as fit on the nodes, or none if too few fit."""
        self._maybe_send_resource_request()
        placed = self.choose()
        if placed is None:
            return NoopDecision()
        return ResizeDecision(
            num_workers=sum(placed.values()), resources_per_worker=self.scaling_config._resources_per_worker_not_none
        )

    def choose(self) -> dict[str, int] | None:
        """Return the number of workers to start on each node, or None, after a pause, if too few fit."""
        placed = None
        # If the head does not respond, Ray Train's controller asks again.
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
            # Ray Train's controller asks again immediately, without a pause of its own.
            time.sleep(_LOOK_EVERY_S)
            return None
        if stop_requested(self._config.run_dir, self._session) == "resize":
            # If the request can't be removed now, the workers remove it when they start.
            with contextlib.suppress(OSError):
                clear_stop(self._config.run_dir, retry_s=_LOOK_EVERY_S)
        self._placed = placed
        return placed

    def make_decision_for_running_worker_group(
        self, worker_group_state: WorkerGroupState, worker_group_status: WorkerGroupPollStatus
    ) -> ScalingDecision:
        """Never resize running workers directly: a request makes them save and end first."""
        self._maybe_send_resource_request()
        return NoopDecision()

    def selectors(self) -> list[dict[str, str]]:
        """Return the label selector that pins each new worker to its node."""
        return [{RAY_NODE_ID_KEY: node} for node, workers in self._placed.items() for _ in range(workers)]

    def leave_out(self, broken: frozenset[str]) -> None:
        """Exclude nodes whose devices have failed, unless too few other nodes remain. Thread-safe."""
        self._broken |= broken

    def begin(self, announcement: Announcement, seats: Mapping[int, Seat]) -> None:
        """Record that a worker group has started and occupies its resources."""
        self._holds_room = True
        self._joining.begin(announcement, seats)

    def end(self) -> None:
        """Record that the worker group has ended and has released its resources."""
        self._holds_room = False
        self._joining.end()

    def polled(self, status: WorkerGroupPollStatus) -> None:
        """Ask the workers to end if a different number is better, and make Ray Train restart workers that ended."""
        statuses, group = status.worker_statuses.values(), self._coordinator.group
        # If all of Ray Train's workers are lost, only workers that joined later know how the attempt ended.
        ends = {one.return_value for one in statuses} | {None if group is None else group.status}
        if status.finished and RESIZED in ends:
            for one in statuses:
                # To Ray Train, workers that end without an error have finished the run.
                one.error = one.error or Resized("the workers restart at another number")
            return
        now = self._clock.monotonic()
        if not status.errors and now - self._looked_at >= _LOOK_EVERY_S:
            self._looked_at = now
            try:
                self._look(now)
            except (OSError, RuntimeError, RayError) as error:
                _log.debug("could not inspect the nodes: %s", error)
            except Exception:
                # An error here must not end Ray Train's controller; the number of workers stays the same.
                _log.exception("could not decide about the number of workers")

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
            # Losing an announced node does not count as a failure, even if its workers have not left it yet.
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
            # Earlier exclusions remain: a slow node is alive, and its worker would otherwise become a member again.
            left = announced | (frozenset(placed) - frozenset(nodes))
            self._coordinator.post(NodesUnusable(nodes=left, draining=left & draining))
            # If enough workers remain, they continue without new ones.
            if not self._fill(group, room, nodes, now):
                self._move()
        elif self._joining.are_awaited:
            if self._joining.have_joined(group, now):
                self._move()
        elif resize is not None:
            self._grow(group, resize.workers, room, nodes, now)

    def _fill(self, group: Group, room: Mapping[str, int], nodes: Mapping[str, Any], now: float) -> bool:
        """Start workers if too few remain, or wait for those already started; return whether any are about to join."""
        there = _present(group)
        if place_workers({node: there[node] for node in nodes}, self._demand.wanted) is not None:
            return False
        if self._joining.are_awaited and not self._joining.have_joined(group, now):
            return self._joining.are_awaited
        # The head learns of a lost node late, and a worker that dies there aborts the start of all. A stopped node
        # accepts connections, but starts a worker only after it has been resumed.
        answering = {node: room[node] for node in reachable(nodes)}
        others = {node: answering[node] for node in answering.keys() - group.silent}
        return any(self._start(group, self._demand.wanted, some, nodes, now) for some in (others, answering))

    def _start(
        self, group: Group, wanted: WorkerRange, room: Mapping[str, int], nodes: Mapping[str, Any], now: float
    ) -> bool:
        """Start the missing workers that fit on the nodes; return whether any were started."""
        there = _present(group)
        more = Counter(place_workers(room, wanted, there.keys())) - there
        if more:
            self._use_nodes({node: nodes[node]["NodeManagerAddress"] for node in more})
            self._joining.start(group, more, now)
        return bool(more)

    def _grow(self, group: Group, possible: int, room: Mapping[str, int], nodes: Mapping[str, Any], now: float) -> None:
        """Start more workers if that pays off; the others keep training until the new ones are ready."""
        pace = run_pace(self._config.run_dir)
        if pace is None or len(reachable(nodes)) < len(nodes):
            # The cost of growing is unknown, or the head still lists a lost node: consider growing again at the next
            # look.
            self._seen = replace(self._seen, grew_at=None)
            return
        if not is_worth_growing(len(group.members), possible, seconds_left=pace.seconds_left, restart_s=pace.start_s):
            return
        if not self._start(group, replace(self._demand.wanted, most=possible), room, nodes, now):
            # All workers that the larger size needs are already running.
            self._move()

    def _move(self) -> None:
        """Make the workers save and end, so that Ray Train restarts with the best number of workers."""
        self._coordinator.post(MoveAsked())
        request_stop(self._config.run_dir, self._session, "resize")

    def _steady(self) -> dict[str, Any]:
        """Return the nodes that are not draining, without broken and slow nodes if excluding those pays off."""
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
        """Return the number of workers that fit on each node, counting the resources of `held` workers as free."""
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
    """Return the nodes on which Ray accepts connections. The cluster's head is slow to notice a lost node."""
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
    """Actor of a worker that is started outside Ray Train's group."""

    def gpus(self) -> list[str]:
        """Return the IDs of the GPUs that Ray assigned to this worker."""
        return [str(one) for one in ray.get_gpu_ids()]

    def supervise(
        self, job: Mapping[str, Any], announcement: Announcement, worker: int, local_rank: int, shown: list[str]
    ) -> str:
        """Supervise this worker's attempts as Ray Train's workers do, but join only once a child can start.

        Args:
            job: See `ray_ulysses.cluster.worker.train_worker`.
            announcement: Connection details of the coordinator.
            worker: Worker number.
            local_rank: Index of the worker on its node.
            shown: GPUs of all workers that start on this node at the same time. NCCL accesses visible GPUs directly,
                and the GPUs of earlier workers through host memory.
        """
        if shown:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(shown)
        return supervise(job, announcement, worker, local_rank, joins_late=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """A worker's slot in Ray Train's group."""

    node: str
    actor: Any
    strategy: Any
    """Scheduling strategy that starts a replacement in the same slot."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Joining:
    """Workers that were started together, some of which have not joined yet."""

    actors: Mapping[int, Any]
    asked: Mapping[int, Any]
    """References to the lists of the workers' GPU IDs, by worker number; available once a worker has its resources."""
    nodes: Mapping[int, str]
    until: float
    """Monotonic time at which the wait for the workers ends."""
    running: dict[int, Any]
    """References to the results of the `supervise` calls of workers that are already supervising, by worker number."""


class JoiningWorkers:
    """Workers that have joined, or are joining, one worker group."""

    def __init__(self, job: Mapping[str, Any], demand: Demand, patience_s: float) -> None:
        self._job, self._demand, self._patience_s = job, demand, patience_s
        self._announcement: Announcement | None = None
        # Includes Ray Train's own workers.
        self._actors: dict[int, Any] = {}
        self._seats: dict[int, Seat] = {}
        self._vacant: list[Seat] = []
        self._nodes: dict[int, str] = {}
        self._joining: _Joining | None = None
        self._next = 0

    @property
    def beside(self) -> Counter[str]:
        """Number of workers outside Ray Train's slots, by node ID."""
        return Counter(node for number, node in self._nodes.items() if number not in self._seats)

    @property
    def vacant(self) -> Counter[str]:
        """Number of Ray Train's slots whose workers are lost, by node ID."""
        return Counter(seat.node for seat in self._vacant)

    @property
    def are_awaited(self) -> bool:
        """Whether any worker that was started has not joined yet."""
        return self._joining is not None

    def begin(self, announcement: Announcement, seats: Mapping[int, Seat]) -> None:
        """Store the coordinator's connection details for a new worker group, and the slots of Ray Train's workers."""
        self._announcement, self._seats = announcement, dict(seats)
        self._actors = {number: seat.actor for number, seat in seats.items()}

    def start(self, group: Group, places: Mapping[str, int], now: float) -> None:
        """Start workers, without waiting for them."""
        # Never reuse a number: a lost worker may only be cut off, and reconnect.
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
        """Return the Ray options that start a worker on a node, in a vacant slot of Ray Train's group if possible."""
        seat = next((one for one in self._vacant if one.node == node), None)
        if seat is None:
            return {"label_selector": {RAY_NODE_ID_KEY: node}}
        self._vacant.remove(seat)
        self._seats[number] = seat
        return {"scheduling_strategy": seat.strategy}

    def have_joined(self, group: Group, now: float) -> bool:
        """Advance the start of new workers; return whether all of them have joined but are not yet members."""
        joining = self._joining
        assert joining is not None
        try:
            self._go_on(joining, group)
        except RayError as error:
            return self._give_up(joining, group, str(error).splitlines()[0])
        if all(number in group.workers and group.workers[number].is_there for number in joining.nodes):
            self._actors |= joining.actors
            self._joining = None
            # A fault may already have made them members.
            return not joining.nodes.keys() <= set(group.members)
        return self._give_up(joining, group, "they did not start in time") if now >= joining.until else False

    def _go_on(self, joining: _Joining, group: Group) -> None:
        """Make the new workers supervise once all of them have their resources."""
        if joining.running:
            ended, _ = ray.wait(list(joining.running.values()), timeout=0)
            ray.get(ended)
            return
        _, missing = ray.wait(list(joining.asked.values()), num_returns=len(joining.asked), timeout=0)
        if missing:
            return
        gpus = dict(zip(joining.asked, ray.get(list(joining.asked.values())), strict=True))
        others = (one.place for number, one in group.workers.items() if number not in joining.nodes)
        num_before = Counter(place.node for place in others if place is not None)
        by_node: dict[str, list[int]] = {}
        for number, node in joining.nodes.items():
            by_node.setdefault(node, []).append(number)
        for node, here in by_node.items():
            shown = sorted((one for number in here for one in gpus[number]), key=lambda one: (len(one), one))
            for local_rank, number in enumerate(here, num_before[node]):
                joining.running[number] = joining.actors[number].supervise.remote(
                    self._job, self._announcement, number, local_rank, shown
                )

    def _give_up(self, joining: _Joining, group: Group, reason: str) -> bool:
        _log.warning("%d additional workers did not join: %s", len(joining.actors), reason)
        # A fault may meanwhile have made members of the workers that did join.
        self._actors |= {number: actor for number, actor in joining.actors.items() if number in group.members}
        self._joining = None
        self._end({number: actor for number, actor in joining.actors.items() if number not in group.members})
        return False

    def forget(self, lost: Collection[int]) -> None:
        """End lost workers, whose processes may merely be stopped (SIGSTOP), and free their slots."""
        self._end({number: self._actors.pop(number) for number in self._actors.keys() & lost})

    def _end(self, actors: Mapping[int, Any]) -> None:
        _kill(actors)
        for number in actors:
            self._nodes.pop(number, None)
            if number in self._seats:
                self._vacant.append(self._seats.pop(number))

    def end(self) -> None:
        """End all workers started here, because the worker group has ended."""
        _kill({number: actor for number, actor in self._actors.items() if number in self._nodes})
        if self._joining is not None:
            _kill(self._joining.actors)
        self._actors, self._seats, self._vacant, self._nodes = {}, {}, [], {}
        self._joining, self._announcement, self._next = None, None, 0


def _kill(actors: Mapping[int, Any]) -> None:
    for actor in actors.values():
        with contextlib.suppress(RayError, ValueError, RuntimeError):
            ray.kill(actor)
