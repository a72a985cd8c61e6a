from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ray_ulysses.checkpoint import CheckpointRef, KeepRules, Retention, newest_committed
from ray_ulysses.checkpoint.choice import committed_steps
from ray_ulysses.run_names import CHECKPOINT_FOLDER, step_folder
from ray_ulysses.storage import LocalStore
from ray_ulysses.storage.regular import NotAPlainFileError
from tests.unit.checkpoint.fakes import save

NEWEST = CheckpointRef(step=6, attempt=1, world_size=2)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path / "run")
    for step in (2, 4, 6):
        save(store, step)
    return store


@pytest.mark.parametrize("key", [f"{step_folder(2)}/attempt-0001", step_folder(2), CHECKPOINT_FOLDER])
def test_retention_deletes_nothing_behind_a_link(store: LocalStore, tmp_path: Path, key: str) -> None:
    link = store.root / key
    moved = Path(shutil.move(link, tmp_path / "disk"))
    link.symlink_to(moved)
    before = sorted(moved.rglob("*"))
    with pytest.raises(NotAPlainFileError) as refused:
        Retention(store, KeepRules(last=2)).apply(NEWEST)
    assert refused.value.filename == str(link)
    with pytest.raises(NotAPlainFileError):
        newest_committed(store)
    assert sorted(moved.rglob("*")) == before


def test_retention_deletes_only_names_that_a_run_writes(store: LocalStore, caplog: pytest.LogCaptureFixture) -> None:
    folder = store.root / step_folder(2)
    for name in ("attempt-0001/photos/1.jpg", "attempt-0001/rank-00000-of-00002.txt", "notes.txt"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("canary")
    # Of a dead attempt, beside a checkpoint that stays.
    (store.root / step_folder(4) / "attempt-0000").mkdir()
    (store.root / step_folder(4) / "attempt-0000" / "photo.jpg").write_text("canary")
    retention = Retention(store, KeepRules(last=2))
    assert retention.apply(NEWEST) == (2,)
    assert committed_steps(store) == (4, 6)
    left = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert left == {"attempt-0001/photos/1.jpg", "attempt-0001/rank-00000-of-00002.txt", "notes.txt"}
    assert (store.root / step_folder(4) / "attempt-0000" / "photo.jpg").exists()
    assert f"{step_folder(2)}/attempt-0001/photos/1.jpg" in caplog.text
    # The next call does not list this folder again.
    photo = store.root / step_folder(4) / "attempt-0001" / "photo.jpg"
    photo.write_text("canary")
    save(store, 8)
    assert retention.apply(CheckpointRef(step=8, attempt=1, world_size=2)) == (4,)
    assert photo.exists() and not list(photo.parent.glob("rank*"))
