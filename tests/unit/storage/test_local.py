"""The local store: whole files or none, one creator, keys that stay inside."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ray_ulysses.errors import UserError
from ray_ulysses.storage import LocalStore
from ray_ulysses.storage.atomic import write_all
from tests.stores import permission_lost


def test_files_being_written_are_not_listed_and_an_unreadable_folder_is_not_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(tmp_path)
    store.create("b/1", [b""])
    (tmp_path / "b" / ".writing-1234").write_bytes(b"half")
    assert store.list("b") == ["b/1"]
    monkeypatch.setattr(os, "scandir", _raise_permission_lost)
    with pytest.raises(PermissionError):
        store.list("b")


def _raise_permission_lost(*_: object) -> None:
    raise permission_lost()


def test_a_file_system_without_links_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    with pytest.raises(UserError, match="does not support hard links"):
        LocalStore(tmp_path).create("a", [b""])
    assert os.listdir(tmp_path) == []


def test_a_short_write_is_gone_on_with() -> None:
    content = b""

    class TakesSeven(io.RawIOBase):
        """A file of which the kernel takes at most seven bytes at a time."""

        def write(self, chunk: Any) -> int:
            nonlocal content
            content += bytes(chunk[:7])
            return min(len(chunk), 7)

    assert write_all(TakesSeven(), memoryview(bytes(range(100)))) == 100
    assert content == bytes(range(100))


_LIMITED = """
import os, resource, signal, sys
from ray_ulysses.storage import LocalStore
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
store = LocalStore(sys.argv[1])
for chunks in ([b"n" * 150_000], [b"n" * 99_999, b"mm"]):
    try:
        store.create("new", chunks)
    except OSError as error:
        print(error.strerror, os.listdir(sys.argv[1]))
print(store.create("new", [b"n" * 100_000]))
"""


def test_a_quota_that_cuts_a_write_short_leaves_nothing(tmp_path: Path) -> None:
    """The kernel takes the first part of the write and refuses the rest."""
    done = subprocess.run(
        [sys.executable, "-c", _LIMITED, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["File too large []"] * 2 + ["100000"]


def test_a_file_whose_name_may_not_last_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str, folder: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("ray_ulysses.storage.local.sync", broken)
    with pytest.raises(OSError, match="Input/output error"):
        LocalStore(tmp_path).create("key", [b"x"])
    assert os.listdir(tmp_path) == []
