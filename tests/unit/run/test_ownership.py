"""Checkpoints that lie apart from their run directory belong to it alone, wherever it is moved to."""

from __future__ import annotations

import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ray_ulysses.config import Config
from ray_ulysses.config.loading import parse_config
from ray_ulysses.errors import RunError, UserError
from ray_ulysses.run.checkpoint_store import checkpoint_store
from ray_ulysses.run.ownership import claim_checkpoints, peer_memory_key, run_identity
from ray_ulysses.run.settings import resolve_run
from ray_ulysses.run_names import IDENTITY_FILE, OWNER_FILE
from ray_ulysses.tracking.journal import claim_journal
from tests.unit.config.trees import small_tree
from tests.unit.inspect.saved import save
from tests.unit.tracking.journals import COMMITTED


@pytest.fixture(params=["path", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path, prefix: str) -> str:
    """A checkpoint storage: a path, or an object store."""
    is_path = request.param == "path"
    return str(tmp_path / "place") if is_path else request.getfixturevalue("s3").uri(f"{prefix}/place")


def run_in(storage: Path, place: str | None) -> Config:
    config = parse_config(small_tree(run__storage=str(storage), checkpoint__storage=place))
    config.run_dir.mkdir(parents=True, exist_ok=True)
    return config


def train(config: Config, step: int, *, commit_noted: bool = True, digest: int | None = None) -> int:
    """Leave in the journal what an attempt does up to a checkpoint, and the checkpoint; return the attempt."""
    journal = claim_journal(config.run_dir)
    journal.append(
        {"event": "step", "step": step, "loss": 1.0, "tokens": 1, "rows": [0, 1], "digest": "0", "seconds": 1.0}
    )
    stored = step if digest is None else digest
    save(checkpoint_store(config), step, attempt=journal.attempt, world_size=1, digest=f"{stored:016x}")
    if commit_noted:
        own = {"step": step, "path": "p", "world_size": 1, "digest": f"{step:016x}"}
        journal.append({"event": "checkpoint_committed", **COMMITTED, **own})
    journal.close()
    return journal.attempt


def owned_by(config: Config) -> str:
    return str(json.loads(checkpoint_store(config).open(OWNER_FILE).read())["run_dir"])


def test_only_a_moved_or_copied_directory_is_still_the_owner(tmp_path: Path, place: str) -> None:
    first, second = run_in(tmp_path / "a", place), run_in(tmp_path / "b", place)
    claim_checkpoints(resolve_run(first))
    for _ in range(2):
        with pytest.raises(UserError) as refused:
            claim_checkpoints(resolve_run(second))
        claim_checkpoints(resolve_run(first))
    text = str(refused.value)
    assert f"checkpoint.storage={place!r}" in text and str(first.run_dir) in text and "model.resume_from=" in text
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    (tmp_path / "a").rename(tmp_path / "moved")
    for storage in ("copy", "moved"):
        claim_checkpoints(resolve_run(run_in(tmp_path / storage, place)))


def test_a_copied_directory_has_a_peer_memory_of_its_own_and_a_linked_one_has_not(tmp_path: Path) -> None:
    first = run_in(tmp_path / "a", None)
    claim_checkpoints(resolve_run(first))
    assert list(first.run_dir.iterdir()) == [], "checkpoints in the run's own directory need no owner"
    key = peer_memory_key(first)
    shutil.copytree(tmp_path / "a", tmp_path / "b", copy_function=shutil.copy2)
    copy = run_in(tmp_path / "b", None)
    assert run_identity(copy) == run_identity(first)
    assert peer_memory_key(copy) != key
    # The next driver finds a dead driver's peer memory, by whichever path it reaches the directory.
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert peer_memory_key(run_in(tmp_path / "link", None)) == key == peer_memory_key(first)


def test_of_directories_that_come_at_once_exactly_one_gets_them(tmp_path: Path, place: str) -> None:
    configs = [run_in(tmp_path / str(number), place) for number in range(6)]
    barrier = threading.Barrier(len(configs))

    def claim(config: Config) -> bool:
        barrier.wait(30)
        try:
            claim_checkpoints(resolve_run(config))
        except UserError:
            return False
        return True

    with ThreadPoolExecutor(len(configs)) as pool:
        won = list(pool.map(claim, configs))
    assert sum(won) == 1
    assert owned_by(configs[0]) == str(configs[won.index(True)].run_dir)


@pytest.mark.parametrize("commit_noted", [True, False], ids=["noted", "died before it was noted"])
def test_checkpoints_without_an_owner_belong_to_the_journal_with_them(tmp_path: Path, commit_noted: bool) -> None:
    place = str(tmp_path / "place")
    first, second = run_in(tmp_path / "a", place), run_in(tmp_path / "b", place)
    train(first, 10)
    assert train(first, 20, commit_noted=commit_noted) == 2
    # The second directory's own checkpoints, of the same attempt and steps, were stored elsewhere.
    train(run_in(tmp_path / "b", str(tmp_path / "elsewhere")), 10)
    for config in (second, run_in(tmp_path / "new", place)):
        with pytest.raises(UserError, match="whose journal records them"):
            claim_checkpoints(resolve_run(config))
        assert not (tmp_path / "place" / "first" / OWNER_FILE).exists()
    claim_checkpoints(resolve_run(first))
    assert owned_by(first) == str(first.run_dir)
    # A journal that records another digest for the step.
    other = run_in(tmp_path / "c", str(tmp_path / "third"))
    train(other, 10, digest=11)
    with pytest.raises(UserError, match="whose journal records them"):
        claim_checkpoints(resolve_run(other))


def test_a_damaged_owner_and_a_storage_that_is_away_are_refused(tmp_path: Path) -> None:
    config = run_in(tmp_path / "a", str(tmp_path / "place"))
    claim_checkpoints(resolve_run(config))
    owner = tmp_path / "place" / "first" / OWNER_FILE
    owner.write_text("{}")
    with pytest.raises(UserError, match=r"owner\.json"):
        claim_checkpoints(resolve_run(config))
    owner.unlink()
    owner.mkdir()
    with pytest.raises(RunError, match="can't read the checkpoints"):
        claim_checkpoints(resolve_run(config))
    assert (config.run_dir / IDENTITY_FILE).is_file()
