"""The choice of the checkpoint: an unreadable checkpoint is never silently replaced by an older one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from ray_ulysses.errors import RunError, UserError
from ray_ulysses.run.secrets_file import stored_config
from ray_ulysses.run.start_point import choose_checkpoint, find_checkpoint
from ray_ulysses.run_names import manifest_key
from ray_ulysses.storage import LocalStore, Store
from ray_ulysses.tracking.journal import claim_journal
from tests.stores import permission_lost
from tests.unit.checkpoint.fakes import hiding, save
from tests.unit.export.runs import TINY_LLAMA, fields_of, write_config
from tests.unit.tracking.journals import COMMITTED


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Write a run with checkpoints at steps 2, 4 and 6; the newest is the best."""
    write_config(tmp_path / "run", fields_of(TINY_LLAMA))
    for step in (2, 4, 6):
        save(LocalStore(tmp_path / "run"), step, metrics={"loss": 8.0 - step})
    return tmp_path / "run"


def torn(run_dir: Path, step: int) -> Store:
    store = LocalStore(run_dir)
    path = store.path(manifest_key(step))
    path.write_bytes(path.read_bytes()[:500])
    return store


def denied(run_dir: Path, step: int) -> Store:
    return hiding(LocalStore(run_dir), manifest_key(step))


@pytest.mark.parametrize("spoil", [torn, denied])
@pytest.mark.parametrize("step", [2, 6])
def test_best_is_refused_if_any_checkpoint_can_not_be_read(run_dir: Path, spoil: Any, step: int) -> None:
    assert choose_checkpoint(LocalStore(run_dir), "best").step == 6
    with pytest.raises(RunError, match=f"--step=best: the checkpoint of step {step} "):
        choose_checkpoint(spoil(run_dir, step), "best")


@pytest.mark.parametrize("spoil", [torn, denied])
def test_an_unreadable_newest_or_selected_checkpoint_is_refused(run_dir: Path, spoil: Any) -> None:
    store = spoil(run_dir, 6)
    with pytest.raises(RunError, match=r"step 6 .*use --step 4"):
        choose_checkpoint(store, "latest")
    with pytest.raises(RunError, match=r"step 6 .*--step: 2, 4"):
        choose_checkpoint(store, 6)
    assert choose_checkpoint(store, 4).step == 4


def test_a_storage_that_does_not_respond_is_named(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalStore, "list", Mock(side_effect=permission_lost()))
    for step in ("latest", "best", 4):
        with pytest.raises(RunError, match=rf"can't read the checkpoints in {run_dir} \(Permission denied\)"):
            find_checkpoint(stored_config(run_dir), run_dir, step)  # type: ignore[arg-type]


@pytest.mark.parametrize("place", ["absent", "empty", "a file"])
def test_a_storage_without_the_journals_checkpoints_is_named(tmp_path: Path, place: str) -> None:
    far, run_dir = tmp_path / "far", tmp_path / "run"
    write_config(run_dir, fields_of(TINY_LLAMA), checkpoint__storage=str(far))
    journal = claim_journal(run_dir)
    for step in (2, 4, 6):
        own = {"step": step, "path": f"checkpoints/step-{step:08d}", "world_size": 2}
        journal.append({"event": "checkpoint_committed", **COMMITTED, **own})
    journal.close()
    if place != "absent":
        (far / "run").mkdir(parents=True)
    if place == "a file":
        (far / "run/checkpoints").write_text("x")
    with pytest.raises(RunError, match=r"journal records 3 \(newest: step 6\); .*checkpoint\.storage"):
        find_checkpoint(stored_config(run_dir), run_dir, "latest")


def test_a_run_without_checkpoints_or_a_readable_journal_is_refused(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    write_config(run_dir, fields_of(TINY_LLAMA))
    with pytest.raises(UserError, match="has no committed checkpoint"):
        find_checkpoint(stored_config(run_dir), run_dir, "latest")
    claim_journal(run_dir).close()
    (run_dir / "journal/attempt-0001.jsonl").unlink()
    segment = run_dir / "journal/attempt-0001.jsonl"
    segment.mkdir()
    with pytest.raises(RunError, match=r"is damaged \(journal/attempt-0001"):
        find_checkpoint(stored_config(run_dir), run_dir, "latest")
    segment.rmdir()
    # A FIFO can't be read by any user, including root.
    os.mkfifo(segment)
    with pytest.raises(RunError, match=r"the run's journal, .*can't be read"):
        find_checkpoint(stored_config(run_dir), run_dir, "latest")
