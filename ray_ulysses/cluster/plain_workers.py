"""Runs the workers of a run by Ray's public API alone, where the installed Ray Train lacks what `seams` looks for.

The workers form again after failures, and are started again at another number, as they are under Ray Train's
controller. An announcement that a node will be taken away reaches a run of a fixed number of workers only as its loss.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayActorError, RayError
from ray.train.v2._internal.execution.failure_handling import FailureDecision
from ray.train.v2.api.exceptions import TrainingFailedError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ray_ulysses.cluster.controller import WorkerGroupWatch
from ray_ulysses.cluster.failures import FailureBook, FailureJudge, rank_error
from ray_ulysses.cluster.joining import JoinedWorker
from ray_ulysses.elastic import reform
from ray_ulysses.tracking.events import RESIZED

if TYPE_CHECKING:
    from ray_ulysses.cluster.scaling import WorkerScaling
    from ray_ulysses.run.settings import ResolvedRun

_LOOK_EVERY_S = 0.2


class PlainWorkers:
    """Starts the workers, and starts them again until the run ends.

    Args:
        run: The run.
        book: Judges failures.
        scaling: Decides how many workers start, and on which nodes.
        look: Called a few times a second; an error that it raises ends the workers.
        job: What every worker is given.
    """

    def __init__(
        self,
        *,
        run: ResolvedRun,
        book: FailureBook,
        scaling: WorkerScaling,
        look: Callable[[], object],
        job: dict[str, Any],
    ) -> None:
        self._cluster, self._scaling, self._look, self._job = run.config.cluster, scaling, look, job
        self._judge = FailureJudge(book)
        self._watch = WorkerGroupWatch(run, book, self._judge, scaling)

    def fit(self) -> None:
        """Run the workers until the run ends.

        Raises:
            TrainingFailedError: The workers are not started again.
        """
        try:
            while True:
                try:
                    if self._train(self._placed()) != RESIZED:
                        return
                except RayError as error:
                    if self._judge.make_decision(error) is FailureDecision.RAISE:
                        raise TrainingFailedError(str(error)) from error
        finally:
            self._watch.coordinator.close()

    def _placed(self) -> list[str]:
        """Return the node of each worker that is to be started, as soon as there is room for enough of them."""
        while (placed := self._scaling.choose()) is None:
            self._look()
        return [node for node, workers in placed.items() for _ in range(workers)]

    def _train(self, nodes: Sequence[str]) -> str | None:
        """Run one group of workers to its end, and return how it ended.

        Raises:
            RayError: A worker has failed, and the others can't go on without it.
        """
        addresses = {one["NodeID"]: one["NodeManagerAddress"] for one in ray.nodes() if one["NodeID"] in nodes}
        announcement = self._watch.begin(dict(enumerate(nodes)), addresses, {})
        actors, running = [], {}
        try:
            for rank, node in enumerate(nodes):
                actors.append(self._start(node))
                local_rank = nodes[:rank].count(node)
                running[actors[-1].supervise.remote(self._job, announcement, rank, local_rank, [])] = rank
            return self._wait(running)
        finally:
            self._watch.end()
            for actor in actors:
                ray.kill(actor)

    def _start(self, node: str) -> Any:
        actor: Any = ray.remote(JoinedWorker)
        return actor.options(
            num_cpus=self._cluster.cpus_per_worker,
            num_gpus=self._cluster.gpus_per_worker,
            max_restarts=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        ).remote()

    def _wait(self, running: dict[Any, int]) -> str | None:
        """Wait for workers, given by what they return; those that are lost and not needed are done without."""
        status, error = None, None
        while running or (status is None and not self._has_ended()):
            self._look()
            self._scaling.look()
            for ended in ray.wait([*running], timeout=_LOOK_EVERY_S)[0] if running else ():
                rank = running.pop(ended)
                try:
                    status = ray.get(ended)
                except RayError as lost:
                    error = self._lost(rank, lost)
            for ref, rank in [*running.items()] if self._has_ended() else ():
                if self._is_silent(rank):
                    running.pop(ref)
            if not running and status is None:
                # All are lost: those that have joined train on, or the failure is being judged.
                time.sleep(_LOOK_EVERY_S)
        if self._gave_up():
            raise error or RayError("every worker was lost")
        # Of a run that those that have joined have finished, the next workers find nothing to do.
        return status or RESIZED

    def _is_silent(self, rank: int) -> bool:
        """Return whether a worker was given up: its process may be stopped, and then never returns."""
        group = self._watch.coordinator.group
        return group is not None and group.workers[rank].is_lost

    def _has_ended(self) -> bool:
        group = self._watch.coordinator.group
        return group is None or group.phase == "ended"

    def _gave_up(self) -> bool:
        """Return whether the coordinator leaves a failure to whoever starts the workers; it is judged then."""
        group = self._watch.coordinator.group
        if group is not None and group.gave_up:
            self._judge.leave_to_ray()
            return True
        return False

    def _lost(self, rank: int, error: RayError) -> RayError:
        """Return the error of a worker if the others can go on without it.

        Raises:
            RayError: They can't.
        """
        group = self._watch.coordinator.group
        if self._gave_up() or group is None or group.phase == "gathering" or not isinstance(error, RayActorError):
            raise error
        self._watch.coordinator.post(reform.WorkerLost(worker=rank, what=rank_error(rank, error).what))
        return error
