"""How the workers' failures are told in our words, judged and written down, and which of them are survived."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor, wait
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
from ray_ulysses.elastic.causes import Cause, RankError, root_cause
from ray_ulysses.errors import FinalError, UserError
from ray_ulysses.run.completion import record_run_failed
from ray_ulysses.run.start_point import known_step
from ray_ulysses.run.takeover import leave_refusal
from ray_ulysses.storage import LocalStore
from ray_ulysses.supervision.coordinator import _JUDGE_S
from ray_ulysses.tracking.events import AttemptEnded, Event, StartFailed
from ray_ulysses.tracking.failures import describe_failure, failure_fields, record_failure, record_hang
from ray_ulysses.tracking.history import read_history
from ray_ulysses.tracking.journal import claim_journal, open_journal
from ray_ulysses.tracking.journal_lines import parse_line
from tests.distributed.run_case import make_config
from tests.unit.checkpoint.fakes import save
from tests.unit.elastic.test_causes import GLOO, RAY_DUMP
from tests.unit.tracking.journals import STARTED, read_events

LOST = Cause(kind="lost", reason="lost worker 1 (killed by signal 9)", rank=1, hint="look at `dmesg`")
KILLED = WorkerHealthCheckFailedError("A worker health check failed.", RayActorError("a", RAY_DUMP))


class Trial:
    """A run directory with attempts, a clock, and the log of a command's failures."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        self.config = make_config(folder, folder / "corpus", **changes)
        self.config.run_dir.mkdir(parents=True, exist_ok=True)
        self.time, self.store = 1000.0, LocalStore(self.config.run_dir)

    def now(self) -> float:
        return self.time

    monotonic = now

    def book(self, session: str = "now", **changes: Any) -> FailureLog:
        fields: dict[str, Any] = {"first_attempt": 1, "writer": CONTROLLER, "clock": self} | changes
        return FailureLog(config=self.config, session=session, **fields)

    def judge(self, cause: Cause, **book: Any) -> AttemptEnded | StartFailed:
        return self.book(**book).judge(cause, known_step(self.store))

    def attempt(self, *steps: int, session: str = "now", resumed: int = 0) -> None:
        journal = claim_journal(self.config.run_dir, self)
        shape = {"world_size": 2, "sp_size": 2, "dp_size": 1, "nodes": ["a", "b"]}
        start = {"rank_nodes": ["a/10.0.0.1", "b/10.0.0.2"], "resumed_step": resumed, "resumed_from": None}
        journal.append({"event": "attempt_started", **STARTED, "session": session, **shape, **start})
        for step in steps:
            self.time += 1
            fields = {"loss": 1.0, "tokens": 9, "rows": [step - 1, step], "digest": "0" * 16, "seconds": 1.0}
            journal.append({"event": "step", "step": step, **fields})
        journal.close()


def group_error(failures: dict[int, Exception]) -> WorkerGroupError:
    return WorkerGroupError("12 lines of it", failures)


@pytest.mark.parametrize(
    ("error", "kind", "is_final", "words"),
    [
        (group_error({0: GLOO, 1: KILLED}), "lost", False, "lost worker 1 (killed by signal 9)"),
        (group_error({0: GLOO, 1: UserExceptionWithTraceback(ValueError("no such row"), "a traceback")}), "raised",
         False, "worker 1 raised ValueError: no such row"),
        (group_error({0: GLOO, 1: RayActorError("a", "its node has died", preempted=True)}), "preempted", False,
         "taken away"),
        (group_error({0: UserError("no such corpus"), 1: GLOO}), "raised", True, "no such corpus"),
        (group_error({0: StorageFailedError("the disk is full"), 1: GLOO}), "raised", True, "the disk is full"),
        (group_error({0: FinalError("NaN"), 1: GLOO}), "raised", True, "NaN"),
        (ControllerError(WorkerGroupStartupTimeoutError(4)), "start", False, "4 workers"),
        (ControllerError(RayActorError("a", RAY_DUMP)), "start", False, "killed by signal 9"),
        (ControllerError(RuntimeError("join\nat")), "controller", False, "RuntimeError: join"),
        (RayActorError("a", RAY_DUMP), "controller", False, "killed by signal 9"),
        (ConnectionError("the raylet is gone"), "controller", False, "ConnectionError: the raylet is gone"),
    ],
)  # fmt: skip
def test_one_error_is_the_cause_in_one_line_and_its_consequences_are_not(
    error: Exception, kind: str, is_final: bool, words: str
) -> None:
    cause = cause_of(error)
    assert (cause.kind, cause.is_final) == (kind, is_final)
    assert words in cause.reason and "\n" not in cause.reason and cause.hint


DEAD = group_error({0: KILLED})


