"""What counts as complete: never a step that was not saved; and what a death left unsaid is said by the next start."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ray_ulysses.errors import RunError
from ray_ulysses.run.completion import record_command_ended, record_completion
from ray_ulysses.run.preflight import PreparedRun, claim_directory, prepare_run
from ray_ulysses.run.trackers import tracked
from ray_ulysses.storage import LocalStore
from ray_ulysses.tracking.events import RunFinished
from ray_ulysses.tracking.history import read_history
from ray_ulysses.tracking.journal import AttemptJournal, claim_journal
from ray_ulysses.tracking.mlflow_tracker import TrackingIdentity
from tests.distributed.run_case import make_config, make_corpus
from tests.unit.checkpoint.fakes import save
from tests.unit.tracking.journals import COMMITTED, STARTED, read_events
from tests.unit.tracking.test_other_trackers import points, texts


def _claimed(prepared: PreparedRun) -> PreparedRun:
    claim_directory(prepared)
    return prepared


@pytest.fixture
def prepare(tmp_path: Path) -> Callable[..., PreparedRun]:
    corpus = make_corpus(tmp_path, ("bisect.py", "cmd.py"))

    def prepare(stop_step: int = 2, **changes: Any) -> PreparedRun:
        return prepare_run(make_config(tmp_path / "runs", corpus, run__stop_step=stop_step, **changes), Path("/"))

    return prepare


def _attempt(run_dir: Path, steps: int) -> AttemptJournal:
    """Write what an attempt writes until it dies."""
    journal = claim_journal(run_dir)
    sizes = {"world_size": 1, "sp_size": 1, "dp_size": 1}
    journal.append(
        {"event": "attempt_started", **STARTED, **sizes, "nodes": [], "resumed_step": 0, "resumed_from": None}
    )
    for step in range(1, steps + 1):
        rows = [6 * step - 6, 6 * step]
        record = {"step": step, "loss": 1.0, "tokens": 9, "rows": rows, "digest": "0" * 16, "seconds": 1.0}
        journal.append({"event": "step", **record})
    return journal


def test_a_last_step_that_was_trained_and_not_saved_is_not_complete(prepare: Callable[..., PreparedRun]) -> None:
    prepared = _claimed(prepare())
    journal = _attempt(prepared.config.run_dir, 2)
    assert record_completion(prepared) is None
    journal.append({"event": "attempt_ended", "reason": "failed: CheckpointError: disk full"})
    assert record_completion(prepared) is None
    journal.append({"event": "attempt_ended", "reason": "finished"})
    journal.append({"event": "run_finished", "step": 2})
    history = record_completion(prepared)
    assert history is not None and history.status == "finished"


def test_an_attempt_that_died_after_its_last_save_is_finished_by_the_next_command(
    prepare: Callable[..., PreparedRun],
) -> None:
    prepared = _claimed(prepare())
    run_dir = prepared.config.run_dir
    _attempt(run_dir, 3)
    save(LocalStore(run_dir), 2)
    assert read_history(run_dir).status == "interrupted"
    history = record_completion(prepared)
    assert history is not None and history.status == "finished"
    assert read_history(run_dir).status == "finished"
    # Once: the command may be given again and again.
    record_completion(prepared)
    assert [one.step for one in read_events(run_dir) if isinstance(one, RunFinished)] == [2]
    # The third step was trained and not saved, whatever was said since.
    assert record_completion(prepare(stop_step=3)) is None


def test_a_command_says_when_it_ended_and_one_without_an_attempt_says_nothing(tmp_path: Path) -> None:
    record_command_ended(tmp_path, "mine")
    assert not (tmp_path / "journal").exists()
    journal = claim_journal(tmp_path)
    journal.append({"event": "phase", "phase": "self-test", "session": "mine"})
    record_command_ended(tmp_path, "another")
    record_command_ended(tmp_path, "mine")
    assert [event.event for event in read_events(tmp_path)] == ["phase", "command_ended"]


def test_a_run_whose_state_is_gone_or_damaged_is_refused_before_a_worker_starts(
    prepare: Callable[..., PreparedRun],
) -> None:
    prepared = _claimed(prepare(stop_step=9))
    run_dir = prepared.config.run_dir
    journal = _attempt(run_dir, 3)
    save(LocalStore(run_dir), 2)
    journal.append(
        {"event": "checkpoint_committed", **COMMITTED, "step": 2, "path": "checkpoints/step-00000002", "world_size": 2}
    )
    assert record_completion(prepared) is None
    manifest = run_dir / "checkpoints" / "step-00000002" / "manifest.json"
    manifest.write_bytes(b"{")
    with pytest.raises(RunError, match="step 2 is damaged"):
        record_completion(prepared)
    manifest.unlink()
    with pytest.raises(RunError, match="the journal records a checkpoint at step 2"):
        record_completion(prepared)


def test_a_finished_run_whose_checkpoints_were_deleted_stays_complete(
    prepare: Callable[..., PreparedRun], tmp_path: Path
) -> None:
    """Exported and cleaned away; the job is submitted once more."""
    journal = _attempt(_claimed(prepare()).config.run_dir, 2)
    for event in (
        {"event": "checkpoint_committed", **COMMITTED, "step": 2, "path": "p", "world_size": 1},
        {"event": "attempt_ended", "reason": "finished"},
        {"event": "run_finished", "step": 2},
    ):
        journal.append(event)
    # Also where it was started from another run, which is gone as well.
    for changes in ({}, {"model__resume_from": str(tmp_path / "gone")}):
        history = record_completion(prepare(**changes))
        assert history is not None and history.status == "finished"
    with pytest.raises(RunError, match="the journal records a checkpoint at step 2"):
        record_completion(prepare(stop_step=3))


def test_a_tracker_that_is_added_after_the_end_gets_the_whole_run(prepare: Callable[..., PreparedRun]) -> None:
    run_dir = _claimed(prepare()).config.run_dir
    _attempt(run_dir, 2)
    save(LocalStore(run_dir), 2)
    assert record_completion(prepare()) is not None
    added = prepare(tracking__enabled=True, tracking__trackers=["tensorboard"])
    for _ in range(2):
        assert record_completion(added) is not None
    assert [step for step, _ in points(run_dir, "loss")] == [1, 2]
    shown = texts(run_dir)
    assert "| state | finished |" in shown["state"] and "| step | 2 |" in shown["checkpoints"]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return make_corpus(tmp_path, ("bisect.py", "cmd.py"))


def _prepared(tmp_path: Path, corpus: Path, stop_step: int = 2, **changes: Any) -> PreparedRun:
    config = make_config(tmp_path / "runs", corpus, run__stop_step=stop_step, **changes)
    return prepare_run(config, Path("/"))


def test_mlflow_hears_of_the_last_checkpoint_and_of_the_end(tmp_path: Path, corpus: Path, mlflow_tables: Path) -> None:
    from mlflow.tracking import MlflowClient

    (tmp_path / "runs").mkdir()
    shutil.copy(mlflow_tables, tmp_path / "runs/mlflow.db")
    prepared = _prepared(tmp_path, corpus, tracking__enabled=True)
    config = prepared.config
    claim_directory(prepared)
    _attempt(config.run_dir, 2)
    # The attempt got as far as its first steps with MLflow; what it committed it died before saying.
    with tracked(config):
        pass
    save(LocalStore(config.run_dir), 2)
    assert record_completion(prepared) is not None
    identity = TrackingIdentity.load(config.run_dir)
    assert identity is not None and identity.run_id is not None and config.tracking_uri is not None
    client = MlflowClient(config.tracking_uri)
    run = client.get_run(identity.run_id)
    assert run.info.status == "FINISHED"
    models = client.search_logged_models([run.info.experiment_id])
    assert [(model.tags["step"], model.tags["state"]) for model in models] == [("2", "committed")]
