"""What counts as complete: never a step that was not saved; what a death left out is recorded by the next start."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ray_ulysses.checkpoint.fence import Lineage
from ray_ulysses.errors import RunError
from ray_ulysses.run.completion import record_command_ended, record_completion
from ray_ulysses.run.preflight import PreparedRun, claim_directory, prepare_run
from ray_ulysses.run.run_files import RunTexts, describe_run, describing_files
from ray_ulysses.run.start_point import commits_that_count
from ray_ulysses.storage import LocalStore
from ray_ulysses.tracking.events import Event, RunFinished
from ray_ulysses.tracking.history import read_history
from ray_ulysses.tracking.journal import AttemptJournal, claim_journal
from tests.distributed.run_case import make_config
from tests.unit.checkpoint.fakes import save
from tests.unit.tracking.journals import commit, event, read_events, started, step
from tests.unit.tracking.test_other_trackers import points, texts

ENDED, FINISHED = {"event": "attempt_ended", "reason": "finished"}, {"event": "run_finished", "step": 2}


@pytest.fixture
def prepare(tmp_path: Path, small_corpus: Path) -> Callable[..., PreparedRun]:
    def prepare(stop_step: int = 2, *, claim: bool = False, **changes: Any) -> PreparedRun:
        config = make_config(tmp_path / "runs", small_corpus, run__stop_step=stop_step, **changes)
        prepared = prepare_run(config, Path("/"))
        if claim:
            claim_directory(prepared)
        return prepared

    return prepare


def _attempt(run_dir: Path, steps: int) -> AttemptJournal:
    """Write the journal of an attempt that trains some steps and dies."""
    journal = claim_journal(run_dir)
    for record in (started(), *map(step, range(1, steps + 1))):
        journal.append(record)
    return journal


def test_a_last_step_that_was_trained_and_not_saved_is_not_complete(prepare: Callable[..., PreparedRun]) -> None:
    prepared = prepare(claim=True)
    journal = _attempt(prepared.config.run_dir, 2)
    assert record_completion(prepared) is None
    journal.append({"event": "attempt_ended", "reason": "failed: CheckpointError: disk full"})
    assert record_completion(prepared) is None
    journal.append(ENDED)
    journal.append(FINISHED)
    history = record_completion(prepared)
    assert history is not None and history.status == "finished"


def test_an_attempt_that_died_after_its_last_save_is_completed(prepare: Callable[..., PreparedRun]) -> None:
    run_dir = prepare(claim=True).config.run_dir
    _attempt(run_dir, 3)
    save(LocalStore(run_dir), 2)
    assert read_history(run_dir).status == "interrupted"
    # The end is recorded once, although the command may be repeated.
    for _ in range(2):
        history = record_completion(prepare())
        assert history is not None and history.status == "finished" == read_history(run_dir).status
    assert [one.step for one in read_events(run_dir) if isinstance(one, RunFinished)] == [2]
    # The third step was trained but not saved.
    assert record_completion(prepare(stop_step=3)) is None
    # A tracker that is added after the end gets the whole run.
    for _ in range(2):
        added = prepare(tracking__enabled=True, tracking__trackers=["tensorboard"])
        assert record_completion(added) is not None
    assert [number for number, _ in points(run_dir, "train/loss")] == [1, 2, 3]
    shown = texts(run_dir)
    assert "| state | finished |" in shown["state"] and "| step | 2 |" in shown["checkpoints"]


def test_a_command_says_when_it_ended_and_one_without_an_attempt_says_nothing(tmp_path: Path) -> None:
    record_command_ended(tmp_path, "mine")
    assert not (tmp_path / "journal").exists()
    journal = claim_journal(tmp_path)
    journal.append({"event": "phase", "phase": "self-test", "session": "mine"})
    record_command_ended(tmp_path, "another")
    record_command_ended(tmp_path, "mine")
    assert [event.event for event in read_events(tmp_path)] == ["phase", "command_ended"]


def test_a_run_whose_state_is_missing_or_damaged_is_refused(prepare: Callable[..., PreparedRun]) -> None:
    prepared = prepare(stop_step=9, claim=True)
    run_dir = prepared.config.run_dir
    journal = _attempt(run_dir, 3)
    save(LocalStore(run_dir), 2)
    journal.append(commit(2))
    assert record_completion(prepared) is None
    manifest = run_dir / "checkpoints/step-00000002/manifest.json"
    manifest.write_bytes(b"{")
    with pytest.raises(RunError, match="step 2 is damaged"):
        record_completion(prepared)
    manifest.unlink()
    with pytest.raises(RunError, match="the journal records a checkpoint at step 2"):
        record_completion(prepared)


def test_a_finished_run_without_checkpoints_stays_complete(prepare: Callable[..., PreparedRun], tmp_path: Path) -> None:
    """Exported and cleaned away; the job is submitted once more."""
    journal = _attempt(prepare(claim=True).config.run_dir, 2)
    for record in (commit(2), ENDED, FINISHED):
        journal.append(record)
    # Also where it was started from another run, which is gone as well.
    for changes in ({}, {"model__resume_from": str(tmp_path / "gone")}):
        history = record_completion(prepare(**changes))
        assert history is not None and history.status == "finished"
    with pytest.raises(RunError, match="the journal records a checkpoint at step 2"):
        record_completion(prepare(stop_step=3))


LOST = Lineage(newest_attempt=0, started_from={})


def committed(number: int, attempt: int = 1) -> Event:
    return event(commit(number, attempt=attempt))


def test_steps_that_were_set_aside_or_come_after_a_later_attempts_start_are_not_missed() -> None:
    aside = event({"event": "checkpoint_set_aside", "step": 4, "reason": "torn", "attempt": 2})
    assert commits_that_count([], LOST) == ()
    assert commits_that_count([event({"event": "attempt_started"}), committed(2), committed(4), aside], LOST) == (2,)
    assert commits_that_count([committed(4), aside, committed(4)], LOST) == (4,)
    lineage = Lineage(newest_attempt=2, started_from={1: 0, 2: 2})
    assert commits_that_count([committed(2), committed(4), committed(6, 2)], lineage) == (2, 6)
    assert commits_that_count([committed(4), committed(4, 2)], lineage) == (4,)


def test_what_is_there_is_handed_on_without_passwords(tmp_path: Path) -> None:
    assert describing_files(tmp_path) == {}
    (tmp_path / "config.yaml").write_text("tracking:\n  uri: http://me:secret@mlflow:5000\n")
    describe_run(tmp_path, RunTexts(plan="plan of run 'demo'", readme="# demo\n", facts={"name": "demo"}))
    assert describing_files(tmp_path) == {
        "README.md": "# demo\n",
        "config.yaml": "tracking:\n  uri: http://***@mlflow:5000\n",
        "plan.txt": "plan of run 'demo'\n",
    }
    (tmp_path / "plan.txt").write_bytes(b"\xff")
    assert set(describing_files(tmp_path)) == {"README.md", "config.yaml"}
