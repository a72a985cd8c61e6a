"""The book of failures: what is written of each, which are survived, and how the journal tells of them afterwards."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ray_ulysses.config import Config
from ray_ulysses.elastic.causes import Cause
from ray_ulysses.run.completion import settle_failed
from ray_ulysses.storage import LocalStore
from ray_ulysses.tracking.events import AttemptEnded
from ray_ulysses.tracking.failures import Failure
from ray_ulysses.tracking.history import read_history
from ray_ulysses.tracking.journal import AttemptJournal
from ray_ulysses.trainer.failures import COMMAND, CONTROLLER, FailureBook
from tests.distributed.run_case import make_config
from tests.unit.checkpoint.fakes import save
from tests.unit.tracking.journals import read_events

LOST = Cause(kind="lost", reason="lost worker 1 (killed by signal 9)", rank=1, way_out="look at `dmesg`")


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


def _book(config: Config, clock: _Clock, session: str = "now", first_attempt: int = 1) -> FailureBook:
    return FailureBook(config=config, session=session, first_attempt=first_attempt, writer=CONTROLLER, clock=clock)


def _attempt(config: Config, clock: _Clock, *steps: int, session: str = "now", resumed: int = 0) -> None:
    journal = AttemptJournal.claim(config.run_dir, clock)
    journal.append(
        {
            "event": "attempt_started",
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


def test_a_failure_that_is_survived_says_where_and_what_it_cost(tmp_path: Path) -> None:
    config, clock = _config(tmp_path), _Clock()
    _attempt(config, clock, *range(1, 20))
    save(LocalStore(config.run_dir), 10)
    failure = _book(config, clock).judge(LOST)
    assert failure.restarts
    assert failure.in_words() == (
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
        failure = book.judge(LOST)
        numbers.append((failure.failure, failure.restarts))
        _attempt(config, clock, 1, 2)
    # A checkpoint is committed: what came before it is forgiven.
    save(LocalStore(config.run_dir), 2)
    for _ in range(3):
        failure = book.judge(LOST)
        numbers.append((failure.failure, failure.restarts))
        _attempt(config, clock, 3, resumed=2)
    assert numbers == [(1, True), (2, True), (1, True), (2, True), (3, False)]
    assert "failure 3, more than elastic.max_failures=2 allows" in failure.in_words()
    assert "restarting" not in failure.in_words()


def test_failures_of_the_day_before_and_of_another_command_do_not_count(tmp_path: Path) -> None:
    config, clock = _config(tmp_path, elastic__max_failures=1, elastic__failure_window_s=100.0), _Clock()
    _attempt(config, clock, 1)
    assert _book(config, clock, session="before").judge(LOST).failure == 1
    _attempt(config, clock, 1)
    assert _book(config, clock).judge(LOST).failure == 1
    clock.time += 101
    _attempt(config, clock, 1)
    assert _book(config, clock).judge(LOST).restarts


def test_a_preemption_is_not_counted_and_what_no_restart_mends_is_final(tmp_path: Path) -> None:
    config, clock = _config(tmp_path, elastic__max_failures=0), _Clock()
    _attempt(config, clock, 1)
    away = Cause(kind="preempted", reason="lost worker 0 (its node was taken away)", rank=0, way_out="-")
    for _ in range(5):
        failure = _book(config, clock).judge(away)
        assert failure.restarts and failure.failure is None
        assert "not counted as a failure" in failure.in_words()
    refused = _book(config, clock).judge(replace(LOST, is_final=True))
    assert not refused.restarts and refused.in_words().endswith("not started again")


def test_a_failure_before_any_attempt_began_is_told_beside_it_and_not_as_its_end(tmp_path: Path) -> None:
    config, clock = _config(tmp_path), _Clock()
    start = Cause(kind="start", reason="2 workers did not start in time", rank=None, way_out="add nodes")
    failure = _book(config, clock).judge(start)
    assert failure.in_words() == "2 workers did not start in time; restarting from step 0; failure 1 of 3"
    (told,) = read_events(config.run_dir)
    assert (told.event, told.attempt) == ("start_failed", 1)
    # An earlier command's attempt is not ended by it.
    _attempt(config, clock, 1, session="before")
    journal = AttemptJournal.open(config.run_dir, 2, clock=clock)
    journal.append({"event": "attempt_ended", "reason": "stopped"})
    journal.close()
    clock.time += 86400
    _book(config, clock, first_attempt=3).judge(start)
    assert [event.event for event in read_events(config.run_dir) if event.attempt == 2][-1] == "start_failed"
    history = read_history(config.run_dir)
    assert history.attempts[0].reason == "stopped" and history.status == "stopped"
    assert history.goodput == 1.0, "the day until the next command is not the attempt's"


def test_an_attempt_ends_once_whoever_tells_it(tmp_path: Path) -> None:
    config, clock = _config(tmp_path), _Clock()
    _attempt(config, clock, 1)
    _book(config, clock).judge(LOST)
    gone = Cause(kind="controller", reason="Ray could not run the workers: ActorDiedError", rank=None, way_out="-")
    replace(_book(config, clock), writer=COMMAND).judge(gone)
    events = [event.event for event in read_events(config.run_dir)]
    assert events.count("attempt_ended") == 1 and events.count("start_failed") == 1


def test_a_run_that_has_failed_says_so_until_it_goes_on(tmp_path: Path) -> None:
    config, clock = _config(tmp_path, elastic__max_failures=0), _Clock()
    _attempt(config, clock, *range(1, 8))
    failure = _book(config, clock).judge(LOST)
    settle_failed(config, failure)
    history = read_history(config.run_dir)
    assert history.status == "failed" and history.failure == failure
    printed = history.to_json()["failure"]
    assert printed["reason"] == LOST.reason and printed["way_out"] == LOST.way_out and printed["lost_steps"] == 7
    _attempt(config, _Clock(), 1, session="next")
    assert read_history(config.run_dir).failure is None


def test_a_record_of_another_version_is_read_as_far_as_it_goes() -> None:
    failure = Failure.from_event(AttemptEnded(time=1.0, attempt=1, reason="fire"))
    assert failure.in_words() == "fire; not started again"


def test_a_storage_that_is_away_keeps_no_failure_from_being_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config, clock = _config(tmp_path), _Clock()
    _attempt(config, clock, 1)

    def full(*arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ray_ulysses.trainer.failures.tell_failure", full)
    assert _book(config, clock).judge(LOST).restarts
    assert "No space left on device" in caplog.text and LOST.reason in caplog.text
