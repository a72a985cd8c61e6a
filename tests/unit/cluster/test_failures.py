"""What Ray Train ends or restarts an attempt with, in our words; consequences wait for their cause."""

from __future__ import annotations

from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayActorError
from ray.train.v2._internal.exceptions import (
    UserExceptionWithTraceback,
    WorkerGroupStartupTimeoutError,
    WorkerHealthCheckFailedError,
)
from ray.train.v2._internal.execution.failure_handling import FailureDecision
from ray.train.v2._internal.execution.worker_group.poll import WorkerGroupPollStatus, WorkerStatus
from ray.train.v2.api.exceptions import ControllerError, WorkerGroupError

from ray_ulysses.checkpoint.errors import StorageFailedError
from ray_ulysses.cluster.failures import CauseAwaiter, FailureJudge, cause_of
from ray_ulysses.cluster.restarts import Ended, TrainingFailed, failure_book, train_until_done
from ray_ulysses.cluster.worker import leave_refusal
from ray_ulysses.errors import UserError
from ray_ulysses.tracking.events import StartFailed
from tests.unit.elastic.test_causes import GLOO, RAY_DUMP
from tests.unit.tracking.journals import read_events
from tests.unit.trainer.test_failures import _attempt, _Clock, _config

KILLED = WorkerHealthCheckFailedError("A worker health check failed.", RayActorError("a", RAY_DUMP))


def group_error(failures: dict[int, Exception]) -> WorkerGroupError:
    return WorkerGroupError("12 lines of it", failures)


def test_a_killed_worker_is_the_cause_and_its_peers_errors_are_not() -> None:
    cause = cause_of(group_error({0: GLOO, 1: KILLED}))
    assert (cause.rank, cause.reason, cause.is_final) == (1, "lost worker 1 (killed by signal 9)", False)


def test_an_error_of_ones_own_is_told_with_its_type() -> None:
    own = UserExceptionWithTraceback(ValueError("no such row"), "a traceback")
    assert cause_of(group_error({0: GLOO, 1: own})).reason == "worker 1 raised ValueError: no such row"


@pytest.mark.parametrize("error", [UserError("data.path: no such corpus"), StorageFailedError("the disk is full")])
def test_what_no_restart_mends_is_final(error: Exception) -> None:
    cause = cause_of(group_error({0: error, 1: GLOO}))
    assert cause.is_final and str(error) in cause.reason


def test_a_node_that_was_taken_away_is_no_failure() -> None:
    gone = RayActorError("a", "its node has died", preempted=True)
    assert cause_of(group_error({0: GLOO, 1: gone})).kind == "preempted"


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (ControllerError(WorkerGroupStartupTimeoutError(4)), "start", "4 workers did not start in time"),
        (ControllerError(RayActorError("a", RAY_DUMP)), "start", "lost while the workers started (killed by signal 9)"),
        (ControllerError(RuntimeError("init_process_group\nat")), "controller", "RuntimeError: init_process_group"),
        (RayActorError("a", RAY_DUMP), "controller", "Ray Train's controller was lost (killed by signal 9)"),
        (ConnectionError("the raylet is gone"), "controller", "ConnectionError: the raylet is gone"),
    ],
)  # fmt: skip
def test_what_happens_beside_the_workers_is_one_line_too(error: Exception, kind: str, words: str) -> None:
    cause = cause_of(error)
    assert cause.kind == kind and words in cause.reason and "\n" not in cause.reason and cause.way_out


def polled(errors: dict[int, Exception | None]) -> WorkerGroupPollStatus:
    return WorkerGroupPollStatus({rank: WorkerStatus(running=True, error=error) for rank, error in errors.items()})


def test_consequences_wait_for_their_cause_and_not_for_ever() -> None:
    awaiter = CauseAwaiter(wait_s=3600.0)
    status = polled({0: GLOO, 1: None})
    awaiter.after_worker_group_poll_status(status)
    assert status.errors == {} and not status.finished
    status = polled({0: GLOO, 1: KILLED})
    awaiter.after_worker_group_poll_status(status)
    assert set(status.errors) == {0, 1}
    impatient = CauseAwaiter(wait_s=0.0)
    status = polled({0: GLOO, 1: None})
    impatient.after_worker_group_poll_status(status)
    assert set(status.errors) == {0}


def test_the_judge_ends_a_command_that_was_refused(tmp_path: Any) -> None:
    config = _config(tmp_path)
    _attempt(config, _Clock(), 1)
    judge = FailureJudge(failure_book(config, "now"))
    assert judge.make_decision(group_error({0: KILLED})) == FailureDecision.RETRY
    leave_refusal(config.run_dir, "now", "another command has it")
    assert judge.make_decision(group_error({0: KILLED})) == FailureDecision.RAISE


def test_the_command_starts_the_workers_again_where_ray_can_not(tmp_path: Any) -> None:
    config = _config(tmp_path, elastic__max_failures=2)
    book = failure_book(config, "now")
    outcomes: list[Ended | None] = [
        Ended(error=ActorDiedError(), logs=None),
        Ended(error=ConnectionError("the raylet is gone"), logs=None),
        None,
    ]
    train_until_done(book, lambda: outcomes.pop(0))
    assert not outcomes
    told = [event for event in read_events(config.run_dir) if isinstance(event, StartFailed)]
    assert [event.failure for event in told] == [1, 2]


def test_the_command_gives_up_when_its_failures_are_used_up_in_few_lines(tmp_path: Any) -> None:
    config = _config(tmp_path, elastic__max_failures=1)
    book = failure_book(config, "now")
    with pytest.raises(TrainingFailed) as failed:
        train_until_done(book, lambda: Ended(error=ConnectionError("the raylet is gone\n" + RAY_DUMP), logs="/logs"))
    lines = str(failed.value).splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("run 'run' failed: Ray could not run the workers: ConnectionError: the raylet is gone")
    assert "/logs" in lines[1] and "the same command resumes from step 0" in lines[2]


def test_what_the_controller_has_judged_is_not_charged_again(tmp_path: Any) -> None:
    config = _config(tmp_path, elastic__max_failures=1)
    book = failure_book(config, "now")
    judge = FailureJudge(book)
    calls: list[int] = []

    def train_once() -> Ended | None:
        calls.append(len(calls))
        if len(calls) == 1:
            judge.make_decision(group_error({0: KILLED}))
            return Ended(error=group_error({0: KILLED}), logs=None)
        return None

    train_until_done(book, train_once)
    assert len(calls) == 2 and len(book.failures()) == 1
