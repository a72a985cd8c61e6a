"""Chooses how many workers Ray Train starts, on which nodes, and when they are started again at another number.

Each start takes as many workers as the nodes have room for at that moment, within `cluster.workers`. While they train,
nodes that join may make a larger number worth a restart, and nodes that are being drained make a smaller one necessary:
then the workers are asked to save and to end, which loses no step, and are started again.

Ray Train 2.60 has no public way to replace its scaling policy or to choose nodes. The seams used here are private:
the scaling policy of a `TrainController`, the context of a worker group before it starts, and its polls (canary tests
stand beside them).
"""

from __future__ import annotations

import contextlib
import math
import socket
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from ray._private import state
from ray._raylet import RAY_NODE_ID_KEY  # type: ignore[attr-defined]
from ray.exceptions import RayError
from ray.train.v2._internal.execution.scaling_policy import NoopDecision, ResizeDecision, ScalingPolicy

from ray_ulysses.clock import Clock, SystemClock
from ray_ulysses.cluster.capacity import Demand, Node, node_of, room_for_workers
from ray_ulysses.cluster.joining import JoiningWorkers, Seat
from ray_ulysses.cluster.session import draining_nodes, steady_nodes
from ray_ulysses.elastic.placement import WorkerRange, place_workers
from ray_ulysses.elastic.reform import Group, MoveAsked, NodesUnusable, NoReplacement
from ray_ulysses.elastic.sizing import Sizing, decide_resize, decide_start, is_worth_growing
from ray_ulysses.elastic.stragglers import nodes_to_use
from ray_ulysses.errors import RunError
from ray_ulysses.logging import get_logger
from ray_ulysses.run.requests import clear_stop, excluded_nodes, request_save, request_stop, stop_requested
from ray_ulysses.tracking.events import RESIZED
from ray_ulysses.tracking.pace import run_pace

if TYPE_CHECKING:
    from ray.air.config import ScalingConfig
    from ray.train.v2._internal.execution.scaling_policy import ScalingDecision
    from ray.train.v2._internal.execution.worker_group import WorkerGroupPollStatus, WorkerGroupState

    from ray_ulysses.run.settings import ResolvedRun
    from ray_ulysses.supervision.channel import Announcement
    from ray_ulysses.supervision.coordinator import Coordinator

_log = get_logger(__name__)
_LOOK_EVERY_S = 1.0
_PING_S = 2.0
"""A node whose Ray takes no connection within this time is gone, even if the cluster's head does not know it yet."""


class Resized(RunError):
    """The workers have saved and ended, and are to be started again; not a failure."""


