"""Folders to swap to: one for each process, and none left behind by a dead one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ray_ulysses.engine.zero import LOCK_FILE, SwapFolder
from ray_ulysses.errors import UserError


def test_folders_of_dead_processes_are_deleted_and_those_in_use_are_kept(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from ray_ulysses.engine.zero import SwapFolder; "
        "folder = SwapFolder(Path(sys.argv[1])); (folder.path / 'state.swp').write_bytes(b'x'); "
        "print(folder.path, flush=True); os._exit(9)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 9, done.stderr
    dead = Path(done.stdout.strip())
    assert (dead / "state.swp").exists()
    living = SwapFolder(tmp_path)
    assert not dead.exists()
    SwapFolder(tmp_path)
    assert living.path.is_dir()


def test_links_in_a_shared_folder_are_not_followed(tmp_path: Path) -> None:
    canary, root = tmp_path / "canary", tmp_path / "swap"
    (canary / "folder").mkdir(parents=True)
    (canary / "file").write_text("stays")
    root.mkdir()
    (root / "process-of-another").symlink_to(canary / "folder")
    SwapFolder(root).close()
    (root / LOCK_FILE).unlink()
    (root / LOCK_FILE).symlink_to(canary / "file")
    with pytest.raises(UserError, match="is a link"):
        SwapFolder(root)
    assert (canary / "file").read_text() == "stays"
    assert list((canary / "folder").iterdir()) == []
