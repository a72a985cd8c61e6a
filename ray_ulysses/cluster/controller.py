"""Runs Ray Train's controller with a coordinator beside it, which handles most failures without Ray.

Ray Train 2.60 has no public way to replace its policies, to choose nodes, to see its polls before they are judged, or
to end its wait for the workers. This file, `scaling` and `train_job` therefore use its private seams:
``_initialize_and_run_controller``, which `WatchedTrainer` reimplements, and the hooks of a `WorkerGroupCallback`
(a canary test covers them). Each worker's Ray process imports this file, without PyTorch.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError
from ray.train.backend import BackendConfig
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.execution.callback import WorkerGroupCallback
from ray.train.v2._internal.execution.controller import TrainController
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ray_ulysses.clock import Clock, SystemClock
from ray_ulysses.cluster.capacity import Demand
from ray_ulysses.cluster.failures import FailureJudge, FailureLog, Noticed, rank_error
from ray_ulysses.cluster.peer_memory_agents import NodeMemory
from ray_ulysses.cluster.scaling import Seat, WorkerScaling, reachable
from ray_ulysses.cluster.session import host_of, steady_nodes
from ray_ulysses.cluster.worker import announce
from ray_ulysses.elastic import reform
from ray_ulysses.elastic.causes import root_cause
from ray_ulysses.elastic.reform import end_bound_s
from ray_ulysses.logging import get_logger
from ray_ulysses.planner.memory import run_memory
from ray_ulysses.run.secrets_file import use_secrets
from ray_ulysses.supervision.coordinator import Coordinator, hang_limits
from ray_ulysses.supervision.order import StopTimer, process_state
from ray_ulysses.tracking.failures import record_hang

if TYPE_CHECKING:
    from ray.air.config import ScalingConfig
    from ray.train.v2._internal.execution.scaling_policy import ScalingPolicy
    from ray.train.v2._internal.execution.worker_group import WorkerGroupContext, WorkerGroupPollStatus

    from ray_ulysses.run.settings import ResolvedRun
    from ray_ulysses.supervision.supervisor import Announcement

_STOPPED_S = 3.0
"""Supervisors treat a coordinator that is silent for ten seconds as gone."""
_log = get_logger(__name__)


class WorkerGroupWatch(WorkerGroupCallback):
    """Reports worker groups to the coordinator, and hides failures from Ray that the coordinator handles."""

    def __init__(
        self,
        run: ResolvedRun,
        book: FailureLog,
        judge: FailureJudge,
        job: Mapping[str, Any],
        scaling_config: ScalingConfig,
    ) -> None:
        self._clock, self._wanted, self._judge = SystemClock(), Demand.of(run).wanted, judge
        self._memory = NodeMemory(run.config)
        self._gone: frozenset[str] = frozenset()
        self._addresses: dict[str, str] = {}
        self.coordinator = Coordinator(
            self._decide,
            host_of(ray.util.get_node_ip_address()),
            gather_s=run.config.elastic.worker_start_timeout_s,
            memory=lambda nodes: self._memory.of(nodes, self._gone),
            limits=hang_limits(run.config),
            record_hang=partial(record_hang, run.config.run_dir, writer=book.writer),
            end_s=end_bound_s(run_memory(run.config, run.shape).host_bytes),
        )
        self.scaling = WorkerScaling(run, job, scaling_config, self.coordinator, self._use_nodes)

    def before_worker_group_start(self, worker_group_context: WorkerGroupContext) -> None:
        """Put each worker on its chosen node."""
        object.__setattr__(worker_group_context, "label_selector", self.scaling.selectors())

    def after_worker_group_start(self, worker_group: Any) -> None:
        """Announce the coordinator to the workers, and count their places."""
        places = worker_group.get_worker_group_state().placement_group_handle.placement_group
        addresses, seats = {}, {}
        for rank, worker in enumerate(worker_group.get_workers()):
            node = worker.metadata.node_id
            strategy = PlacementGroupSchedulingStrategy(places, worker.placement_group_bundle_index)
            addresses[node] = worker.metadata.node_ip
            seats[rank] = Seat(node=node, actor=worker.actor, strategy=strategy)
        worker_group.execute(announce, self.begin(addresses, seats))

    def begin(self, addresses: Mapping[str, str], seats: Mapping[int, Seat]) -> Announcement:
        """Coordinate new workers from now on, and return how they reach their coordinator.

        Args:
            addresses: The addresses of their nodes, by id.
            seats: The place of each worker that Ray Train has started, by its rank.
        """
        self._judge.forget()
        self._addresses = {node: host_of(address) for node, address in addresses.items()}
        self._memory.prepare(self._addresses)
        announcement = self.coordinator.begin({rank: seat.node for rank, seat in seats.items()}, self._wanted)
        self.scaling.begin(announcement, seats)
        return announcement

    def after_worker_group_shutdown(self, worker_group_context: WorkerGroupContext) -> None:
        """Count the places as free again, also after an abort."""
        self.coordinator.end()
        self.scaling.end()

    after_worker_group_abort = after_worker_group_shutdown

    def after_worker_group_poll_status(self, worker_group_status: WorkerGroupPollStatus) -> None:
        """Hide lost workers that are not needed: to Ray they have ended."""
        group = self.coordinator.group
        if group is not None and group.gave_up:
            self._judge.leave_to_ray()
        elif group is not None and group.phase != "gathering":
            for worker, status in worker_group_status.worker_statuses.items():
                # A stopped supervisor answers neither Ray nor us; Ray waits for it for minutes.
                is_silent = group.phase == "ended" and group.workers[worker].is_lost
                if status.error is None and not is_silent:
                    continue
                if status.error is not None and not group.workers[worker].is_lost:
                    what = rank_error(worker, status.error).what
                    self.coordinator.post(reform.WorkerLost(worker=worker, what=what))
                # Nothing has failed or ended until the coordinator has decided what follows.
                is_missed = group.workers[worker].is_lost and group.phase == "training"
                status.running, status.error = not (is_missed or group.phase == "ended"), None
            if group.phase == "training":
                self._memory.keep(self._living())
            statuses = worker_group_status.worker_statuses
            if group.phase != "ended" and not any(status.running for status in statuses.values()):
                # Workers that joined later keep training.
                statuses[0].running = True
        self.scaling.polled(worker_group_status)

    def _use_nodes(self, addresses: Mapping[str, str]) -> None:
        self._addresses |= {node: host_of(address) for node, address in addresses.items()}
        self._gone -= addresses.keys()
        self._memory.prepare(self._living())

    def _living(self) -> dict[str, str]:
        return {node: host for node, host in self._addresses.items() if node not in self._gone}

    def _decide(self, question: reform.Judge, group: reform.Group) -> tuple[reform.NodesUnusable, bool]:
        """Record the failure of a generation; return nodes that can't be used, and whether the run may continue."""
        unusable = reform.NodesUnusable(nodes=group.unusable, draining=group.draining)
        self.scaling.leave_out(group.broken)
        with contextlib.suppress(OSError, RuntimeError, RayError):
            known = {worker.place.node for worker in group.workers.values() if worker.place is not None}
            alive = reachable({one["NodeID"]: one for one in ray.nodes() if one["Alive"]}).keys()
            # Excluded slow nodes are alive and stay excluded; a node that was briefly out of reach does not.
            stay = (group.unusable - self._gone) & alive
            # A stopped node accepts connections and answers none: each request to its memory would time out.
            self._gone = frozenset(known - alive) | group.silent
            nodes = stay | (known - (alive & steady_nodes().keys()))
            unusable = reform.NodesUnusable(nodes=nodes, draining=nodes & alive - self._gone)
            self._memory.prepare(self._living())
        noticed = Noticed(
            memory_step=self._memory.newest_step(self._gone),
            ago_s=self._clock.monotonic() - group.fault_at,
            silent_s=max((error.silent_s for error in question.errors), default=0.0),
        )
        return unusable, self._judge.judge(root_cause(question.errors, is_final=question.is_final), noticed)