def test_what_the_coordinator_has_judged_is_not_judged_again_by_ray(tmp_path: Path) -> None:
    trial = Trial(tmp_path, elastic__max_failures=1)
    trial.attempt(1)
    book = failure_log(trial.config, "now")
    judge = FailureJudge(book)
    assert judge.judge(LOST) and len(book.failures()) == 1
    # The workers went on, and a failure of another kind follows.
    assert judge.make_decision(DEAD) == FailureDecision.RAISE and len(book.failures()) == 2
    assert not judge.judge(LOST)
    judge.leave_to_ray()
    for recorded in (3, 4):
        assert judge.make_decision(DEAD) == FailureDecision.RAISE and len(book.failures()) == recorded


def test_ray_waits_for_a_judgement_that_is_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = Trial(tmp_path, elastic__max_failures=0)
    trial.attempt(1, 2)
    book = trial.book()
    judge, judging, released = FailureJudge(book), threading.Event(), threading.Event()

    def late(store: object) -> int:
        judging.set()
        released.wait(60)
        return 0

    monkeypatch.setattr("ray_ulysses.cluster.failures.known_step", late)
    with ThreadPoolExecutor(2) as pool:
        pool.submit(judge.judge, LOST, Noticed(memory_step=2))
        assert judging.wait(60)
        judge.leave_to_ray()
        decision = pool.submit(judge.make_decision, DEAD)
        wait([decision], timeout=0.2)
        released.set()
        # It cost the run no step, which Ray could not know, and there is no failure to spare.
        assert decision.result(60) == FailureDecision.RETRY
    assert [failure.failure for failure in book.failures()] == [None]


def test_failures_are_judged_one_after_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = Trial(tmp_path)
    trial.attempt(1)
    judge, judging, released = FailureJudge(trial.book()), threading.Event(), threading.Event()
    present: list[int] = []
    most = [0]

    def slow(store: object) -> int:
        present.append(1)
        most[0] = max(most[0], len(present))
        judging.set()
        released.wait(60)
        present.pop()
        return 0

    monkeypatch.setattr("ray_ulysses.cluster.failures.known_step", slow)
    with ThreadPoolExecutor(2) as pool:
        decision = pool.submit(judge.make_decision, DEAD)
        assert judging.wait(60)
        late = pool.submit(judge.judge, LOST)
        wait([late], timeout=0.2)
        released.set()
        wait([decision, late], timeout=60)
    assert most == [1]


def test_the_judgement_of_earlier_workers_is_not_used_for_others_and_a_refusal_ends_the_command(tmp_path: Path) -> None:
    trial = Trial(tmp_path)
    trial.attempt(1)
    book = failure_log(trial.config, "now")
    judge = FailureJudge(book)
    assert judge.judge(LOST)
    watch: Any = WorkerGroupWatch.__new__(WorkerGroupWatch)
    watch._judge, watch.scaling, watch._wanted = judge, SimpleNamespace(begin=lambda *_: None), None
    watch._memory = SimpleNamespace(prepare=lambda addresses: None)
    watch.coordinator = SimpleNamespace(begin=lambda nodes, wanted: None)
    watch.begin({"a": "10.0.0.1"}, {0: Seat(node="a", actor=None, strategy=None)})
    # Not every one of them has joined.
    judge.leave_to_ray()
    assert judge.make_decision(DEAD) == FailureDecision.RETRY and len(book.failures()) == 2
    leave_refusal(trial.config.run_dir, "now", "another command has it")
    assert judge.make_decision(DEAD) == FailureDecision.RAISE


