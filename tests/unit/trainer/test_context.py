"""Which number an attempt gets, and when another command has taken the run over."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import ray_ulysses.trainer.context as module
from ray_ulysses.checkpoint.fence import claim_attempt
from ray_ulysses.errors import UserError
from ray_ulysses.run.settings import resolve_run
from ray_ulysses.storage import LocalStore
from ray_ulysses.tracking.journal import AttemptJournal
from tests.distributed.run_case import make_config
from tests.unit.tracking.journals import STARTED
from tests.unit.trainer.test_record import _worker


def _claim(folder: Path, session: str) -> AttemptJournal:
    config = make_config(folder, folder / "corpus")
    return module._claim(replace(resolve_run(config), store=LocalStore(folder / "shared")), _worker(session))


def _say_started(journal: AttemptJournal, session: str) -> None:
    sizes = {"world_size": 1, "sp_size": 1, "dp_size": 1}
    fields = {**sizes, "nodes": ["a"], "resumed_step": 0, "resumed_from": None}
    journal.append({"event": "attempt_started", **STARTED, "session": session, **fields})


def test_a_command_does_not_take_a_run_back_from_the_one_that_took_it_over(tmp_path: Path) -> None:
    """Ray starts the workers of a command again; another one has begun with the same checkpoints meanwhile."""
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    (tmp_path / "shared").mkdir()
    for folder in (mine, theirs):
        folder.mkdir()
        (folder / "shared").symlink_to(tmp_path / "shared")
    _say_started(_claim(mine, "one"), "one")
    _say_started(_claim(mine, "one"), "one")
    other = _claim(theirs, "two")
    assert other.attempt == 3
    with pytest.raises(
        UserError, match=r"another command has taken the run over: attempt 3 belongs to it\. This one ends"
    ):
        _claim(mine, "one")
    assert not claim_attempt(LocalStore(mine / "shared"), 3)
    # A new command, which holds the lock, may.
    assert _claim(mine, "three").attempt > 3


def test_a_command_goes_on_after_an_attempt_of_its_own_that_died_before_it_said_so(tmp_path: Path) -> None:
    _say_started(_claim(tmp_path, "one"), "one")
    _claim(tmp_path, "one")
    assert _claim(tmp_path, "one").attempt == 3