class SupervisedController(TrainController):
    """Ray Train's controller with a coordinator of the workers beside it."""

    def __init__(
        self,
        *,
        run: ResolvedRun,
        book: FailureLog,
        job: Mapping[str, Any],
        callbacks: list[Any],
        scaling_policy: ScalingPolicy,
        **options: Any,
    ) -> None:
        if not isinstance(run.config.run_dir, Path):
            # Ray started this process with its node's environment.
            use_secrets(run.config, is_needed=False)
        judge = FailureJudge(book)
        watch = WorkerGroupWatch(run, book, judge, job, scaling_policy.scaling_config)
        options |= {"scaling_policy": watch.scaling, "failure_policy": judge}
        # Ray Train 2.60 removes the workers' placement group once its state API does not know the controller, and asks
        # the API of the cluster that was started last on the machine. Ours ends with the command's job anyway.
        others = [one for one in callbacks if not isinstance(one, PlacementGroupCleanerCallback)]
        super().__init__(callbacks=[*others, watch], **options)

    async def process(self) -> tuple[int, int]:
        """Return the id of its process, and the namespace of that id."""
        return os.getpid(), _namespace()


class StopWatch:
    """Continues a stopped (SIGSTOP) process of this machine, since its callers would wait forever.

    Workers keep training while Ray Train's controller is stopped; a new controller would have to restart them all.

    Args:
        pid: The process.
        namespace: The PID namespace of its id; a process of another container is left alone.
        clock: Time.
    """

    def __init__(self, pid: int, namespace: int, clock: Clock | None = None) -> None:
        self._pid, self._clock = pid, clock or SystemClock()
        self._is_here, self._timer = namespace == _namespace(), StopTimer(_STOPPED_S)

    def look(self) -> None:
        """Continue it if it has been stopped for a while; call often."""
        is_stopped = self._is_here and process_state(self._pid) == "T"
        if self._timer.is_up(self._clock.monotonic(), is_stopped=is_stopped):
            _log.warning("the process of Ray Train's controller was stopped (SIGSTOP), and is continued")
            with contextlib.suppress(OSError):
                os.kill(self._pid, signal.SIGCONT)


def _namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


class NoProcessGroup(BackendConfig):
    """Sets nothing up in the workers of a `TorchTrainer`: their children join process groups of their own."""

    backend = "none"
