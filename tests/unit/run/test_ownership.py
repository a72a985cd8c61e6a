"""Whose a run and its checkpoints are: their directory's, wherever it is moved to, and its newest command's."""

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
from ray_ulysses.run.checkpoint_store import checkpoint_claim, checkpoint_store
from ray_ulysses.run.ownership import claim_checkpoints, peer_memory_key, run_identity
from ray_ulysses.run.settings import resolve_run
from ray_ulysses.run.takeover import takeover
from ray_ulysses.run_names import IDENTITY_FILE, OWNER_FILE
from ray_ulysses.storage import Claim, LocalStore, run_claim
from ray_ulysses.tracking.journal import claim_journal
from tests.distributed.run_case import make_config
from tests.unit.config.trees import small_tree
from tests.unit.inspect.saved import save
from tests.unit.tracking import journals


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
    journal.append(journals.step(step))
    stored = step if digest is None else digest
    save(checkpoint_store(config), step, attempt=journal.attempt, world_size=1, digest=f"{stored:016x}")
    if commit_noted:
        journal.append(journals.commit(step, digest=f"{step:016x}"))
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


def _claimed(config: Config, session: str) -> None:
    """Claim what a command claims, and give it back."""
    with run_claim(config.run_dir, session), checkpoint_claim(config, checkpoint_store(config), session):
        assert takeover(config, session) is None


@pytest.mark.parametrize("is_apart", [False, True])
def test_a_run_is_its_newest_command_s(tmp_path: Path, is_apart: bool) -> None:
    apart = {"checkpoint__storage": str(tmp_path / "apart")} if is_apart else {}
    config = make_config(tmp_path / "runs", tmp_path / "corpus", **apart)
    # Nobody has claimed it.
    assert takeover(config, "one") is None
    _claimed(config, "one")
    assert takeover(config, "one") is None
    _claimed(config, "two")
    assert takeover(config, "one") is not None and takeover(config, "two") is None


def test_a_copied_run_takes_over_its_checkpoints_but_a_link_to_its_own_folder_does_not(tmp_path: Path) -> None:
    def config(name: str, apart: str) -> Config:
        return make_config(tmp_path / name, tmp_path / "corpus", checkpoint__storage=str(tmp_path / apart))

    run, copy = config("runs", "apart"), config("copies", "apart")
    _claimed(run, "one")
    shutil.copytree(run.run_dir, copy.run_dir)
    _claimed(copy, "two")
    assert takeover(run, "one") is not None and takeover(copy, "two") is None
    (tmp_path / "link").symlink_to(tmp_path / "runs")
    run = config("runs", "link")
    with run_claim(run.run_dir, "one"), checkpoint_claim(run, checkpoint_store(run), "one") as apart:
        assert apart is None


def test_a_command_keeps_a_claim_that_it_won_again_and_ignores_a_storage_error(tmp_path: Path) -> None:
    config = make_config(tmp_path / "runs", tmp_path / "corpus")
    for _ in range(2):
        claim = Claim(LocalStore(config.run_dir), run="run", command="one", machine="", lease_s=0.1)
        claim.acquire(beat_in_background=False)
        assert takeover(config, "one") is None
    assert takeover(config, "two") is not None
    shutil.rmtree(config.run_dir / "lock")
    (config.run_dir / "lock").symlink_to(tmp_path)
    assert takeover(config, "two") is None