@pytest.mark.timeout(40)
def test_a_failure_is_judged_soon_while_the_store_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator waits a minute for the judgement, which is as long as others ask such a store."""
    assert 2 * _RETRY_S < _JUDGE_S
    monkeypatch.setattr("ray_ulysses.cluster.failures._RETRY_S", 0.1)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    away = "s3://bucket/runs?endpoint_override=127.0.0.1:9&scheme=http&region=us-east-1"
    trial = Trial(tmp_path, checkpoint__storage=away)
    trial.attempt(1, 2)
    book = trial.book()
    assert FailureJudge(book).judge(LOST, Noticed(memory_step=2))
    (failure,) = book.failures()
    assert (failure.committed_step, failure.memory_step, failure.failure) == (None, 2, None)


def test_the_command_restarts_the_workers_where_ray_can_not_and_charges_each_failure_once(tmp_path: Path) -> None:
    book = failure_log(Trial(tmp_path, elastic__max_failures=3).config, "now")
    errors: list[BaseException | None] = [ActorDiedError(), ConnectionError("the raylet is gone"), DEAD, None]

    def train_once() -> Ended | None:
        error = errors.pop(0)
        if error is DEAD:
            # The controller has judged it.
            FailureJudge(book).make_decision(DEAD)
        return None if error is None else Ended(error=error, logs=None)

    train_until_done(book, train_once)
    assert not errors
    assert [event.failure for event in read_events(book.config.run_dir) if isinstance(event, StartFailed)] == [1, 2, 3]


def test_the_command_gives_up_when_its_failures_are_used_up_in_few_lines(tmp_path: Path) -> None:
    book = failure_log(Trial(tmp_path, elastic__max_failures=1).config, "now")
    with pytest.raises(TrainingFailed) as failed:
        train_until_done(book, lambda: Ended(error=ConnectionError("the raylet is gone\n" + RAY_DUMP), logs="/logs"))
    lines = str(failed.value).splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("run 'run' failed: Ray could not run the workers: ConnectionError: the raylet is gone")
    assert "/logs" in lines[1] and "the same command resumes from step 0" in lines[2]


def test_failures_that_the_journal_refused_count_once_and_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trial, writes = Trial(tmp_path), False
    trial.attempt(1)
    book = trial.book()

    def refused(*arguments: Any, **options: Any) -> None:
        if writes:
            record_failure(*arguments, **options)
        raise OSError(28, "No space left on device")

    def judged() -> int | None:
        trial.time += 1.0
        return book.judge(LOST, 0).failure

    with monkeypatch.context() as patch:
        patch.setattr("ray_ulysses.cluster.failures.record_failure", refused)
        assert judged() == 1
        writes = True
        assert judged() == 2
    assert judged() == 3
    assert [one.failure for one in book.failures()] == [1, 2, 3]
    assert "No space left on device" in caplog.text and LOST.reason in caplog.text


def test_the_record_of_a_hang_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the stacks of every rank, up to ten megabytes."""
    trial, num_read = Trial(tmp_path, elastic__max_failures=1), 0
    trial.attempt(1)
    record_hang(trial.config.run_dir, "rank 0 hangs", {0: "its stack"}, writer=CONTROLLER)

    def counted(text: bytes, attempt: int) -> Event | None:
        nonlocal num_read
        num_read += b"its stack" in text
        return parse_line(text, attempt)

    monkeypatch.setattr("ray_ulysses.tracking.journal_reader.parse_line", counted)
    book, numbers = trial.book(), []
    for _ in range(3):
        trial.time += 1.0
        numbers.append(book.judge(LOST, 0).failure)
        # Its command also records failures.
        trial.time += 1.0
        numbers.append(trial.book(writer=COMMAND).judge(LOST, 0).failure)
    assert numbers == [1, 2, 3, 4, 5, 6] and [one.failure for one in book.failures()] == numbers
    assert num_read == 1 + 3, "once by this log, and once by each other"


def test_a_failure_is_judged_while_the_journal_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = Trial(tmp_path)
    trial.attempt(1, 2)
    book = trial.book()

    def away(*arguments: object, **options: object) -> None:
        raise OSError(113, "the store failed for 20.0 s: it could not be reached")

    for name in ("newest_attempt", "read_side_files", "record_failure"):
        monkeypatch.setattr(f"ray_ulysses.cluster.failures.{name}", away)
    failure = book.judge(cause_of(group_error({0: GLOO, 1: KILLED})), None)
    assert failure.restarts and failure.rank == 1 and book.failures() == [failure]
    assert not book.judge(replace(LOST, is_final=True), None).restarts


def test_a_failure_that_is_survived_says_where_and_what_it_cost(tmp_path: Path) -> None:
    trial = Trial(tmp_path)
    trial.attempt(*range(1, 20))
    save(trial.store, 10)
    failure = trial.judge(LOST)
    assert describe_failure(failure) == (
        "lost worker 1 (killed by signal 9); restarting from step 10; 9 steps lost; failure 1 of 3"
    )
    ended = read_events(trial.config.run_dir)[-1]
    assert isinstance(ended, AttemptEnded)
    assert (ended.rank, ended.node, ended.lost_steps) == (1, "b/10.0.0.2", 9)
    (attempt,) = read_history(trial.config.run_dir).attempts
    assert (attempt.reason, attempt.rank, attempt.node) == (LOST.reason, 1, "b/10.0.0.2")


def test_one_failure_too_many_ends_the_run_and_progress_begins_the_count_anew(tmp_path: Path) -> None:
    trial, numbers = Trial(tmp_path, elastic__max_failures=2), []
    trial.attempt(1, 2)
    for failures, resumed in ((2, 0), (3, 2)):
        for _ in range(failures):
            failure = trial.judge(LOST)
            numbers.append((failure.failure, failure.restarts))
            trial.attempt(*((3,) if resumed else (1, 2)), resumed=resumed)
        # A checkpoint is committed: what came before it is forgiven.
        save(trial.store, 2)
    assert numbers == [(1, True), (2, True), (1, True), (2, True), (3, False)]
    assert "elastic.max_failures=2" in describe_failure(failure) and "restarting" not in describe_failure(failure)


