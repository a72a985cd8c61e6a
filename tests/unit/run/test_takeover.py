"""Whose the run is: the newest claim says it, of the run's directory and of checkpoints that are apart from it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ray_ulysses.config import Config
from ray_ulysses.run.checkpoint_store import checkpoint_claim, checkpoint_store
from ray_ulysses.run.takeover import takeover
from ray_ulysses.storage import Claim, LocalStore, run_claim
from tests.distributed.run_case import make_config


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
