"""How the workers' failures are told in our words, judged and written down, and which of them are survived."""

from __future__ import annotations

import functools
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayActorError
from ray.train.v2._internal.exceptions import (
    UserExceptionWithTraceback,
    WorkerGroupStartupTimeoutError,
    WorkerHealthCheckFailedError,
)
from ray.train.v2._internal.execution.failure_handling import FailureDecision
from ray.train.v2.api.exceptions import ControllerError, WorkerGroupError

from ray_ulysses.checkpoint.errors import StorageFailedError
from ray_ulysses.cluster.controller import WorkerGroupWatch
from ray_ulysses.cluster.failures import (
    _RETRY_S,
    COMMAND,
    CONTROLLER,
    Ended,
    FailureJudge,
    FailureLog,
    Noticed,
    TrainingFailed,
    cause_of,
    failure_log,
    train_until_done,
)
from ray_ulysses.cluster.scaling import Seat
from ray_ulysses.config import Config
from ray_ulysses.elastic.causes import Cause, RankError, root_cause
from ray_ulysses.errors import FinalError, UserError
from ray_ulysses.run.completion import record_run_failed
from ray_ulysses.run.start_point import known_step
from ray_ulysses.run.takeover import leave_refusal
from ray_ulysses.storage import LocalStore
from ray_ulysses.supervision.coordinator import _JUDGE_S
from ray_ulysses.tracking.events import AttemptEnded, RunFailed, StartFailed
from ray_ulysses.tracking.failures import describe_failure, failure_fields, record_failure
from ray_ulysses.tracking.history import read_history
from ray_ulysses.tracking.journal import claim_journal, open_journal
from tests.distributed.run_case import make_config
from tests.unit.checkpoint.fakes import save
from tests.unit.elastic.test_causes import GLOO, RAY_DUMP
from tests.unit.tracking.journals import STARTED, read_events

LOST = Cause(kind="lost", reason="lost worker 1 (killed by signal 9)", rank=1, hint="look at `dmesg`")
KILLED = WorkerHealthCheckFailedError("A worker health check failed.", RayActorError("a", RAY_DUMP))


class _Clock:
    def __init__(self) -> None:
        self.time = 1000.0

    def now(self) -> float:
        return self.time

    def monotonic(self) -> float:
        return self.time


def _config(folder: Path, **changes: Any) -> Config:
    config = make_config(folder, folder / "corpus", **changes)
    config.run_dir.mkdir(parents=True, exist_ok=True)
    return config


def _book(config: Config, clock: _Clock, session: str = "now", first_attempt: int = 1) -> FailureLog:
    return FailureLog(config=config, session=session, first_attempt=first_attempt, writer=CONTROLLER, clock=clock)


def _judge(book: FailureLog, cause: Cause) -> AttemptEnded | StartFailed:
    return book.judge(cause, known_step(LocalStore(book.config.run_dir)))


def _attempt(config: Config, clock: _Clock, *steps: int, session: str = "now", resumed: int = 0) -> None:
    journal = claim_journal(config.run_dir, clock)
    journal.append(
        {
            "event": "attempt_started",
            **STARTED,
            "session": session,
            "world_size": 2,
            "sp_size": 2,
            "dp_size": 1,
            "nodes": ["a", "b"],
            "rank_nodes": ["a/10.0.0.1", "b/10.0.0.2"],
            "resumed_step": resumed,
            "resumed_from": None,
        }
    )
    for step in steps:
        clock.time += 1
        fields = {"loss": 1.0, "tokens": 9, "rows": [step - 1, step], "digest": "0" * 16, "seconds": 1.0}
        journal.append({"event": "step", "step": step, **fields})
    journal.close()


def group_error(failures: dict[int, Exception]) -> WorkerGroupError:
    return WorkerGroupError("12 lines of it", failures)


def test_a_killed_worker_is_the_cause_and_its_peers_errors_are_not() -> None:
    cause = cause_of(group_error({0: GLOO, 1: KILLED}))
    assert (cause.rank, cause.reason, cause.is_final) == (1, "lost worker 1 (killed by signal 9)", False)


def test_an_error_of_ones_own_is_told_with_its_type() -> None:
    own = UserExceptionWithTraceback(ValueError("no such row"), "a traceback")
    assert cause_of(group_error({0: GLOO, 1: own})).reason == "worker 1 raised ValueError: no such row"


