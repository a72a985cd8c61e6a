"""Extends Ray Train's controller with our coordinator, which recovers from most failures without Ray Train.

Ray Train 2.60 has no public API to replace the controller's policies, choose nodes, intercept worker polls, or abort
the wait for workers. This module, `scaling` and `train_job` therefore use private APIs:
``_initialize_and_run_controller``, which `WatchedTrainer` overrides, and the `WorkerGroupCallback` hooks (a canary test
covers them). Every Ray worker process imports this module, so it must not import PyTorch.
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
from ray._raylet import RAY_NODE_ID_KEY  # type: ignore[attr-defined]
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
"""Seconds until a stopped controller is resumed. Supervisors give up on a coordinator after 10 s of silence."""
_log = get_logger(__name__)


class WorkerGroupWatch(WorkerGroupCallback):
    """Reports worker groups to the coordinator, and hides failures that the coordinator handles from Ray Train."""

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
        """Pin each worker to the node chosen for it, and start peer memory agents on these nodes meanwhile."""
        selectors, nodes = self.scaling.selectors(), steady_nodes()
        object.__setattr__(worker_group_context, "label_selector", selectors)
        chosen = {one[RAY_NODE_ID_KEY] for one in selectors} & nodes.keys()
        self._memory.prepare({node: host_of(nodes[node]["NodeManagerAddress"]) for node in chosen})

    def after_worker_group_start(self, worker_group: Any) -> None:
        """Send the coordinator's address to the workers, and record where each worker runs."""
        places = worker_group.get_worker_group_state().placement_group_handle.placement_group
        addresses, seats = {}, {}
        for rank, worker in enumerate(worker_group.get_workers()):
            node = worker.metadata.node_id
            strategy = PlacementGroupSchedulingStrategy(places, worker.placement_group_bundle_index)
            addresses[node] = worker.metadata.node_ip
            seats[rank] = Seat(node=node, actor=worker.actor, strategy=strategy)
        worker_group.execute(announce, self.begin(addresses, seats))

    def begin(self, addresses: Mapping[str, str], seats: Mapping[int, Seat]) -> Announcement:
        """Start coordinating a new worker group, and return the coordinator's connection details for its workers.

        Args:
            addresses: Addresses of the workers' nodes, by node ID.
            seats: Slot of each worker that Ray Train started, by rank.
        """
        self._judge.forget()
        self._addresses = {node: host_of(address) for node, address in addresses.items()}
        self._memory.prepare(self._addresses)
        announcement = self.coordinator.begin({rank: seat.node for rank, seat in seats.items()}, self._wanted)
        self.scaling.begin(announcement, seats)
        return announcement

    def after_worker_group_shutdown(self, worker_group_context: WorkerGroupContext) -> None:
        """Stop coordinating the worker group, whether it was shut down or aborted."""
        self.coordinator.end()
        self.scaling.end()

    after_worker_group_abort = after_worker_group_shutdown

    def after_worker_group_poll_status(self, worker_group_status: WorkerGroupPollStatus) -> None:
        """Report lost workers to Ray Train as finished if the run continues without them."""
        group = self.coordinator.group
        if group is not None and group.gave_up:
            self._judge.leave_to_ray()
        elif group is not None and group.phase != "gathering":
            for worker, status in worker_group_status.worker_statuses.items():
                # A stopped supervisor answers neither Ray Train nor the coordinator, and Ray Train waits minutes for
                # it.
                is_silent = group.phase == "ended" and group.workers[worker].is_lost
                if status.error is None and not is_silent:
                    continue
                if status.error is not None and not group.workers[worker].is_lost:
                    what = rank_error(worker, status.error).what
                    self.coordinator.post(reform.WorkerLost(worker=worker, what=what))
                # Ray Train must see neither a failure nor an end before the coordinator has decided how to continue.
                is_missed = group.workers[worker].is_lost and group.phase == "training"
                status.running, status.error = not (is_missed or group.phase == "ended"), None
            if group.phase == "training":
                self._memory.keep(self._living())
            statuses = worker_group_status.worker_statuses
            if group.phase != "ended" and not any(status.running for status in statuses.values()):
                # Ray Train does not know the workers that joined later and still train: its group must not look
                # finished.
                statuses[0].running = True
        self.scaling.polled(worker_group_status)

    def _use_nodes(self, addresses: Mapping[str, str]) -> None:
        self._addresses |= {node: host_of(address) for node, address in addresses.items()}
        self._gone -= addresses.keys()
        self._memory.prepare(self._living())

    def _living(self) -> dict[str, str]:
        return {node: host for node, host in self._addresses.items() if node not in self._gone}

    def _decide(self, question: reform.Judge, group: reform.Group) -> tuple[reform.NodesUnusable, bool]:
        """Record a generation's failure, and return the unusable nodes and whether the run may continue."""
        unusable = reform.NodesUnusable(nodes=group.unusable, draining=group.draining)
        self.scaling.leave_out(group.broken)
        with contextlib.suppress(OSError, RuntimeError, RayError):
            known = {worker.place.node for worker in group.workers.values() if worker.place is not None}
            alive = reachable({one["NodeID"]: one for one in ray.nodes() if one["Alive"]}).keys()
            # Slow nodes are alive and stay excluded; nodes that were only briefly unreachable become usable again.
            stay = (group.unusable - self._gone) & alive
            # A stopped node accepts connections but never answers: every request to its peer memory would time out.
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
    """Ray Train's controller, extended with a coordinator for the workers."""

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
            # Ray started this process with the node's environment, which may lack the secrets.
            use_secrets(run.config, is_needed=False)
        judge = FailureJudge(book)
        watch = WorkerGroupWatch(run, book, judge, job, scaling_policy.scaling_config)
        options |= {"scaling_policy": watch.scaling, "failure_policy": judge}
        # This Ray Train 2.60 callback removes the placement group when the state API does not list the controller, but
        # it queries the cluster that was started last on this machine. Our placement group ends with the command's job.
        others = [one for one in callbacks if not isinstance(one, PlacementGroupCleanerCallback)]
        super().__init__(callbacks=[*others, watch], **options)

    async def process(self) -> tuple[int, int]:
        """Return the controller's process ID and PID namespace."""
        return os.getpid(), _namespace()


class StopWatch:
    """Resumes a local process that was stopped (SIGSTOP), because callers would wait for the process forever.

    Workers keep training while Ray Train's controller is stopped; a new controller would have to restart them all.

    Args:
        pid: Process ID.
        namespace: PID namespace of the process; a process in another container is not resumed.
        clock: Time source.
    """

    def __init__(self, pid: int, namespace: int, clock: Clock | None = None) -> None:
        self._pid, self._clock = pid, clock or SystemClock()
        self._is_here, self._timer = namespace == _namespace(), StopTimer(_STOPPED_S)

    def look(self) -> None:
        """Resume the process if it has been stopped for a while; call this method often."""
        is_stopped = self._is_here and process_state(self._pid) == "T"
        if self._timer.is_up(self._clock.monotonic(), is_stopped=is_stopped):
            _log.warning("Ray Train's controller process was stopped (SIGSTOP), and is resumed")
            with contextlib.suppress(OSError):
                os.kill(self._pid, signal.SIGCONT)


def _namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


class NoProcessGroup(BackendConfig):
    """A `TorchTrainer` backend that sets up nothing: the workers' child processes create the process groups."""

    backend = "none"