class WorkerScaling(ScalingPolicy):
    """Ray Train's scaling policy of an elastic run, in whole sequence-parallel groups; it lives in Ray's controller.

    Args:
        run: The run.
        job: What every worker is given; its ``session`` is the command's name, which requests to workers carry.
        scaling_config: Ray Train's, for its requests to an autoscaler.
        clock: Time.
    """

    def __init__(
        self, run: ResolvedRun, job: Mapping[str, Any], scaling_config: ScalingConfig, clock: Clock | None = None
    ) -> None:
        super().__init__(cast("Any", scaling_config))
        self._config, self._session, self._clock = run.config, str(job["session"]), clock or SystemClock()
        self._demand = Demand.of(run)
        self._joining = JoiningWorkers(job, self._demand, run.config.elastic.worker_start_timeout_s)
        self._placed: dict[str, int] = {}
        self._holds_room = False
        self._coordinator: Coordinator | None = None
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
            self._seen, placed = decide_start(
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
        """Change nothing under workers that train: they are asked to save and to end."""
        self._maybe_send_resource_request()  # type: ignore[no-untyped-call]
        return NoopDecision()

    def selectors(self) -> list[dict[str, str]]:
        """Return the label selector of each worker that is about to start: the node that was chosen for it."""
        return [{RAY_NODE_ID_KEY: node} for node, workers in self._placed.items() for _ in range(workers)]

    def coordinate(self, coordinator: Coordinator, use_nodes: Callable[[Mapping[str, str]], object]) -> None:
        """Follow the members that this coordinator chooses among the workers.

        Args:
            coordinator: The coordinator.
            use_nodes: Prepares nodes that the run has not used yet, given their addresses by node id.
        """
        self._coordinator, self._use_nodes = coordinator, use_nodes

    def leave_out(self, broken: frozenset[str]) -> None:
        """Do without nodes whose devices have failed, unless the others are too few; any thread may call."""
        self._broken |= broken

    def begin(self, announcement: Announcement, seats: Mapping[int, Seat]) -> None:
        """Note that a worker group has started, and holds its places."""
        self._holds_room = True
        self._joining.begin(announcement, seats)

    def end(self) -> None:
        """Note that the worker group has ended: its places are free for the one that replaces it."""
        self._holds_room = False
        self._joining.end()

    def polled(self, status: WorkerGroupPollStatus) -> None:
        """Ask the workers to end where another number is better, and have those that did started again."""
        statuses = status.worker_statuses.values()
        group = None if self._coordinator is None else self._coordinator.group
        # All of Ray's workers may be lost, and only others have seen the end.
        ends = {one.return_value for one in statuses} | {None if group is None else group.status}
        if status.finished and RESIZED in ends:
            for one in statuses:
                # To Ray Train, workers that end without an error have finished the run.
                one.error = one.error or Resized("the workers are started again at another number")
            return
        if not status.errors:
            self.look()

    def look(self, *, fills_only: bool = False) -> None:
        """Ask the workers to end where another number is better; called often.

        Args:
            fills_only: Whether to replace lost workers only.
        """
        now = self._clock.monotonic()
        if now - self._looked_at >= _LOOK_EVERY_S:
            self._looked_at = now
            try:
                self._look(now, fills_only=fills_only)
            except (OSError, RuntimeError, RayError) as error:
                _log.debug("the nodes can't be looked at now: %s", error)
            except Exception:
                # The number of workers stays; Ray's controller must not end of it.
                _log.exception("the number of workers can't be looked at")

    def _look(self, now: float, *, fills_only: bool) -> None:
        config, group = self._config, None if self._coordinator is None else self._coordinator.group
        if self._coordinator is None or group is None or group.phase not in ("training", "short"):
            return
        self._joining.forget({number for number, worker in group.workers.items() if worker.is_lost})
        if fills_only and group.phase == "training":
            if self._joining.are_awaited:
                self._joining.have_joined(group, now)
            return
        placed, nodes, draining = group.num_placed, self._steady(), draining_nodes()
        there, free, vacant = _present(group), self._room(nodes, {}), self._joining.vacant
        room = {node: there[node] + free[node] + vacant[node] for node in nodes}
        if group.phase == "short":
            if not self._fill(group, room, nodes, now):
                self._coordinator.post(NoReplacement())
            return
        new = (draining & placed.keys()) - group.unusable
        announced = group.unusable | new
        if new:
            # The loss of such a node is not charged, even where it goes before the others have left it.
            self._coordinator.post(NodesUnusable(nodes=announced, draining=announced & draining))
            if new & self._joining.placed.keys() and place_workers(room, self._demand.wanted) is None:
                # Ray tells only workers of its own group, and these have nowhere to go.
                request_save(config.run_dir)
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
            # Those that were left before stay so: a slow node is alive, and its worker would be taken back.
            left = announced | (frozenset(placed) - frozenset(nodes))
            self._coordinator.post(NodesUnusable(nodes=left, draining=left & draining))
            # The workers that stay go on by themselves if they are enough.
            if not self._fill(group, room, nodes, now):
                self._move()
        elif self._joining.are_awaited:
            if self._joining.have_joined(group, now):
                self._move()
        elif resize is not None:
            self._grow(group, resize.workers, room, nodes, now)

    def _fill(self, group: Group, room: Mapping[str, int], nodes: Mapping[str, Any], now: float) -> bool:
        """Start workers if too few are left, or wait for those that were started; return whether any are on the way."""
        there = _present(group)
        if place_workers({node: there[node] for node in nodes}, self._demand.wanted) is not None:
            return False
        if self._joining.are_awaited and not self._joining.have_joined(group, now):
            return self._joining.are_awaited
        # The head learns late of a node that is gone, and one worker that dies there is the end of all that start. A
        # stopped node takes connections, and a worker starts there only when the node goes on.
        answering = {node: room[node] for node in reachable(nodes)}
        others = {node: answering[node] for node in answering.keys() - group.silent}
        return any(self._start(group, self._demand.wanted, some, nodes, now) for some in (others, answering))

    def _start(
        self, group: Group, wanted: WorkerRange, room: Mapping[str, int], nodes: Mapping[str, Any], now: float
    ) -> bool:
        """Have as many workers join as are missing; return whether any are and there is room for them."""
        there = _present(group)
        more = Counter(place_workers(room, wanted, there.keys())) - there
        if more:
            self._use_nodes({node: nodes[node]["NodeManagerAddress"] for node in more})
            self._joining.start(group, more, now)
        return bool(more)

    def _grow(self, group: Group, possible: int, room: Mapping[str, int], nodes: Mapping[str, Any], now: float) -> None:
        """Have workers join where that pays; the others train on until they are ready."""
        pace = run_pace(self._config.run_dir)
        if pace is None or len(reachable(nodes)) < len(nodes):
            # Nothing is known of what growth costs, or the head does not know yet of a node that is gone: this look
            # does not count.
            self._seen = replace(self._seen, grew_at=None)
            return
        workers = len(group.members)
        if not is_worth_growing(workers, possible, seconds_left=pace.seconds_left, restart_s=pace.start_s):
            return
        if not self._start(group, replace(self._demand.wanted, most=possible), room, nodes, now):
            # All that it takes are there.
            self._move()

    def _move(self) -> None:
        """Have the workers save and end; they form again, at the number that is best then."""
        assert self._coordinator is not None
        self._coordinator.post(MoveAsked())
        request_stop(self._config.run_dir, self._session, "resize")

    def _steady(self) -> dict[str, Any]:
        """Return the nodes that stay, without broken and slow ones that the run is to do without, where that pays."""
        nodes = steady_nodes()
        self._slow |= excluded_nodes(self._config.run_dir, self._session) | dict.fromkeys(self._broken, math.inf)
        if not self._slow.keys() & nodes.keys():
            return nodes

        def workers(some: Collection[str]) -> int:
            room = self._room({node: nodes[node] for node in some}, self._held)
            return sum((place_workers(room, self._demand.wanted) or {}).values())

        group = None if self._coordinator is None else self._coordinator.group
        usable = nodes_to_use(nodes, self._slow, () if group is None else group.num_placed, workers)
        return {node: nodes[node] for node in usable}

    @property
    def _held(self) -> Mapping[str, int]:
        """The places of the present workers."""
        return Counter(self._placed if self._holds_room else {}) + self._joining.beside

    def _room(self, nodes: Mapping[str, Any], held: Mapping[str, int]) -> dict[str, int]:
        """Return how many workers each node has room for, with places that are held taken as free."""
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
    """Return how many workers that could train each node holds."""
    return Counter(one.place.node for one in group.workers.values() if one.place is not None and one.is_there)


def reachable(nodes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the nodes whose Ray takes a connection: the cluster's head learns late of one that is gone."""
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
