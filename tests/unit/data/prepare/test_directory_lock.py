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
        with (
            pytest.raises(UserError, match=rf"out={tmp_path}: is already being prepared by process {holder.pid}"),
            directory_lock(tmp_path),
        ):
            pass
        holder.kill()
        holder.wait()
        with directory_lock(tmp_path):
            assert (tmp_path / LOCK_FILE).is_file()
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="can't be written"), directory_lock(tmp_path / "file" / "out"):
        pass
