"""Attempt numbers, and the check of shared storage with ranks as threads and directories as nodes."""

from __future__ import annotations

import errno
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

import ray_ulysses.trainer.context as module
from ray_ulysses.checkpoint.errors import StorageFailedError
from ray_ulysses.checkpoint.fence import claim_attempt, read_lineage
from ray_ulysses.config import Config
from ray_ulysses.errors import RunError, UserError
from ray_ulysses.run.checkpoint_store import checkpoint_claim, checkpoint_store
from ray_ulysses.run.requests import announce_session
from ray_ulysses.run.settings import resolve_run
from ray_ulysses.storage import LocalStore, run_claim
from ray_ulysses.tracking.journal import AttemptJournal, claim_journal
from ray_ulysses.trainer.context import probe_storage
from ray_ulysses.trainer.worker import Worker
from tests.distributed.run_case import make_config
from tests.unit.checkpoint.fakes import ThreadExchange, on_ranks


def worker_of(rank: int = 0, world_size: int = 1, *, session: str = "now") -> Worker:
    return Worker(
        rank=rank, local_rank=0, world_size=world_size, node=f"node-{rank}", device=torch.device("cpu"),
        session=session, make_source=lambda *_: pytest.fail("no rows are read"),
    )  # fmt: skip


def claim(config: Config, session: str) -> AttemptJournal:
    return module._claim(resolve_run(config), worker_of(session=session))


def command(config: Config, session: str) -> None:
    with run_claim(config.run_dir, session), checkpoint_claim(config, checkpoint_store(config), session):
        pass


def test_a_command_does_not_take_a_run_back_from_the_one_that_took_it_over(tmp_path: Path) -> None:
    """Ray restarts a command's workers after another command has started with the same checkpoints."""
    mine, theirs = (
        make_config(tmp_path / name, tmp_path / "corpus", checkpoint__storage=str(tmp_path / "shared"))
        for name in ("mine", "theirs")
    )
    command(mine, "one")
    assert [claim(mine, "one").attempt, claim(mine, "one").attempt] == [1, 2]
    command(theirs, "two")
    assert claim(theirs, "two").attempt == 3
    with pytest.raises(UserError, match="another command has taken over the run"):
        claim(mine, "one")
    assert read_lineage(checkpoint_store(mine)).newest_attempt == 3
    command(mine, "three")
    assert claim(mine, "three").attempt == 4


def test_an_attempt_s_number_is_free_in_the_journal_and_beside_the_checkpoints(tmp_path: Path) -> None:
    config = make_config(tmp_path / "runs", tmp_path / "corpus", checkpoint__storage=str(tmp_path / "apart"))
    assert claim_attempt(checkpoint_store(config), 5)
    assert claim(config, "one").attempt == 6
    claim_journal(config.run_dir).close()
    assert claim(config, "one").attempt == 8


def probe(directories: list[Path]) -> list[Any]:
    """Probe with one rank per directory; return each rank's error or None."""

    def call(rank: int, messenger: ThreadExchange) -> None:
        probe_storage(directories[rank], worker_of(rank, len(directories)), messenger)

    return on_ranks(len(directories), call)


def refusing(error: int, *, suffix: str = "") -> Callable[..., Any]:
    replace = LocalStore.replace

    def call(self: LocalStore, key: str, chunks: Iterable[bytes] = ()) -> None:
        if key.endswith(suffix):
            raise OSError(error, "refused")
        replace(self, key, chunks)

    return call


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    folder = tmp_path / "shared"
    folder.mkdir()
    announce_session(folder, "now")
    return folder


@pytest.mark.parametrize(
    ("session", "words"),
    [
        ("earlier", "node node-1 sees a different run directory than the driver"),
        (None, "node node-1 can't use it"),
        # The directory was copied to each node, so every node has the session file.
        ("now", "files of node node-1 are not visible on node node-0"),
    ],
    ids=["another", "empty", "copy"],
)
def test_a_node_with_another_directory_is_named(tmp_path: Path, shared: Path, session: str | None, words: str) -> None:
    other = tmp_path / "other"
    other.mkdir()
    if session is not None:
        announce_session(other, session)
    errors = probe([shared, other, shared])
    assert {type(error) for error in errors} == {UserError}
    assert all("run.storage: " in str(error) and words in str(error) for error in errors)


@pytest.mark.parametrize(
    ("call", "error", "kind"),
    [
        ("replace", errno.ENOSPC, StorageFailedError),
        ("open", errno.EHOSTUNREACH, RunError),
        ("list", errno.EHOSTUNREACH, RunError),
        ("list", errno.EACCES, UserError),
    ],
    ids=["full", "away", "away-later", "refused"],
)
def test_every_rank_ends_with_the_kind_of_error_that_one_rank_has(
    shared: Path, monkeypatch: pytest.MonkeyPatch, call: str, error: int, kind: type[Exception]
) -> None:
    monkeypatch.setattr(LocalStore, call, refusing(error, suffix="rank-00001" if call == "replace" else ""))
    assert {type(found) for found in probe([shared] * 2)} == {kind}


def test_a_dying_attempt_keeps_the_next_attempts_marks(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dying attempt of the same session ends its probe before rank 0 lists the next attempt's marks."""
    look, dying = LocalStore.list, []

    def late(self: LocalStore, prefix: str) -> list[str]:
        if not dying:
            dying.append(None)
            dying[:] = probe([shared])
        return look(self, prefix)

    monkeypatch.setattr(LocalStore, "list", late)
    assert probe([shared] * 3) == [None] * 3 and dying == [None]
    assert [path.name for path in shared.iterdir()] == ["session"]


def test_a_probe_that_can_not_be_deleted_stops_nobody(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (shared / "probe-of-mine").mkdir()
    (shared / f"probe-{uuid.uuid4().hex}").mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(LocalStore, "delete", refusing(errno.EIO))
        assert probe([shared] * 2) == [None] * 2
    assert len(list(shared.iterdir())) == 4
    announce_session(shared, "again")
    assert {path.name for path in shared.iterdir()} == {"session", "probe-of-mine"}