@pytest.mark.parametrize(
    "error", [UserError("data.path: no such corpus"), StorageFailedError("the disk is full"), FinalError("NaN")]
)
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
    assert cause.kind == kind and words in cause.reason and "\n" not in cause.reason and cause.hint


def test_what_the_coordinator_has_judged_is_not_judged_again_by_ray(tmp_path: Any) -> None:
    config = _config(tmp_path, elastic__max_failures=1)
    _attempt(config, _Clock(), 1)
    book = failure_log(config, "now")
    judge = FailureJudge(book)
    assert judge.judge(LOST) and len(book.failures()) == 1
    # The workers went on by themselves, and a failure of another kind follows.
    assert judge.make_decision(group_error({0: KILLED})) == FailureDecision.RAISE and len(book.failures()) == 2
    assert not judge.judge(LOST)
    judge.leave_to_ray()
    assert judge.make_decision(group_error({0: KILLED})) == FailureDecision.RAISE and len(book.failures()) == 3
    assert judge.make_decision(group_error({0: KILLED})) == FailureDecision.RAISE and len(book.failures()) == 4


def test_a_judgement_that_the_coordinator_did_not_wait_for_is_waited_for_by_ray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = _config(tmp_path, elastic__max_failures=0)
    _attempt(config, _Clock(), 1, 2)
    book = _book(config, _Clock())
    judge, judging, released = FailureJudge(book), threading.Event(), threading.Event()

    def late(store: object) -> int:
        if not judging.is_set():
            judging.set()
            released.wait(60)
        return 0

    monkeypatch.setattr("ray_ulysses.cluster.failures.known_step", late)
    decisions: list[FailureDecision] = []
    decide = functools.partial(judge.make_decision, group_error({0: KILLED}))
    threads = [
        threading.Thread(target=lambda: judge.judge(LOST, Noticed(memory_step=2))),
        threading.Thread(target=lambda: decisions.append(decide())),
    ]
    threads[0].start()
    assert judging.wait(60)
    judge.leave_to_ray()
    threads[1].start()
    threads[1].join(0.2)
    released.set()
    for thread in threads:
        thread.join(60)
    # It cost the run no step, which Ray could not know, and there is no failure to spare.
    assert decisions == [FailureDecision.RETRY]
    assert [failure.failure for failure in book.failures()] == [None]


def test_the_judgement_of_workers_before_is_not_taken_for_that_of_others(tmp_path: Path) -> None:
    config = _config(tmp_path)
    _attempt(config, _Clock(), 1)
    book = failure_log(config, "now")
    judge = FailureJudge(book)
    assert judge.judge(LOST)
    watch: Any = WorkerGroupWatch.__new__(WorkerGroupWatch)
    watch._judge, watch.scaling, watch._wanted = judge, SimpleNamespace(begin=lambda *_: None), None
    watch._memory = SimpleNamespace(prepare=lambda addresses: None)
    watch.coordinator = SimpleNamespace(begin=lambda nodes, wanted: None)
    watch.begin({"a": "10.0.0.1"}, {0: Seat(node="a", actor=None, strategy=None)})
    # Not every one of them has joined.
    judge.leave_to_ray()
    assert judge.make_decision(group_error({0: KILLED})) == FailureDecision.RETRY
    assert len(book.failures()) == 2


