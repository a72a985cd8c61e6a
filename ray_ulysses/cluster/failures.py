"""Ray Train's failures in our words: what supervises the workers judges each, and waits a moment for its cause.

Ray Train 2.60 has no public way to replace its failure policy. The seams used here are private to it, all in this
file: the keyword ``failure_policy`` of ``_initialize_and_run_controller``, and the hook of a `WorkerGroupCallback` that
sees each poll before it is judged (canary tests stand beside them).
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from ray.exceptions import RayActorError, RayTaskError
from ray.train import RunConfig
from ray.train.torch import TorchTrainer
from ray.train.v2._internal.exceptions import (
    UserExceptionWithTraceback,
    WorkerGroupStartupFailedError,
    WorkerGroupStartupTimeoutError,
    WorkerHealthCheckFailedError,
    WorkerHealthCheckTimeoutError,
)
from ray.train.v2._internal.execution.callback import WorkerGroupCallback
from ray.train.v2._internal.execution.failure_handling import FailureDecision, FailurePolicy
from ray.train.v2.api.config import FailureConfig
from ray.train.v2.api.exceptions import ControllerError, PreemptionError, WorkerGroupError

from ray_ulysses.checkpoint.errors import StorageFailedError
from ray_ulysses.cluster.worker import refusal
from ray_ulysses.cluster.worker_watch import WorkersMissing
from ray_ulysses.elastic.causes import Cause, RankError, lost, one_line, raised, root_cause
from ray_ulysses.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ray.train.v2._internal.execution.worker_group.poll import WorkerGroupPollStatus

    from ray_ulysses.trainer.failures import FailureBook

CAUSE_WAIT_S = 1.5
"""Longest wait for the cause of errors that are only consequences: a process that is gone is missed a little later than
its peers' collectives fail."""


def rank_error(rank: int, error: BaseException) -> RankError:
    """Return how a worker ended, from what Ray Train says of it."""
    if isinstance(error, UserExceptionWithTraceback):
        error = error._base_exc
    if isinstance(error, WorkerHealthCheckTimeoutError):
        return lost(rank, str(error))
    if isinstance(error, WorkerHealthCheckFailedError):
        error = error.health_check_failure
    if isinstance(error, RayActorError):
        if error.preempted:
            return RankError(rank=rank, kind="preempted", what="its node was taken away")
        return lost(rank, str(error))
    return raised(rank, error)


def cause_of(error: BaseException) -> Cause:
    """Return why an attempt failed, from what Ray Train ends or restarts it with."""
    if isinstance(error, PreemptionError):
        ranks = error.preemption_info.preempted_ranks
        errors = [RankError(rank=rank, kind="preempted", what="its node is being taken away") for rank in ranks]
        return root_cause(errors or [RankError(rank=0, kind="preempted", what="a node is being taken away")])
    if isinstance(error, WorkerGroupError) and error.worker_failures:
        failures = error.worker_failures
        # What the user gave, or a storage that takes nothing, is the same for the next attempt.
        is_final = any(isinstance(one, UserError | StorageFailedError) for one in failures.values())
        return root_cause([rank_error(rank, one) for rank, one in failures.items()], is_final=is_final)
    if isinstance(error, WorkersMissing):
        return Cause(kind="start", reason=error.reason, rank=None, way_out=error.way_out, is_final=True)
    if isinstance(error, RayActorError):
        gone = lost(0, str(error))
        reason = f"Ray Train's controller was lost ({gone.what})"
        return replace(root_cause([gone]), kind="controller", reason=reason, rank=None)
    return _cause_beside(error.controller_failure if isinstance(error, ControllerError) else error)


def _cause_beside(inner: BaseException) -> Cause:
    """Return why workers could not be started or supervised, from what their controller met."""
    if isinstance(inner, WorkerGroupStartupTimeoutError):
        return Cause(
            kind="start",
            reason=f"{inner.num_workers} workers did not start in time",
            rank=None,
            way_out="add nodes, ask for fewer workers, or raise elastic.worker_start_timeout_s",
        )
    if isinstance(inner, WorkerGroupStartupFailedError | RayActorError):
        return Cause(
            kind="start",
            reason=f"a worker was lost while the workers started ({lost(0, str(inner)).what})",
            rank=None,
            way_out="repair or replace the node",
        )
    if isinstance(inner, RayTaskError) and isinstance(inner.cause, BaseException):
        inner = inner.cause
    return Cause(
        kind="controller",
        reason=f"Ray could not run the workers: {one_line(inner)}",
        rank=None,
        way_out="the log of the controller has the whole error",
    )


class FailureJudge(FailurePolicy):
    """Lets the book decide about each failure; lives in Ray Train's controller."""

    def __init__(self, book: FailureBook) -> None:
        super().__init__(FailureConfig())
        self._book = book

    def make_decision(self, training_failed_error: Exception) -> FailureDecision:
        """Return whether the workers are started again."""
        cause = cause_of(training_failed_error)
        if refusal(self._book.config.run_dir, self._book.session) is not None:
            # The next attempt would refuse to begin.
            cause = replace(cause, is_final=True)
        failure = self._book.judge(cause)
        return FailureDecision.RETRY if failure.restarts else FailureDecision.RAISE


class CauseAwaiter(WorkerGroupCallback):
    """Holds back errors that are only consequences, for a moment, until their cause is seen as well."""

    def __init__(self, wait_s: float = CAUSE_WAIT_S) -> None:
        self._wait_s = wait_s
        self._since: float | None = None

    def after_worker_group_start(self, worker_group: Any) -> None:
        """Begin anew with each group."""
        self._since = None

    def after_worker_group_poll_status(self, worker_group_status: WorkerGroupPollStatus) -> None:
        """Hide what the poll has found, if all of it can only be a consequence and the cause may still show up."""
        failed = [one for one in worker_group_status.worker_statuses.values() if one.error is not None]
        kinds = {rank_error(rank, error).kind for rank, error in worker_group_status.errors.items()}
        if kinds != {"consequence"}:
            return
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        if now - self._since < self._wait_s:
            for status in failed:
                # It is polled again, and says the same then.
                status.error, status.running = None, True


class WatchedTrainer(TorchTrainer):
    """A `TorchTrainer` whose failures a book judges.

    Args:
        book: Judges them.
        run_config: As of `TorchTrainer`.
        arguments: The others.
    """

    def __init__(self, *arguments: Any, book: FailureBook, run_config: RunConfig, **options: Any) -> None:
        # Ray's annotation names the callbacks of before 2.0; it takes any of today's.
        run_config.callbacks = [*(run_config.callbacks or []), cast("Any", CauseAwaiter())]
        super().__init__(*arguments, run_config=run_config, **options)
        self._book = book

    def _initialize_and_run_controller(self, **kwargs: Any) -> Any:
        run: Callable[..., Any] = super()._initialize_and_run_controller  # type: ignore[misc]
        return run(**{**kwargs, "failure_policy": FailureJudge(self._book)})
