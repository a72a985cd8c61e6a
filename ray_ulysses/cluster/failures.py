"""Translates Ray Train's errors into causes, decides whether to restart the workers, and restarts them.

Ray Train's controller, which also coordinates the workers, makes most of these decisions. If Ray Train can't continue,
the command decides, and restarts the workers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from ray.exceptions import RayActorError, RayTaskError
from ray.train.v2._internal.exceptions import (
    UserExceptionWithTraceback,
    WorkerGroupStartupFailedError,
    WorkerGroupStartupTimeoutError,
    WorkerHealthCheckFailedError,
    WorkerHealthCheckTimeoutError,
)
from ray.train.v2._internal.execution.failure_handling import FailureDecision, FailurePolicy
from ray.train.v2.api.config import FailureConfig
from ray.train.v2.api.exceptions import ControllerError, TrainingFailedError, WorkerGroupError

from ray_ulysses.clock import Clock, SystemClock
from ray_ulysses.cluster.capacity import WorkersMissing
from ray_ulysses.cluster.scaling import Resized
from ray_ulysses.config import Config
from ray_ulysses.elastic.causes import Cause, RankError, failures_that_count, lost, one_line, raised, root_cause
from ray_ulysses.errors import FinalError, RunError, UserError
from ray_ulysses.logging import get_logger
from ray_ulysses.run.checkpoint_store import checkpoint_store
from ray_ulysses.run.completion import record_run_failed
from ray_ulysses.run.start_point import known_step
from ray_ulysses.run.takeover import refusal, takeover
from ray_ulysses.tracking.events import AttemptEnded, EndEvent, StartFailed
from ray_ulysses.tracking.failures import command_failures, describe_failure, newest_attempt, record_failure
from ray_ulysses.tracking.journal_files import attempt_numbers
from ray_ulysses.tracking.journal_reader import JournalFileReader, read_side_files

_log = get_logger(__name__)
_Found = TypeVar("_Found")
CONTROLLER, COMMAND = "controller", "command"
"""Processes that record failures, each in its own journal file: Ray Train's controller, and the driver."""
_RETRY_S = 5.0
"""Seconds for which reading the newest committed step is retried: the workers wait for the decision meanwhile."""


def rank_error(rank: int, error: BaseException) -> RankError:
    """Translate Ray Train's error for a worker into a `RankError`."""
    if isinstance(error, UserExceptionWithTraceback):
        error = error._base_exc
    if isinstance(error, WorkerHealthCheckTimeoutError):
        return lost(rank, str(error))
    if isinstance(error, WorkerHealthCheckFailedError):
        error = error.health_check_failure
    if isinstance(error, RayActorError):
        if error.preempted:
            return RankError(rank=rank, kind="preempted", what="the node was taken away")
        return lost(rank, str(error))
    return raised(rank, error)


def cause_of(error: BaseException) -> Cause:
    """Return the cause of a failed attempt, derived from Ray Train's error."""
    if isinstance(error, WorkerGroupError) and error.worker_failures:
        failures = error.worker_failures
        # Invalid user input, for example, would fail the next attempt as well.
        is_final = any(isinstance(one, UserError | FinalError) for one in failures.values())
        return root_cause([rank_error(rank, one) for rank, one in failures.items()], is_final=is_final)
    if isinstance(error, WorkersMissing):
        return Cause(kind="start", reason=error.reason, rank=None, hint=error.hint, is_final=True)
    if isinstance(error, RayActorError):
        gone = lost(0, str(error))
        reason = f"Ray Train's controller was lost ({gone.what})"
        return replace(root_cause([gone]), kind="controller", reason=reason, rank=None)
    return _cause_beside(error.controller_failure if isinstance(error, ControllerError) else error)


