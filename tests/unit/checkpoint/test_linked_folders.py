"""A checkpoint that somebody has moved to a bigger disk and linked back: taken, kept and deleted as any other."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ray_ulysses.checkpoint import CheckpointRef, KeepRules, Retention, newest_committed
from ray_ulysses.checkpoint.choice import committed_steps
from ray_ulysses.run_names import step_folder
from ray_ulysses.storage import LocalStore
from tests.unit.checkpoint.fakes import save


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path / "run")
    for step in (2, 4, 6):
        save(store, step)
    return store


def _move(store: LocalStore, step: int, disk: Path) -> Path:
    disk.mkdir(exist_ok=True)
    moved = Path(shutil.move(store.path(step_folder(step)), disk))
    store.path(step_folder(step)).symlink_to(moved)
    return moved


def test_the_newest_checkpoint_is_taken_wherever_its_folder_lies(store: LocalStore, tmp_path: Path) -> None:
    _move(store, 6, tmp_path / "disk")
    manifest = newest_committed(store).manifest
    assert manifest is not None and manifest.step == 6
    assert committed_steps(store) == (2, 4, 6)


def test_a_newest_checkpoint_whose_disk_is_not_mounted_is_not_passed_over(store: LocalStore, tmp_path: Path) -> None:
    """The run would go on from an older one, and its successor's steps would be trained anew."""
    moved = _move(store, 6, tmp_path / "disk")
    moved.rename(tmp_path / "unmounted")
    with pytest.raises(OSError, match=r"step-00000006 is a link to .*, which is not there; mount it"):
        newest_committed(store)


def test_retention_frees_the_disk_that_a_checkpoint_was_moved_to(store: LocalStore, tmp_path: Path) -> None:
    _move(store, 2, tmp_path / "disk")
    newest = CheckpointRef(step=6, attempt=1, world_size=2)
    assert Retention(store, KeepRules(last=2)).apply(newest) == (2,)
    assert committed_steps(store) == (4, 6)
    assert list((tmp_path / "disk").iterdir()) == []
