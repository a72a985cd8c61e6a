"""A lock's note names its holder, or nobody where it is torn."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ray_ulysses.storage.lock import LockOwner, lock_file, read_owner, write_note

NOTE = {"host": "node-1", "pid": 7, "since": 0.0}
DAMAGED = [b"", b"{", b"\xff", *(json.dumps({**NOTE, **wrong}).encode() for wrong in ({"since": 1e300}, {"pid": -1}))]


def test_a_note_is_read_back_whatever_else_it_says() -> None:
    owner = LockOwner(**NOTE)  # type: ignore[arg-type]
    assert LockOwner.from_note(owner.to_note(run="demo")) == owner


@pytest.mark.parametrize("note", DAMAGED)
def test_a_damaged_note_names_nobody(tmp_path: Path, note: bytes) -> None:
    write_note(lock_file(tmp_path / "lock"), note)
    assert read_owner(tmp_path / "lock") is None


def test_a_lock_file_that_was_deleted_in_between_is_not_the_one_that_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lock"
    path.write_text("")
    real_open = os.open

    def delete_after_opening(name: object, *args: object, **folder: int) -> int:
        descriptor = real_open(name, *args, **folder)  # type: ignore[call-overload]
        if name == path.name:
            monkeypatch.setattr(os, "open", real_open)
            path.unlink()
        return int(descriptor)

    monkeypatch.setattr(os, "open", delete_after_opening)
    assert os.path.samestat(os.fstat(lock_file(path)), path.stat())
    with pytest.raises(BlockingIOError):
        lock_file(path)