def test_workers_that_form_again_are_not_charged_for_where_the_attempt_moved_the_run_on(tmp_path: Path) -> None:
    trial = Trial(tmp_path, elastic__max_failures=0)
    book = trial.book()
    trial.attempt(1, 2, 3)
    failure = book.judge(LOST, 0, Noticed(memory_step=2))
    assert (failure.restarts, failure.failure, failure.memory_step, failure.lost_steps) == (True, None, 2, 1)
    # Nothing newer than what it began from is left of the next one; and Ray's restarts are charged as ever.
    trial.attempt(3, resumed=2)
    assert book.judge(LOST, 2, Noticed(memory_step=2)).failure == 1
    trial.attempt(3, resumed=2)
    assert book.judge(LOST, 3, Noticed()).restarts
    trial.attempt(4, resumed=3)
    assert not book.judge(LOST, 4).restarts


def test_failures_of_the_day_before_and_of_another_command_do_not_count(tmp_path: Path) -> None:
    trial = Trial(tmp_path, elastic__max_failures=1, elastic__failure_window_s=100.0)
    for session, later_s in (("before", 0), ("now", 101), ("now", 0)):
        trial.attempt(1)
        failure = trial.judge(LOST, session=session)
        assert failure.failure == 1 and failure.restarts
        trial.time += later_s


def test_a_failure_before_any_attempt_began_is_told_beside_it_and_not_as_its_end(tmp_path: Path) -> None:
    trial = Trial(tmp_path)
    start = Cause(kind="start", reason="2 workers did not start in time", rank=None, hint="add nodes")
    trial.judge(start)
    (told,) = read_events(trial.config.run_dir)
    assert (told.event, told.attempt) == ("start_failed", 1)
    # An earlier command's attempt is not ended by it.
    trial.attempt(1, session="before")
    journal = open_journal(trial.config.run_dir, 2, clock=trial)
    journal.append({"event": "attempt_ended", "reason": "stopped"})
    journal.close()
    trial.time += 86400
    trial.judge(start, first_attempt=3)
    assert [event.event for event in read_events(trial.config.run_dir) if event.attempt == 2][-1] == "start_failed"
    history = read_history(trial.config.run_dir)
    assert history.attempts[0].reason == "stopped" and history.status == "stopped"
    assert history.goodput == 1.0, "the day until the next command is not the attempt's"


@pytest.mark.parametrize("saved", [0, 1])
def test_the_announced_end_of_a_node_is_not_charged_and_a_preemption_if_a_state_was_saved(
    tmp_path: Path, saved: int
) -> None:
    trial = Trial(tmp_path, elastic__max_failures=0)
    trial.attempt(1, 2)
    if saved:
        save(trial.store, saved)
    for _ in range(2):
        failure = trial.judge(Cause(kind="preempted", reason="lost worker 0 (-)", rank=0, hint="-"))
        assert failure.reason == ("preempted: " if saved else "") + "lost worker 0 (-)"
        assert failure.restarts and failure.failure is None and failure.committed_step == saved
    assert read_history(trial.config.run_dir).attempts[0].reason == failure.reason


def test_an_attempt_ends_once_whoever_tells_it(tmp_path: Path) -> None:
    trial = Trial(tmp_path)
    trial.attempt(1)
    trial.judge(LOST)
    trial.judge(Cause(kind="controller", reason="ActorDiedError", rank=None, hint="-"), writer=COMMAND)
    events = [event.event for event in read_events(trial.config.run_dir)]
    assert events.count("attempt_ended") == 1 and events.count("start_failed") == 1


def test_a_run_that_has_failed_says_so_until_it_goes_on(tmp_path: Path) -> None:
    trial = Trial(tmp_path, elastic__max_failures=0)
    # The node of a GPU that fails before any attempt began is known all the same.
    failed = RankError(rank=1, kind="device", what="CUDA error: misaligned address", node="c/10.0.0.3")
    failure = trial.judge(root_cause([failed]))
    assert (failure.kind, failure.node) == ("device", "c/10.0.0.3")
    record_run_failed(trial.config, failure)
    found = read_history(trial.config.run_dir).failure
    assert found is not None and found.node == "c/10.0.0.3" and "misaligned address" in found.reason
    trial.attempt(*range(1, 8))
    failure = trial.judge(LOST)
    record_run_failed(trial.config, failure)
    history = read_history(trial.config.run_dir)
    assert history.status == "failed" and history.failure is not None
    assert failure_fields(history.failure) == failure_fields(failure)
    printed = history.to_json()["failure"]
    assert (printed["reason"], printed["way_out"], printed["lost_steps"]) == (LOST.reason, LOST.hint, 7)
    trial.attempt(1, session="next")
    assert read_history(trial.config.run_dir).failure is None
