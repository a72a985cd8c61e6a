"""Mounts whose locks end at the host."""

from __future__ import annotations

from pathlib import Path

import pytest

from ray_ulysses.config.loading import parse_config
from ray_ulysses.errors import UserError
from ray_ulysses.run.checkpoint_store import checkpoint_lock, checkpoint_store
from ray_ulysses.storage import RunLock
from ray_ulysses.storage import lock as lock_module
from ray_ulysses.storage.lock import local_lock_option, read_mount_table
from tests.unit.config.trees import small_tree

_ROOT = "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw,errors=remount-ro"


def _nfs(mount: str, options: str, kind: str = "nfs4") -> str:
    return f"40 22 0:45 / {mount} rw,relatime shared:2 - {kind} server:/export rw,vers=4.2,{options},addr=10.0.0.2"


@pytest.mark.parametrize(
    ("line", "path", "option"),
    [
        (_nfs("/mnt", "local_lock=none"), "/mnt/runs", None),
        (_nfs("/mnt", "local_lock=all"), "/mnt/runs", "local_lock=all"),
        (_nfs("/mnt", "local_lock=flock"), "/mnt/runs", "local_lock=flock"),
        (_nfs("/mnt", "local_lock=posix"), "/mnt/runs", None),
        (_nfs("/mnt", "nolock", "nfs"), "/mnt/runs", "nolock"),
        (_nfs("/mnt", "nolock", "nfs"), "/mnt", "nolock"),
        (_nfs("/mnt", "nolock", "nfs"), "/mntx/runs", None),
        (_nfs("/mnt/my\\040disk", "nolock", "nfs"), "/mnt/my disk/runs", "nolock"),
        (_nfs("/mnt", "nolock", "ext4"), "/mnt/runs", None),
    ],
)
def test_an_nfs_mount_may_keep_its_locks_to_the_host(line: str, path: str, option: str | None) -> None:
    assert local_lock_option(Path(path), f"{_ROOT}\n{line}\n") == option


def test_the_innermost_and_latest_mount_counts() -> None:
    table = "\n".join([_ROOT, _nfs("/mnt", "nolock"), _nfs("/mnt/runs", "local_lock=none"), "garbage"])
    assert local_lock_option(Path("/mnt/runs/demo"), table) is None
    assert local_lock_option(Path("/mnt/other"), table) == "nolock"
    assert local_lock_option(Path("/mnt/other"), f"{table}\n{_nfs('/mnt', 'local_lock=none')}") is None


def test_this_machine_s_table_is_read() -> None:
    assert " / " in read_mount_table()


def test_a_run_on_such_a_mount_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(f"{_ROOT}\n{_nfs(str(tmp_path.resolve()), 'local_lock=all')}\n")
    monkeypatch.setattr(lock_module, "MOUNT_TABLE", table)
    with pytest.raises(
        UserError, match=r"is mounted with local_lock=all, so two hosts could write the same run; mount"
    ):
        RunLock(tmp_path / "demo").acquire()


def test_a_mount_of_the_checkpoints_is_refused_by_the_name_of_their_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(f"{_ROOT}\n{_nfs(str(tmp_path.resolve()), 'nolock', 'nfs')}\n")
    monkeypatch.setattr(lock_module, "MOUNT_TABLE", table)
    config = parse_config(
        small_tree(run__storage=str(tmp_path / "runs"), checkpoint__storage=str(tmp_path / "checkpoints"))
    )
    with (
        pytest.raises(
            UserError, match=r"^checkpoint\.storage: .*/checkpoints is mounted .* another checkpoint\.storage$"
        ),
        checkpoint_lock(config, checkpoint_store(config)),
    ):
        pass
