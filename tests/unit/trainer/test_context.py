"""Which number an attempt gets, and when another command has taken the run over."""

from __future__ import annotations

from pathlib import Path

import pytest

import ray_ulysses.trainer.context as module
from ray_ulysses.checkpoint.fence import claim_attempt, read_lineage
from ray_ulysses.config import Config
from ray_ulysses.errors import UserError
from ray_ulysses.run.checkpoint_store import checkpoint_claim, checkpoint_store
from ray_ulysses.run.settings import resolve_run
from ray_ulysses.storage import run_claim
from ray_ulysses.tracking.journal import AttemptJournal, claim_journal
from tests.distributed.run_case import make_config
from tests.unit.trainer.test_record import _worker


def _claim(config: Config, session: str) -> AttemptJournal:
    return module._claim(resolve_run(config), _worker(session))


def _command(config: Config, session: str) -> None:
    with run_claim(config.run_dir, session), checkpoint_claim(config, checkpoint_store(config), session):
        pass


def test_a_command_does_not_take_a_run_back_from_the_one_that_took_it_over(tmp_path: Path) -> None:
    """Ray starts the workers of a command again; another one has begun with the same checkpoints meanwhile."""
    mine, theirs = (
        make_config(tmp_path / name, tmp_path / "corpus", checkpoint__storage=str(tmp_path / "shared"))
        for name in ("mine", "theirs")
    )
    _command(mine, "one")
    assert [_claim(mine, "one").attempt, _claim(mine, "one").attempt] == [1, 2]
    _command(theirs, "two")
    assert _claim(theirs, "two").attempt == 3
    with pytest.raises(UserError, match=r"another command has taken the run over: process .*\. This one ends"):
        _claim(mine, "one")
    assert read_lineage(checkpoint_store(mine)).newest_attempt == 3
    # A new command, which has claimed the run, may.
    _command(mine, "three")
    assert _claim(mine, "three").attempt == 4


def test_an_attempt_s_number_is_free_in_the_journal_and_beside_the_checkpoints(tmp_path: Path) -> None:
    config = make_config(tmp_path / "runs", tmp_path / "corpus", checkpoint__storage=str(tmp_path / "apart"))
    store = checkpoint_store(config)
    assert claim_attempt(store, 5)
    assert _claim(config, "one").attempt == 6
    claim_journal(config.run_dir).close()
    assert _claim(config, "one").attempt == 8