@pytest.mark.timeout(40)
def test_a_failure_is_judged_soon_while_the_store_of_checkpoints_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator waits a minute for the judgement, which is as long as others ask such a store."""
    assert 2 * _RETRY_S < _JUDGE_S
    monkeypatch.setattr("ray_ulysses.cluster.failures._RETRY_S", 0.1)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    away = "s3://bucket/runs?endpoint_override=127.0.0.1:9&scheme=http&region=us-east-1"
    config = _config(tmp_path, checkpoint__storage=away)
    _attempt(config, _Clock(), 1, 2)
    book = _book(config, _Clock())
    assert FailureJudge(book).judge(LOST, Noticed(memory_step=2))
    (failure,) = book.failures()
    assert failure.committed_step is None and failure.memory_step == 2 and failure.failure is None


def test_the_judge_ends_a_command_that_was_refused(tmp_path: Any) -> None:
    config = _config(tmp_path)
    _attempt(config, _Clock(), 1)
    judge = FailureJudge(failure_log(config, "now"))
    assert judge.make_decision(group_error({0: KILLED})) == FailureDecision.RETRY
    leave_refusal(config.run_dir, "now", "another command has it")
    assert judge.make_decision(group_error({0: KILLED})) == FailureDecision.RAISE


def test_the_command_starts_the_workers_again_where_ray_can_not(tmp_path: Any) -> None:
    config = _config(tmp_path, elastic__max_failures=2)
    book = failure_log(config, "now")
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
    book = failure_log(config, "now")
    with pytest.raises(TrainingFailed) as failed:
        train_until_done(book, lambda: Ended(error=ConnectionError("the raylet is gone\n" + RAY_DUMP), logs="/logs"))
    lines = str(failed.value).splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("run 'run' failed: Ray could not run the workers: ConnectionError: the raylet is gone")
    assert "/logs" in lines[1] and "the same command resumes from step 0" in lines[2]


def test_what_the_controller_has_judged_is_not_charged_again(tmp_path: Any) -> None:
    config = _config(tmp_path, elastic__max_failures=1)
    book = failure_log(config, "now")
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


def test_failures_that_the_journal_refused_count_once_and_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, clock = _config(tmp_path), _Clock()
    _attempt(config, clock, 1)
    book = _book(config, clock)

    def refused(*arguments: Any, writes: bool, **options: Any) -> None:
        if writes:
            record_failure(*arguments, **options)
        raise OSError(5, "Input/output error")

    numbers = []
    for how in ("not written", "written all the same", "recorded"):
        with monkeypatch.context() as patch:
            if how != "recorded":
                to = functools.partial(refused, writes=how != "not written")
                patch.setattr("ray_ulysses.cluster.failures.record_failure", to)
            clock.time += 1.0
            numbers.append(_judge(book, LOST).failure)
    assert numbers == [1, 2, 3] and [one.failure for one in book.failures()] == [1, 2, 3]


def test_a_failure_that_is_survived_says_where_and_what_it_cost(tmp_path: Path) -> None:
    config, clock = _config(tmp_path), _Clock()
    _attempt(config, clock, *range(1, 20))
    save(LocalStore(config.run_dir), 10)
    failure = _judge(_book(config, clock), LOST)
    assert failure.restarts
    assert describe_failure(failure) == (
        "lost worker 1 (killed by signal 9); restarting from step 10; 9 steps lost; failure 1 of 3"
    )
    ended = read_events(config.run_dir)[-1]
    assert isinstance(ended, AttemptEnded)
    assert (ended.rank, ended.node, ended.lost_steps) == (1, "b/10.0.0.2", 9)
    (attempt,) = read_history(config.run_dir).attempts
    assert (attempt.reason, attempt.rank, attempt.node) == (LOST.reason, 1, "b/10.0.0.2")


def test_one_failure_too_many_ends_the_run_and_progress_begins_the_count_anew(tmp_path: Path) -> None:
    config, clock = _config(tmp_path, elastic__max_failures=2), _Clock()
    book = _book(config, clock)
    _attempt(config, clock, 1, 2)
    numbers = []
    for _ in range(2):
        failure = _judge(book, LOST)
        numbers.append((failure.failure, failure.restarts))
        _attempt(config, clock, 1, 2)
    # A checkpoint is committed: what came before it is forgiven.
    save(LocalStore(config.run_dir), 2)
    for _ in range(3):
        failure = _judge(book, LOST)
        numbers.append((failure.failure, failure.restarts))
        _attempt(config, clock, 3, resumed=2)
    assert numbers == [(1, True), (2, True), (1, True), (2, True), (3, False)]
    assert "failure 3, more than elastic.max_failures=2 allows" in describe_failure(failure)
    assert "restarting" not in describe_failure(failure)


def test_workers_that_form_again_are_not_charged_for_where_the_attempt_moved_the_run_on(tmp_path: Path) -> None:
    config, clock = _config(tmp_path, elastic__max_failures=0), _Clock()
    book = _book(config, clock)
    _attempt(config, clock, 1, 2, 3)
    failure = book.judge(LOST, 0, Noticed(memory_step=2))
    assert failure.restarts and failure.failure is None
    assert describe_failure(failure).endswith(
        "restarting from step 2 in peer memory; 1 step lost; not counted as a failure"
    )
    # Nothing newer than what it began from is left of the next one; and Ray's restarts are charged as ever.
    _attempt(config, clock, 3, resumed=2)
    assert book.judge(LOST, 2, Noticed(memory_step=2)).failure == 1
    _attempt(config, clock, 3, resumed=2)
    assert book.judge(LOST, 3, Noticed()).restarts
    _attempt(config, clock, 4, resumed=3)
    assert not book.judge(LOST, 4).restarts


def test_failures_of_the_day_before_and_of_another_command_do_not_count(tmp_path: Path) -> None:
    config, clock = _config(tmp_path, elastic__max_failures=1, elastic__failure_window_s=100.0), _Clock()
    _attempt(config, clock, 1)
    assert _judge(_book(config, clock, session="before"), LOST).failure == 1
    _attempt(config, clock, 1)
    assert _judge(_book(config, clock), LOST).failure == 1
    clock.time += 101
    _attempt(config, clock, 1)
    assert _judge(_book(config, clock), LOST).restarts


def test_a_preemption_is_not_counted_and_what_no_restart_mends_is_final(tmp_path: Path) -> None:
    config, clock = _config(tmp_path, elastic__max_failures=0), _Clock()
    _attempt(config, clock, 1)
    away = Cause(kind="preempted", reason="lost worker 0 (its node was taken away)", rank=0, hint="-")
    for _ in range(5):
        failure = _judge(_book(config, clock), away)
        assert failure.restarts and failure.failure is None
        assert "not counted as a failure" in describe_failure(failure)
    refused = _judge(_book(config, clock), replace(LOST, is_final=True))
    assert not refused.restarts and describe_failure(refused).endswith("not restarted")


def test_a_failure_before_any_attempt_began_is_told_beside_it_and_not_as_its_end(tmp_path: Path) -> None:
    config, clock = _config(tmp_path), _Clock()
    start = Cause(kind="start", reason="2 workers did not start in time", rank=None, hint="add nodes")
    failure = _judge(_book(config, clock), start)
    assert describe_failure(failure) == "2 workers did not start in time; restarting from step 0; failure 1 of 3"
    (told,) = read_events(config.run_dir)
    assert (told.event, told.attempt) == ("start_failed", 1)
    # An earlier command's attempt is not ended by it.
    _attempt(config, clock, 1, session="before")
    journal = open_journal(config.run_dir, 2, clock=clock)
    journal.append({"event": "attempt_ended", "reason": "stopped"})
    journal.close()
    clock.time += 86400
    _judge(_book(config, clock, first_attempt=3), start)
    assert [event.event for event in read_events(config.run_dir) if event.attempt == 2][-1] == "start_failed"
    history = read_history(config.run_dir)
    assert history.attempts[0].reason == "stopped" and history.status == "stopped"
    assert history.goodput == 1.0, "the day until the next command is not the attempt's"


def test_a_node_whose_gpu_fails_before_any_attempt_began_is_named_in_journal_and_inspect(tmp_path: Path) -> None:
    config = _config(tmp_path)
    failed = RankError(
        rank=1, kind="device", what="AcceleratorError: CUDA error: misaligned address", node="c/10.0.0.3"
    )
    failure = _judge(_book(config, _Clock()), root_cause([failed]))
    assert (failure.kind, failure.node, failure.restarts) == ("device", "c/10.0.0.3", True)
    record_run_failed(config, replace(failure, restarts=False))
    found = read_history(config.run_dir).failure
    assert found is not None and found.node == "c/10.0.0.3" and "misaligned address" in found.reason


@pytest.mark.parametrize(("saved", "reason"), [(True, "preempted: lost worker 0 (-)"), (False, "lost worker 0 (-)")])
def test_an_announced_end_of_a_node_is_a_preemption_where_a_state_was_saved(
    tmp_path: Path, saved: bool, reason: str
) -> None:
    config, clock = _config(tmp_path), _Clock()
    _attempt(config, clock, 1, 2)
    if saved:
        save(LocalStore(config.run_dir), 1)
    failure = _judge(_book(config, clock), Cause(kind="preempted", reason="lost worker 0 (-)", rank=0, hint="-"))
    assert failure.reason == reason and failure.restarts
    assert read_history(config.run_dir).attempts[0].reason == reason
    assert describe_failure(failure).startswith(f"{reason}; restarting from step {1 if saved else 0};")


def test_an_attempt_ends_once_whoever_tells_it(tmp_path: Path) -> None:
    config, clock = _config(tmp_path), _Clock()
    _attempt(config, clock, 1)
    _judge(_book(config, clock), LOST)
    gone = Cause(kind="controller", reason="Ray could not run the workers: ActorDiedError", rank=None, hint="-")
    _judge(replace(_book(config, clock), writer=COMMAND), gone)
    events = [event.event for event in read_events(config.run_dir)]
    assert events.count("attempt_ended") == 1 and events.count("start_failed") == 1


def test_a_run_that_has_failed_says_so_until_it_goes_on(tmp_path: Path) -> None:
    config, clock = _config(tmp_path, elastic__max_failures=0), _Clock()
    _attempt(config, clock, *range(1, 8))
    failure = _judge(_book(config, clock), LOST)
    record_run_failed(config, failure)
    history = read_history(config.run_dir)
    assert history.status == "failed" and history.failure is not None
    assert failure_fields(history.failure) == failure_fields(failure)
    printed = history.to_json()["failure"]
    assert printed["reason"] == LOST.reason and printed["way_out"] == LOST.hint and printed["lost_steps"] == 7
    _attempt(config, _Clock(), 1, session="next")
    assert read_history(config.run_dir).failure is None


def test_a_command_that_could_not_start_counts_from_its_start_and_by_itself(tmp_path: Path) -> None:
    config, clock = _config(tmp_path, elastic__max_failures=0), _Clock()
    _attempt(config, clock, 1, 2, session="first")
    _judge(_book(config, clock, "first"), LOST)
    failed = RunFailed(time=clock.time, attempt=1, session="first", reason="it failed")
    record_failure(config.run_dir, failed, writer=COMMAND)
    clock.time += 500.0
    second = replace(_book(config, clock, "second", 2), writer=COMMAND, command_started=clock.time)
    clock.time += 4000.0
    _judge(second, Cause(kind="start", reason="no nodes", rank=None, hint="-", is_final=True))
    clock.time += 300.0
    third = claim_journal(config.run_dir, clock)
    third.append({"event": "phase", "phase": "x", "session": "third", "command_started": clock.time - 100.0})
    third.close()
    spent = read_history(config.run_dir).time_spent
    assert spent.between_commands_s == 500.0 + 200.0
    assert spent.total_s == 2.0 + 4000.0 + 100.0


def test_a_record_of_another_version_is_read_as_far_as_it_goes() -> None:
    failure = AttemptEnded(time=1.0, attempt=1, reason="fire")
    assert describe_failure(failure) == "fire; not restarted"


def test_a_storage_that_is_away_keeps_no_failure_from_being_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config, clock = _config(tmp_path), _Clock()
    _attempt(config, clock, 1)

    def full(*arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ray_ulysses.cluster.failures.record_failure", full)
    book = _book(config, clock)
    assert [_judge(book, LOST).failure for _ in range(3)] == [1, 2, 3]
    assert "No space left on device" in caplog.text and LOST.reason in caplog.text


def test_a_failure_while_the_journal_can_not_be_read_is_judged_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that is away fails attempts, and must not take their reason with it."""
    config, clock = _config(tmp_path), _Clock()
    _attempt(config, clock, 1, 2)
    book = _book(config, clock)

    def away(*arguments: object, **options: object) -> None:
        raise OSError(113, "the store failed for 20.0 s: it could not be reached")

    for name in ("newest_attempt", "read_side_files", "record_failure"):
        monkeypatch.setattr(f"ray_ulysses.cluster.failures.{name}", away)
    failure = book.judge(cause_of(group_error({0: GLOO, 1: KILLED})), None)
    assert failure.restarts and failure.reason == "lost worker 1 (killed by signal 9)"
    assert book.failures() == [failure]
    final = book.judge(Cause(kind="raised", reason="it can't", rank=0, hint="", is_final=True), None)
    assert not final.restarts
