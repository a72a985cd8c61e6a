"""The probe of shared storage, with ranks as threads and other directories in the place of other nodes."""

from __future__ import annotations

import errno
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from ray_ulysses.checkpoint.errors import StorageFailedError
from ray_ulysses.errors import RunError, UserError
from ray_ulysses.run.requests import announce_session
from ray_ulysses.storage import LocalStore
from ray_ulysses.trainer.context import probe_storage
from ray_ulysses.trainer.worker import Worker
from tests.unit.checkpoint.fakes import ThreadExchange, on_ranks


def worker_of(rank: int, world_size: int, session: str = "now") -> Worker:
    def no_source(*args: Any) -> Any:
        raise AssertionError("the probe reads no rows")

    return Worker(
        rank=rank,
        local_rank=0,
        world_size=world_size,
        node=f"node-{rank}",
        device=torch.device("cpu"),
        session=session,
        make_source=no_source,
    )


def probe(directories: list[Path]) -> list[Any]:
    """Probe from one rank a directory; return None or the error of each."""

    def call(rank: int, messenger: ThreadExchange) -> None:
        probe_storage(directories[rank], worker_of(rank, len(directories)), messenger)

    return on_ranks(len(directories), call)


def test_storage_that_all_nodes_share_passes_and_is_left_clean(tmp_path: Path) -> None:
    announce_session(tmp_path, "now")
    assert probe([tmp_path] * 3) == [None] * 3
    assert [path.name for path in tmp_path.iterdir()] == ["session"]


def test_a_node_that_does_not_see_what_the_driver_wrote_is_named_on_every_rank(tmp_path: Path) -> None:
    shared, other = tmp_path / "shared", tmp_path / "other"
    for directory in (shared, other):
        directory.mkdir()
    announce_session(shared, "now")
    announce_session(other, "earlier")
    errors = probe([shared, other, shared])
    assert {type(error) for error in errors} == {UserError}
    assert len({str(error).replace(str(other), str(shared)) for error in errors}) == 1
    text = str(errors[0])
    assert text.startswith(f"run.storage: {shared} is not one shared directory on every node: ")
    assert "node node-1 sees another run directory than the driver" in text
    assert text.endswith("Mount the same file system at that path on every node")


def test_a_node_that_finds_nothing_there_says_so(tmp_path: Path) -> None:
    shared, empty = tmp_path / "shared", tmp_path / "empty"
    for directory in (shared, empty):
        directory.mkdir()
    announce_session(shared, "now")
    errors = probe([shared, empty])
    assert all("node node-1 can't use it (No such file or directory)" in str(error) for error in errors)


def test_a_full_disk_is_called_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    announce_session(tmp_path, "now")
    replace = LocalStore.replace

    def full(self: LocalStore, key: str, chunks: Iterable[bytes]) -> None:
        if key.endswith("rank-00001"):
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(self, key, chunks)

    monkeypatch.setattr(LocalStore, "replace", full)
    errors = probe([tmp_path, tmp_path])
    assert {type(error) for error in errors} == {StorageFailedError}
    text = str(errors[0])
    assert text.startswith(f"run.storage: the disk of {tmp_path} is full: ")
    assert "node-1 (No space left on device)" in text and "Free space" in text
    assert "one shared directory" not in text


def test_an_attempt_that_is_dying_does_not_erase_the_marks_of_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one session; it ends its probe between the next one's marks and rank 0's look at them."""
    announce_session(tmp_path, "now")
    look, dying = LocalStore.list, []

    def late(self: LocalStore, prefix: str) -> list[str]:
        if not dying:
            dying.append(None)
            dying[:] = probe([tmp_path])
        return look(self, prefix)

    monkeypatch.setattr(LocalStore, "list", late)
    assert probe([tmp_path] * 3) == [None] * 3
    assert dying == [None]
    assert [path.name for path in tmp_path.iterdir()] == ["session"]


def test_marks_of_attempts_that_died_go_with_the_next_command(tmp_path: Path) -> None:
    for folder in (f"probe-{uuid.uuid4().hex}", "probe-of-mine"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "rank-00000").touch()
    announce_session(tmp_path, "now")
    assert {path.name for path in tmp_path.iterdir()} == {"session", "probe-of-mine"}


def test_a_copy_that_is_not_shared_is_found_by_rank_0(tmp_path: Path) -> None:
    """Such as a directory that was copied to each node: every node reads the session, none sees the others' writes."""
    shared, copy = tmp_path / "shared", tmp_path / "copy"
    for directory in (shared, copy):
        directory.mkdir()
        announce_session(directory, "now")
    errors = probe([shared, copy, copy])
    assert all("files of node node-1, node-2 are not visible on node node-0" in str(error) for error in errors)


@pytest.mark.parametrize("call", ["open", "list"])
def test_a_storage_that_is_away_ends_the_attempt_on_every_rank_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def away(self: LocalStore, key: str) -> None:
        raise OSError(errno.EHOSTUNREACH, "No route to host")

    announce_session(tmp_path, "now")
    monkeypatch.setattr(LocalStore, call, away)
    errors = probe([tmp_path] * 2)
    assert {type(error) for error in errors} == {RunError}
    assert "does not answer: rank " in str(errors[0]) and "No route to host" in str(errors[0])


def test_a_directory_that_may_not_be_listed_is_told_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: LocalStore, key: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    announce_session(tmp_path, "now")
    monkeypatch.setattr(LocalStore, "list", refused)
    errors = probe([tmp_path] * 2)
    assert {type(error) for error in errors} == {UserError}
    assert "directory on every node: rank 0: node node-0 can't list it (Permission denied). " in str(errors[0])


def test_a_probe_that_can_not_be_deleted_stops_nobody_and_the_next_command_deletes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(self: LocalStore, key: str) -> None:
        raise OSError(errno.EIO, "Input/output error")

    announce_session(tmp_path, "now")
    with monkeypatch.context() as patched:
        patched.setattr(LocalStore, "delete", away)
        assert probe([tmp_path] * 2) == [None] * 2
    assert len(list(tmp_path.iterdir())) == 2
    announce_session(tmp_path, "again")
    assert [path.name for path in tmp_path.iterdir()] == ["session"]
