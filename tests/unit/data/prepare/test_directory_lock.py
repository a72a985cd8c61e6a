from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ray_ulysses.data.prepare.preparation import LOCK_FILE, directory_lock
from ray_ulysses.errors import UserError

HOLDER = """
import sys, time
from pathlib import Path
from ray_ulysses.data.prepare.preparation import directory_lock
with directory_lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_held_directory_is_refused_and_free_when_its_holder_dies(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        text = rf"out={tmp_path}: is already being prepared by process {holder.pid} on host .*; wait for it or stop it"
        with pytest.raises(UserError, match=text), directory_lock(tmp_path):
            pass
        holder.kill()
        holder.wait()
        with directory_lock(tmp_path):
            assert (tmp_path / LOCK_FILE).is_file()
    assert list(tmp_path.iterdir()) == []


def test_a_lock_file_that_was_unlinked_meanwhile_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ray_ulysses.storage import lock as module

    taken: list[int] = []
    flock = module.fcntl.flock

    def unlinking(descriptor: int, operation: int) -> None:
        flock(descriptor, operation)
        taken.append(descriptor)
        if len(taken) == 1:
            (tmp_path / LOCK_FILE).unlink()

    monkeypatch.setattr(module.fcntl, "flock", unlinking)
    with directory_lock(tmp_path):
        assert len(taken) == 2 and (tmp_path / LOCK_FILE).is_file()


def test_a_directory_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(UserError, match=r"can't be written \(.*\); choose a writable dir"),
        directory_lock(tmp_path / "file" / "out"),
    ):
        pass
