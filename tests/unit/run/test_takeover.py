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
    config = make_config(tmp_path / "runs", tmp_path / "corpus", **apart)  # type: ignore[arg-type]
    # Nobody has claimed it.
    assert takeover(config, "one") is None
    _claimed(config, "one")
    assert takeover(config, "one") is None
    _claimed(config, "two")
    assert takeover(config, "one") is not None and takeover(config, "two") is None


def test_the_copy_of_a_run_takes_its_checkpoints_over(tmp_path: Path) -> None:
    run, copy = (
        make_config(tmp_path / name, tmp_path / "corpus", checkpoint__storage=str(tmp_path / "apart"))
        for name in ("runs", "copies")
    )
    _claimed(run, "one")
    shutil.copytree(run.run_dir, copy.run_dir)  # type: ignore[arg-type]
    _claimed(copy, "two")
    assert takeover(run, "one") is not None and takeover(copy, "two") is None


def test_checkpoints_in_the_run_s_directory_by_another_name_have_no_claim_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "runs")
    config = make_config(tmp_path / "runs", tmp_path / "corpus", checkpoint__storage=str(tmp_path / "link"))
    with run_claim(config.run_dir, "one"), checkpoint_claim(config, checkpoint_store(config), "one") as apart:
        assert apart is None


def test_a_command_that_has_won_its_claim_again_has_its_run(tmp_path: Path) -> None:
    config = make_config(tmp_path / "runs", tmp_path / "corpus")
    for _ in range(2):
        Claim(LocalStore(config.run_dir), run="run", command="one", machine="", lease_s=0.1).acquire(
            beat_in_background=False
        )
        assert takeover(config, "one") is None


def test_a_storage_that_does_not_answer_proves_nothing(tmp_path: Path) -> None:
    config = make_config(tmp_path / "runs", tmp_path / "corpus")
    _claimed(config, "two")
    shutil.rmtree(config.run_dir / "lock")  # type: ignore[operator]
    (config.run_dir / "lock").symlink_to(tmp_path)  # type: ignore[union-attr]
    assert takeover(config, "one") is None
