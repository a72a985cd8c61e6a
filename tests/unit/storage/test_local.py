"""The local store: whole files or none, one creator, keys that stay inside."""

from __future__ import annotations

import errno
import io
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ray_ulysses.errors import UserError
from ray_ulysses.storage import AlreadyExistsError, LocalStore
from ray_ulysses.storage.atomic import write_all
from tests.stores import SlowStore


def _chunks_that_fail() -> Iterator[bytes]:
    yield b"half"
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_created_file_is_read_back_and_its_size_returned(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "run")
    assert store.create("a/b/c.bin", [b"one", memoryview(b"two")]) == 6
    assert store.read_whole("a/b/c.bin") == b"onetwo"


def test_create_never_writes_over(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.create("a", [b"first"])
    with pytest.raises(AlreadyExistsError, match=r"a exists already; nothing was written over it"):
        store.create("a", [b"second"])
    assert store.read_whole("a") == b"first"
    assert os.listdir(tmp_path) == ["a"]


def test_of_many_creators_exactly_one_succeeds(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)

    def attempt(number: int) -> bool:
        try:
            store.create("folder/key", [str(number).encode() * 1000])
        except AlreadyExistsError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(attempt, range(16)))
    assert sum(won) == 1
    assert store.read_whole("folder/key") == str(won.index(True)).encode() * 1000


@pytest.mark.parametrize("method", ["create", "replace"])
def test_a_write_that_fails_leaves_nothing(tmp_path: Path, method: str) -> None:
    store = LocalStore(tmp_path)
    with pytest.raises(OSError, match="No space left"):
        getattr(store, method)("key", _chunks_that_fail())
    assert os.listdir(tmp_path) == []


def test_a_replacement_that_fails_keeps_the_old_file(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.replace("key", [b"old"])
    with pytest.raises(OSError, match="No space left"):
        store.replace("key", _chunks_that_fail())
    assert store.read_whole("key") == b"old"
    store.replace("key", [b"new"])
    assert store.read_whole("key") == b"new"


def test_list_gives_sorted_keys_without_files_being_written(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    for key in ("b/2", "b/1", "a"):
        store.create(key, [b""])
    (tmp_path / "b" / ".writing-1234").write_bytes(b"half")
    assert store.list("b") == ["b/1", "b/2"]
    assert store.list("a") == []
    assert store.list("absent") == []


def test_delete_takes_files_folders_and_what_is_gone(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.create("a/b/c", [b""])
    store.create("d", [b""])
    store.delete("a")
    store.delete("d")
    store.delete("absent/too")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("key", ["", "/etc/passwd", "../other", "a/../../b", "a//b", "./a", "a/"])
def test_keys_stay_inside_the_store(tmp_path: Path, key: str) -> None:
    with pytest.raises(ValueError, match="not a plain relative path"):
        LocalStore(tmp_path).create(key, [b""])


def test_a_file_system_without_links_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    with pytest.raises(UserError, match=r"^the file system of .* has no hard links .*; use a local disk or NFS"):
        LocalStore(tmp_path).create("a", [b""])
    assert os.listdir(tmp_path) == []


def test_slow_storage_shows_nothing_until_all_is_there(tmp_path: Path) -> None:
    gate = threading.Event()
    slow = SlowStore(LocalStore(tmp_path), gate=gate, only=lambda key: key == "new")
    slow.create("old", [b"1"])
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(slow.create, "new", [b"a" * 100_000, b"b"])
        assert slow.is_waiting.wait(10)
        assert slow.read_whole("old") == b"1"
        with pytest.raises(FileNotFoundError):
            slow.inner.open("new")
        gate.set()
        assert job.result(10) == 100_001
    assert sorted(os.listdir(tmp_path)) == ["new", "old"]


class _TakesSeven(io.RawIOBase):
    """A file of which the kernel takes at most seven bytes at a time."""

    def __init__(self) -> None:
        self.content = b""

    def write(self, chunk: Any) -> int:
        self.content += bytes(chunk[:7])
        return min(len(chunk), 7)


def test_a_short_write_is_gone_on_with() -> None:
    stream = _TakesSeven()
    content = bytes(range(100))
    assert write_all(stream, memoryview(content)) == 100
    assert stream.content == content


_FULL_DISK = """
import os, subprocess, sys
from pathlib import Path
from ray_ulysses.storage import LocalStore
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", sys.argv[1]], check=True)
store = LocalStore(sys.argv[1])
store.create("old", [b"o" * 600_000])
for write in (store.create, store.replace):
    for chunks in ([b"n" * 600_000], (b"n" * 100_000 for _ in range(6)), [b"n" * 400_000, b"m" * 200_000]):
        try:
            write("new", chunks)
        except OSError as error:
            print(error.strerror, os.listdir(sys.argv[1]))
store.delete("old")
print(store.create("new", [b"n" * 600_000]))
"""


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    """The kernel's own full disk: a small file system in a mount namespace that ends with its process."""
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a file system")
    command = [unshare, "-m", sys.executable, "-c", _FULL_DISK, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["No space left on device ['old']"] * 6 + ["600000"]


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


_UNPRIVILEGED = """
import os, sys
from ray_ulysses.storage import LocalStore
root = sys.argv[1]
if os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
store = LocalStore(root)
store.create("folder/old", [b"old"])
def chunks():
    yield b"first"
    os.chmod(root + "/folder", 0o500)
    yield b"second"
for write in (store.create, store.replace):
    os.chmod(root + "/folder", 0o700)
    try:
        write("folder/new", chunks())
    except PermissionError as error:
        print(error.strerror, store.list("folder"))
os.chmod(root + "/folder", 0o000)
try:
    print(store.list("folder"))
except PermissionError as error:
    print("list:", error.strerror)
os.chmod(root + "/folder", 0o700)
"""


def test_a_right_that_is_lost_on_the_way_shows_nothing_and_an_unreadable_folder_is_not_empty() -> None:
    # Not below `tmp_path`: pytest keeps others out of the folder above it, again whenever it is started.
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o777)
        done = subprocess.run(
            [sys.executable, "-c", _UNPRIVILEGED, name],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env={**os.environ, "HOME": name},
        )
        # What could not be deleted is the sweep's to take: the writers are dead.
        left = list(Path(name, "folder").glob(".writing-*"))
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "Permission denied ['folder/old']",
        "Permission denied ['folder/old']",
        "list: Permission denied",
    ]
    assert len(left) == 2


def test_a_file_whose_name_may_not_last_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str, folder: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("ray_ulysses.storage.local.sync", broken)
    with pytest.raises(OSError, match="Input/output error"):
        LocalStore(tmp_path).create("key", [b"x"])
    assert os.listdir(tmp_path) == []


def test_the_error_of_the_write_is_not_hidden_by_that_of_the_clean_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(self: Path, missing_ok: bool = False) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "unlink", denied)
    with pytest.raises(OSError, match="No space left"):
        LocalStore(tmp_path).create("key", _chunks_that_fail())
