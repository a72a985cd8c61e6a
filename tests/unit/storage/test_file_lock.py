"""A lock's note names its holder, or nobody where it is torn; whoever asks for the lock is always told something."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ray_ulysses.errors import UserError
from ray_ulysses.storage import RunLock
from ray_ulysses.storage.lock import LOCK_FILE, LockOwner, lock_file

NOTE = {"host": "node-1", "pid": 7, "since": 0.0}
WRONG = ({"since": 1e300}, {"pid": -1}, {"pid": "x"}, {"host": None})
DAMAGED = [
    b"",
    b"{",
    b"[]",
    b"\xff",
    *(
        json.dumps({**NOTE, **wrong}).encode()
        for wrong in ({"since": 1e300}, {"pid": -1}, {"pid": "x"}, {"host": None})
    ),
]


def test_a_note_is_read_back_whatever_else_it_says() -> None:
    owner = LockOwner(**NOTE)  # type: ignore[arg-type]
    assert LockOwner.from_note(owner.to_note(run="demo")) == owner
    assert str(owner) == "process 7 on host node-1 since 1970-01-01 00:00:00 UTC"


@pytest.mark.parametrize("note", DAMAGED)
def test_a_held_run_with_a_damaged_note_is_refused_in_words(tmp_path: Path, note: bytes) -> None:
    descriptor = lock_file(tmp_path / LOCK_FILE)
    os.pwrite(descriptor, note, 0)
    with pytest.raises(UserError, match="held by another process that has not left its name yet"):
        RunLock(tmp_path).acquire()
    os.close(descriptor)
