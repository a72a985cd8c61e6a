"""Translates failures of the workers from Ray Train's errors, judges them, and restarts the workers.

Failures are judged where the workers are coordinated, in Ray Train's controller. The command judges, and starts the
workers again, where Ray Train can't continue.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

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
from ray_ulysses.elastic.causes import Cause, RankError, failures_that_count, lost, one_line, raised, root_cause
from ray_ulysses.errors import FinalError, RunError, UserError
from ray_ulysses.logging import get_logger
from ray_ulysses.run.checkpoint_store import checkpoint_store
from ray_ulysses.run.completion import record_run_failed
from ray_ulysses.run.start_point import known_step
from ray_ulysses.run.takeover import refusal, takeover
from ray_ulysses.tracking.events import AttemptEnded, StartFailed
from ray_ulysses.tracking.failures import command_failures, describe_failure, newest_attempt, record_failure
from ray_ulysses.tracking.journal_files import attempt_numbers
from ray_ulysses.tracking.journal_reader import read_side_files

if TYPE_CHECKING:
    from ray_ulysses.config import Config
    from ray_ulysses.tracking.events import EndEvent, Event
    from ray_ulysses.tracking.failures import NewestAttempt

_log = get_logger(__name__)
_Found = TypeVar("_Found")
CONTROLLER, COMMAND = "controller", "command"
"""Writers of failures, each with its own journal file: the supervisor of the workers, and the driver."""
_RETRY_S = 5.0
"""How long to retry reading the newest committed step from an unreachable store: the workers wait for the verdict."""


def rank_error(rank: int, error: BaseException) -> RankError:
    """Translate Ray Train's error into how a worker ended."""
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
    """Return why an attempt failed, from the error with which Ray Train ended it."""
    if isinstance(error, WorkerGroupError) and error.worker_failures:
        failures = error.worker_failures
        # The user's input, say, is the same for the next attempt.
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
    """Return why workers could not be started or supervised, from their controller's error."""
    if isinstance(inner, WorkerGroupStartupTimeoutError):
        return Cause(
            kind="start",
            reason=f"{inner.num_workers} workers did not start in time",
            rank=None,
            hint="add nodes, ask for fewer workers, or raise elastic.worker_start_timeout_s",
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
        hint="the log of the controller has the whole error",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Noticed:
    """The coordinator's knowledge of a failure, besides its cause."""

    memory_step: int | None = None
    """The newest step whose whole state is in peer memory; None if there is none."""
    ago_s: float = 0.0
    silent_s: float = 0.0
    """Seconds without a sign of life before that."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureLog:
    """Judges the failures of a command, and records them in the journal."""

    config: Config
    session: str
    first_attempt: int
    """The command's attempts have this number or a higher one."""
    writer: str
    """`CONTROLLER` or `COMMAND`."""
    command_started: float | None = None
    clock: Clock = field(default_factory=SystemClock)
    unrecorded: list[AttemptEnded | StartFailed] = field(default_factory=list)
    """Failures that could not be written to the journal; they count all the same."""

    def judge(self, cause: Cause, step: int | None, noticed: Noticed | None = None) -> AttemptEnded | StartFailed:
        """Decide whether the workers are started again after a failure, and record it.

        Args:
            cause: Why the attempt failed.
            step: The newest committed step; None if the storage does not answer.
            noticed: The coordinator's knowledge of it; None if Ray noticed it.
        """
        run_dir, elastic, now = self.config.run_dir, self.config.elastic, self.clock.now()
        newest = self.newest()
        own = newest if newest is not None and newest.attempt >= self.first_attempt else None
        last_step = own.last_step if own is not None else None
        has_begun = (
            own is not None and own.session is not None and not own.has_ended and not self._is_recorded(own.attempt)
        )
        node = cause.node or None
        # Ranks of an earlier attempt were on other nodes.
        if node is None and own is not None and has_begun and cause.rank is not None and cause.rank < len(own.nodes):
            node = own.nodes[cause.rank]
        # A node's announced end costs no more than the steps since the last commit.
        is_preempted = cause.kind == "preempted" and step is not None and step > 0
        memory_step = None if noticed is None else noticed.memory_step
        newest_step = max((one for one in (step, memory_step) if one is not None), default=None)
        # Re-forming costs the run next to nothing if the attempt left a whole state newer than the one it began from.
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
        """Return the command's failures so far, as far as the journal is readable."""
        recorded = command_failures(self._recorded(), self.session)
        # A record that failed may have been written all the same.
        known = {one.time for one in recorded}
        return sorted([*recorded, *(one for one in self.unrecorded if one.time not in known)], key=lambda one: one.time)

    def newest(self) -> NewestAttempt | None:
        """Return the run's newest attempt; None if there is none, or the journal can't be read now."""
        return _if_it_answers(lambda: newest_attempt(self.config.run_dir), None)

    def _recorded(self) -> list[Event]:
        return _if_it_answers(lambda: read_side_files(self.config.run_dir), [])

    def _is_recorded(self, attempt: int) -> bool:
        events = self._recorded()
        return any(isinstance(event, AttemptEnded) and event.attempt == attempt for event in events)


def _if_it_answers(read: Callable[[], _Found], otherwise: _Found) -> _Found:
    """Return the journal's answer, or a default while its storage is away: the failure itself must be reported.

    Restarted workers notice an unreachable storage themselves, and report it.
    """
    try:
        return read()
    except OSError as error:
        if isinstance(error, UserError):
            raise
        _log.warning("the journal can't be read now (%s)", error)
        return otherwise


def is_resize(error: BaseException) -> bool:
    """Return whether the workers ended only to be restarted at another number."""
    if not isinstance(error, WorkerGroupError) or not error.worker_failures:
        return False
    return all(isinstance(one, Resized) for one in error.worker_failures.values())


def lacks_room(error: BaseException) -> bool:
    """Return whether the chosen nodes did not give the workers their places in time."""
    return isinstance(error, ControllerError) and isinstance(error.controller_failure, WorkerGroupStartupTimeoutError)


class FailureJudge(FailurePolicy):
    """Lets the log judge each failure; lives in Ray Train's controller.

    A failure that the workers' coordinator saw first is judged once, for the coordinator; Ray takes over the verdict,
    even if it comes later than the coordinator waits.
    """

    def __init__(self, book: FailureLog) -> None:
        super().__init__(FailureConfig())
        self._book = book
        self._lock = threading.Lock()
        self._verdict: AttemptEnded | StartFailed | None = None
        self._is_left_to_ray = False

    def judge(self, cause: Cause, noticed: Noticed | None = None) -> bool:
        """Record a failure that the coordinator has seen, and return whether the run may continue."""
        with self._lock:
            self._verdict = None
            self._verdict = failure = self._judge(cause, noticed)
        return bool(failure.restarts)

    def forget(self) -> None:
        """Forget the last verdict, since other workers start."""
        with self._lock:
            self._verdict, self._is_left_to_ray = None, False

    def leave_to_ray(self) -> None:
        """Note that the workers end because of the last judged failure."""
        self._is_left_to_ray = True

    def make_decision(self, training_failed_error: Exception) -> FailureDecision:
        """Return whether Ray starts the workers again."""
        if is_resize(training_failed_error) or lacks_room(training_failed_error):
            # Neither is a failure: nodes are chosen again, and the command's watch bounds the wait for them.
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
    """The end of Ray's run of the workers."""

    error: BaseException
    logs: str | None
    """Directory of the logs of this node; None if unknown."""


class TrainingFailed(RunError):
    """The run has failed for good; the text is written for a person."""


def failure_log(config: Config, session: str, started: float | None = None) -> FailureLog:
    """Return the failure log of a command that is about to start its workers."""
    first = max(attempt_numbers(config.run_dir), default=0) + 1
    return FailureLog(config=config, session=session, first_attempt=first, writer=COMMAND, command_started=started)


def train_until_done(book: FailureLog, train_once: Callable[[], Ended | None]) -> None:
    """Run the workers until the run has ended.

    Args:
        book: Judges failures that Ray Train's controller could not: its own death, or an end that it did not see.
        train_once: Runs the workers; returns how Ray ended, or None for a run that is done.

    Raises:
        TrainingFailed: The workers are not started again.
    """
    while True:
        num_recorded = len(book.failures())
        ended = train_once()
        if ended is None:
            return
        recorded = book.failures()
        if isinstance(ended.error, TrainingFailedError) and len(recorded) > num_recorded:
            # The controller has judged it already; if the verdict was a restart, Ray could not do it.
            failure = recorded[-1]
        else:
            failure = book.judge(cause_of(ended.error), known_step(checkpoint_store(book.config)))
        if not failure.restarts:
            raise TrainingFailed(*failure_texts(book.config, failure, ended.logs)) from ended.error
        _log.debug("Ray could not continue; the command starts the workers again", exc_info=ended.error)


def record_final_failure(book: FailureLog) -> None:
    """Record that the command's last failure ended the run, unless another command has taken the run over."""
    recorded = book.failures()
    if recorded and takeover(book.config, book.session) is None:
        record_run_failed(book.config, recorded[-1])


def failure_texts(config: Config, failure: EndEvent, logs: str | None) -> list[str]:
    """Return the final messages about a failed run: what happened, what to do, and how to continue."""
    where = f"; node {failure.node}" if failure.node else ""
    lines = [f"run {config.run.name!r} failed: {describe_failure(failure)}{where}"]
    lines.append(f"{failure.way_out}; logs of the workers: {logs}" if logs else failure.way_out)
    step = "its newest one" if failure.committed_step is None else f"step {failure.committed_step:,}"
    lines.append(f"everything committed in {config.run_dir} is kept; the same command resumes from {step}")
    return lines