def _cause_beside(inner: BaseException) -> Cause:
    """Return the cause of an error that kept Ray Train's controller from starting or supervising the workers."""
    if isinstance(inner, WorkerGroupStartupTimeoutError):
        return Cause(
            kind="start",
            reason=f"{inner.num_workers} workers did not start in time",
            rank=None,
            hint="add nodes, reduce cluster.workers, or increase elastic.worker_start_timeout_s",
        )
    if isinstance(inner, WorkerGroupStartupFailedError | RayActorError):
        return Cause(
            kind="start",
            reason=f"a worker was lost while the workers started ({lost(0, str(inner)).what})",
            rank=None,
            hint="repair or replace the node",
        )
    if isinstance(inner, RayTaskError) and isinstance(inner.cause, BaseException):
        inner = inner.cause
    return Cause(
        kind="controller",
        reason=f"Ray could not run the workers: {one_line(inner)}",
        rank=None,
        hint="see the controller's log for the full error",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Noticed:
    """Details of a failure that only the coordinator knows."""

    memory_step: int | None = None
    """Newest step whose complete state is in peer memory, or None if there is none."""
    ago_s: float = 0.0
    silent_s: float = 0.0
    """Seconds of silence before the failure was detected."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureLog:
    """Records a command's failures in the journal, and decides whether to restart the workers."""

    config: Config
    session: str
    first_attempt: int
    """Number of the command's first attempt."""
    writer: str
    """`CONTROLLER` or `COMMAND`."""
    command_started: float | None = None
    clock: Clock = field(default_factory=SystemClock)
    unrecorded: list[AttemptEnded | StartFailed] = field(default_factory=list)
    """Failures that could not be written to the journal. They still count towards elastic.max_failures."""
    _recorded: list[AttemptEnded | StartFailed] = field(default_factory=list, init=False)
    """Failures that have been read from the journal."""
    _readers: dict[str, JournalFileReader] = field(default_factory=dict, init=False)
    """Readers of the journal. They read each record once, because the stacks of a hang may take up 10 MB."""

    def judge(self, cause: Cause, step: int | None, noticed: Noticed | None = None) -> AttemptEnded | StartFailed:
        """Record a failure, and decide whether to restart the workers.

        Args:
            cause: Cause of the failure.
            step: Newest committed step, or None if the storage does not respond.
            noticed: Details from the coordinator, or None if Ray Train detected the failure.
        """
        run_dir, elastic, now = self.config.run_dir, self.config.elastic, self.clock.now()
        newest = _if_it_answers(lambda: newest_attempt(run_dir))
        own = newest if newest is not None and newest.attempt >= self.first_attempt else None
        last_step = own.last_step if own is not None else None
        has_begun = (
            own is not None and own.session is not None and not own.has_ended and not self._is_recorded(own.attempt)
        )
        node = cause.node or None
        # The ranks of an earlier attempt ran on other nodes.
        if node is None and own is not None and has_begun and cause.rank is not None and cause.rank < len(own.nodes):
            node = own.nodes[cause.rank]
        # An announced preemption loses at most the steps since the last commit.
        is_preempted = cause.kind == "preempted" and step is not None and step > 0
        memory_step = None if noticed is None else noticed.memory_step
        newest_step = max((one for one in (step, memory_step) if one is not None), default=None)
        # A failure is free if the attempt made progress: it left a complete state newer than the state it resumed.
        is_free = (
            noticed is not None and has_begun and own is not None and own.resumed_step is not None
            and newest_step is not None and newest_step > own.resumed_step
        )  # fmt: skip
        number = None
        if cause.kind != "preempted" and not cause.is_final and not is_free:
            past = self.failures()
            number = 1 + failures_that_count(past, now=now, step=step, window_s=elastic.failure_window_s)
        failure = (AttemptEnded if has_begun else StartFailed)(
            time=now,
            attempt=newest.attempt if newest is not None else 1,
            session=self.session,
            command_started=self.command_started,
            kind=cause.kind,
            reason=f"preempted: {cause.reason}" if is_preempted else cause.reason,
            rank=cause.rank,
            node=node,
            committed_step=step,
            memory_step=memory_step,
            lost_steps=None if newest_step is None or last_step is None else max(0, last_step - newest_step),
            way_out=cause.hint,
            failure=number,
            max_failures=elastic.max_failures,
            restarts=not cause.is_final and (number is None or number <= elastic.max_failures),
        )
        if isinstance(failure, AttemptEnded) and noticed is not None:
            detected_at = now - noticed.ago_s
            fault_at = detected_at - noticed.silent_s if noticed.silent_s else None
            failure = replace(failure, detected_at=detected_at, fault_at=fault_at)
        try:
            record_failure(run_dir, failure, writer=self.writer)
        except OSError as error:
            _log.warning("a failure could not be recorded in the journal (%s): %s", error, describe_failure(failure))
            self.unrecorded.append(failure)
        return failure

    def failures(self) -> list[AttemptEnded | StartFailed]:
        """Return the command's failures so far, including those that are missing from the journal."""
        recorded = command_failures(self._read(), self.session)
        # A write that reported an error may have reached the journal anyway.
        known = {one.time for one in recorded}
        return sorted([*recorded, *(one for one in self.unrecorded if one.time not in known)], key=lambda one: one.time)

    def _read(self) -> list[AttemptEnded | StartFailed]:
        def add() -> None:
            for event in read_side_files(self.config.run_dir, self._readers):
                if isinstance(event, AttemptEnded | StartFailed):
                    self._recorded.append(event)

        _if_it_answers(add)
        return self._recorded

    def _is_recorded(self, attempt: int) -> bool:
        return any(isinstance(event, AttemptEnded) and event.attempt == attempt for event in self._read())


def _if_it_answers(read: Callable[[], _Found]) -> _Found | None:
    """Return the result of `read`, or None if the journal's storage does not respond.

    The failure itself must still be reported. Restarted workers detect and report an unreachable storage themselves.
    """
    try:
        return read()
    except OSError as error:
        if isinstance(error, UserError):
            raise
        _log.warning("the journal is unreadable at the moment (%s)", error)
        return None


def is_resize(error: BaseException) -> bool:
    """Return whether the workers ended only so that a different number of workers can be started."""
    if not isinstance(error, WorkerGroupError) or not error.worker_failures:
        return False
    return all(isinstance(one, Resized) for one in error.worker_failures.values())


def lacks_room(error: BaseException) -> bool:
    """Return whether workers failed to start in time on the chosen nodes."""
    return isinstance(error, ControllerError) and isinstance(error.controller_failure, WorkerGroupStartupTimeoutError)


class FailureJudge(FailurePolicy):
    """Ray Train failure policy that delegates decisions to the failure log; runs in Ray Train's controller.

    If the coordinator has already judged a failure, Ray Train gets the same decision, even if that decision arrives
    after the coordinator has stopped waiting.
    """

    def __init__(self, book: FailureLog) -> None:
        super().__init__(FailureConfig())
        self._book = book
        self._lock = threading.Lock()
        self._verdict: AttemptEnded | StartFailed | None = None
        self._is_left_to_ray = False

    def judge(self, cause: Cause, noticed: Noticed | None = None) -> bool:
        """Record a failure that the coordinator detected, and return whether the run may continue."""
        with self._lock:
            self._verdict = None
            self._verdict = failure = self._judge(cause, noticed)
        return bool(failure.restarts)

    def forget(self) -> None:
        """Discard the last decision, because a new worker group starts."""
        with self._lock:
            self._verdict, self._is_left_to_ray = None, False

    def leave_to_ray(self) -> None:
        """Record that Ray Train will report the failure that was judged last."""
        self._is_left_to_ray = True

    def make_decision(self, training_failed_error: Exception) -> FailureDecision:
        """Return whether Ray Train restarts the workers."""
        if is_resize(training_failed_error) or lacks_room(training_failed_error):
            # Neither error is a failure: nodes are chosen again, and `WorkerWatch` limits the wait.
            return FailureDecision.RETRY
        with self._lock:
            failure = self._verdict if self._is_left_to_ray else None
            self._verdict, self._is_left_to_ray = None, False
            failure = failure or self._judge(cause_of(training_failed_error))
        return FailureDecision.RETRY if failure.restarts else FailureDecision.RAISE

    def _judge(self, cause: Cause, noticed: Noticed | None = None) -> AttemptEnded | StartFailed:
        if refusal(self._book.config.run_dir, self._book.session) is not None:
            # The next attempt would refuse to start.
            cause = replace(cause, is_final=True)
        store = checkpoint_store(self._book.config, retry_s=_RETRY_S)
        return self._book.judge(cause, known_step(store), noticed)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How Ray Train ended without completing the run."""

    error: BaseException
    logs: str | None
    """Directory of Ray's logs on this node, or None if unknown."""


class TrainingFailed(RunError):
    """The run has failed and is not restarted. The message is shown to the user."""


def failure_log(config: Config, session: str, started: float | None = None) -> FailureLog:
    """Return the failure log for a command that is about to start its workers."""
    first = max(attempt_numbers(config.run_dir), default=0) + 1
    return FailureLog(config=config, session=session, first_attempt=first, writer=COMMAND, command_started=started)


def train_until_done(book: FailureLog, train_once: Callable[[], Ended | None]) -> None:
    """Run the workers, restarting them after failures, until the run is done.

    Args:
        book: Failure log, which judges failures that Ray Train's controller could not judge, such as its own death.
        train_once: Runs the workers. Returns None if the run is done, or else how Ray Train ended.

    Raises:
        TrainingFailed: The failure is final.
    """
    while True:
        num_recorded = len(book.failures())
        ended = train_once()
        if ended is None:
            return
        recorded = book.failures()
        if isinstance(ended.error, TrainingFailedError) and len(recorded) > num_recorded:
            # The controller has already judged this failure. If it decided to restart, Ray Train was unable to.
            failure = recorded[-1]
        else:
            failure = book.judge(cause_of(ended.error), known_step(checkpoint_store(book.config)))
        if not failure.restarts:
            raise TrainingFailed(*failure_texts(book.config, failure, ended.logs)) from ended.error
        _log.debug("Ray Train could not continue; the command restarts the workers", exc_info=ended.error)


def record_final_failure(book: FailureLog) -> None:
    """Record the command's last failure as the end of the run, unless another command has taken over the run."""
    recorded = book.failures()
    if recorded and takeover(book.config, book.session) is None:
        record_run_failed(book.config, recorded[-1])


def failure_texts(config: Config, failure: EndEvent, logs: str | None) -> list[str]:
    """Return the messages about a failed run: the cause, the suggested fix, and how to resume."""
    where = f"; node {failure.node}" if failure.node else ""
    lines = [f"run {config.run.name!r} failed: {describe_failure(failure)}{where}"]
    lines.append(f"{failure.way_out}; worker logs: {logs}" if logs else failure.way_out)
    step = "the newest checkpoint" if failure.committed_step is None else f"step {failure.committed_step:,}"
    lines.append(f"everything committed in {config.run_dir} is kept; the same command resumes from {step}")
    return lines
