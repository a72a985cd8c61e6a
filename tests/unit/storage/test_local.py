"""The local store: whole files or none, one creator, keys that stay inside."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from ray_ulysses.errors import UserError
from ray_ulysses.storage import LocalStore
from ray_ulysses.storage.atomic import TEMPORARY_PREFIX, sweep_temporaries, write_all
from ray_ulysses.storage.lock import LockOwner, lock_file, read_owner, write_note
from ray_ulysses.storage.regular import NotAPlainFileError, make_folder, open_regular, refuse_links
from tests.stores import permission_lost
from tests.unit.storage.conftest import read_little


def test_temporaries_and_unreadable_folders_are_not_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path)
    store.create("b/1", [b""])
    (tmp_path / "b" / ".writing-1234").write_bytes(b"half")
    assert store.list("b") == ["b/1"]
    monkeypatch.setattr(os, "scandir", Mock(side_effect=permission_lost()))
    with pytest.raises(PermissionError):
        store.list("b")


def test_names_are_found_without_looking_further_than_the_first_file(store: LocalStore, disk: Path) -> None:
    (store.root / "a" / "one" / "deep" / "link").symlink_to(disk)
    (store.root / "a" / "empty" / "deep").mkdir(parents=True)
    for folder in ("a", "a/empty"):
        (store.root / folder / ".writing-1234").write_bytes(b"half")
    assert store.names("a") == ["one", "two"]
    assert store.names("a/one/x") == store.names("absent/deep") == []
    with pytest.raises(NotAPlainFileError):
        store.list("a")


@pytest.mark.parametrize("call", ["os.link", "ray_ulysses.storage.local.sync"])
def test_a_file_that_can_not_be_published_is_taken_back(tmp_path: Path, monkeypatch: Any, call: str) -> None:
    number = errno.EPERM if call == "os.link" else errno.EIO
    monkeypatch.setattr(call, Mock(side_effect=OSError(number, os.strerror(number))))
    kind, text = (UserError, "does not support hard links") if number == errno.EPERM else (OSError, "Input/output")
    with pytest.raises(kind, match=text):
        LocalStore(tmp_path).create("key", [b"x"])
    assert os.listdir(tmp_path) == []


def test_a_short_write_is_continued() -> None:
    written = bytearray()

    class TakesSeven(io.RawIOBase):
        def write(self, chunk: Any) -> int:
            written.extend(chunk[:7])
            return min(len(chunk), 7)

    content = bytes(range(100))
    assert write_all(TakesSeven(), memoryview(content)) == 100 and written == content


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
    """The kernel accepts the first part of the write and refuses the rest."""
    command = [sys.executable, "-c", _LIMITED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["File too large []"] * 2 + ["100000"]


CONTENT = bytes(range(256)) * 5


@pytest.mark.parametrize("most", [1, 100, 1279])
def test_a_read_is_complete_despite_short_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    store = LocalStore(tmp_path)
    store.create("a", [CONTENT])
    read_little(monkeypatch, most)
    with store.open("a") as file:
        for start, size in ((0, 1280), (0, 0), (3, 100), (3, 101), (0, 1), (1279, 1)):
            assert file.read_at(start, size) == CONTENT[start : start + size]
            file.seek(start)
            assert file.read(size) == CONTENT[start : start + size]
            assert file.tell() == start + size
        file.seek(1000)
        assert file.read(281) == file.read_at(1000, 281) == CONTENT[1000:]
        assert file.read(1) == file.read_at(1280, 1) == file.read_at(5000, 1) == b""
    assert store.read_whole("a") == CONTENT


_WRITER = """
import sys
from ray_ulysses.storage import LocalStore
def chunks():
    yield b"half"
    print("writing", flush=True)
    sys.stdin.readline()
    yield b"whole"
LocalStore(sys.argv[1]).create("a/b/key", chunks())
print("written", flush=True)
"""


def _start_writer(root: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _WRITER, str(root)]
    writer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert writer.stdout.readline() == "writing\n"
    return writer


def _make_old(root: Path) -> list[Path]:
    """Let every temporary file look untouched for a week."""
    found = sorted(root.rglob(f"{TEMPORARY_PREFIX}*"))
    for path in found:
        os.utime(path, (time.time() - 7 * 86400,) * 2)
    return found


def test_a_live_writer_s_file_stays_however_old(tmp_path: Path) -> None:
    writer = _start_writer(tmp_path)
    try:
        assert len(_make_old(tmp_path)) == 1
        writer.send_signal(signal.SIGSTOP)
        assert sweep_temporaries(tmp_path) == ()
        writer.send_signal(signal.SIGCONT)
        assert writer.communicate("\n", timeout=20)[0] == "written\n"
    finally:
        writer.kill()
        writer.wait(timeout=10)
    assert LocalStore(tmp_path).list("a") == ["a/b/key"]
    assert list(tmp_path.rglob(f"{TEMPORARY_PREFIX}*")) == []


def test_a_killed_writer_s_file_goes_once_it_has_settled_and_finished_files_stay(tmp_path: Path) -> None:
    writer = _start_writer(tmp_path)
    writer.kill()
    writer.communicate(timeout=10)
    store = LocalStore(tmp_path)
    store.create("a/key", [b"1"])
    store.replace("a/other", [b"2"])
    assert sweep_temporaries(tmp_path) == () == sweep_temporaries(tmp_path / "absent")
    (left,) = _make_old(tmp_path)
    (tmp_path / f"{TEMPORARY_PREFIX}link").symlink_to(tmp_path / "a" / "key")
    assert sweep_temporaries(tmp_path, settle_s=-1.0) == (left,)
    assert store.list("a") == ["a/key", "a/other"] and list((tmp_path / "a" / "b").iterdir()) == []


NOTE = {"host": "node-1", "pid": 7, "since": 0.0}


def test_a_note_is_read_back_and_a_damaged_one_names_nobody(tmp_path: Path) -> None:
    owner = LockOwner(**NOTE)
    wrong = [json.dumps({**NOTE, **field}).encode() for field in ({"since": 1e300}, {"pid": -1})]
    for number, note in enumerate([owner.to_note(run="demo"), b"", b"{", b"\xff", *wrong]):
        write_note(lock_file(tmp_path / str(number)), note)
        assert read_owner(tmp_path / str(number)) == (owner if number == 0 else None)


def test_a_lock_file_deleted_in_between_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, real_open = tmp_path / "lock", os.open
    path.write_text("")

    def delete_after_opening(name: object, *args: object, **folder: int) -> int:
        descriptor = real_open(name, *args, **folder)
        if name == path.name:
            monkeypatch.setattr(os, "open", real_open)
            path.unlink()
        return int(descriptor)

    monkeypatch.setattr(os, "open", delete_after_opening)
    assert os.path.samestat(os.fstat(lock_file(path)), path.stat())
    with pytest.raises(BlockingIOError):
        lock_file(path)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path / "run")
    for key in ("a/one/x", "a/one/deep/y", "a/two/z"):
        store.create(key, [key.encode()])
    return store


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """A folder outside the store, with files of the same names."""
    for name in ("x", "deep/y", ".writing-1"):
        (tmp_path / "disk" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "disk" / name).write_text("canary")
        os.utime(tmp_path / "disk" / name, (0, 0))
    return tmp_path / "disk"


def _content(folder: Path) -> dict[str, tuple[str, float]]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): (path.read_text(), path.stat().st_mtime) for path in files}


CALLS: dict[str, Callable[[LocalStore], object]] = {
    "open": lambda store: store.open("a/one/x"),
    "read": lambda store: store.read_whole("a/one/deep/y"),
    "create": lambda store: store.create("a/one/new", [b"new"]),
    "replace": lambda store: store.replace("a/one/x", [b"new"]),
    "list": lambda store: store.list("a"),
    "list below the link": lambda store: store.list("a/one/deep"),
    "names": lambda store: store.names("a"),
    "names below the link": lambda store: store.names("a/one/deep"),
    "delete": lambda store: store.delete("a/one/x"),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_linked_folder_is_refused_by_its_name_and_stays_as_it_is(store: LocalStore, disk: Path, call: str) -> None:
    link, before = store.root / "a" / "one", _content(disk)
    shutil.rmtree(link)
    link.symlink_to(disk)
    with pytest.raises(NotAPlainFileError) as refused:
        CALLS[call](store)
    assert isinstance(refused.value, UserError) and refused.value.filename == str(link)
    # Callers put the reason alone into errors of their own.
    assert f"{link} is a link" in refused.value.strerror and "checkpoint.storage" in refused.value.strerror
    assert _content(disk) == before


@pytest.mark.parametrize("target", ["disk/x", "disk/nowhere", "pipe"])
def test_a_linked_file_is_neither_read_nor_written(store: LocalStore, disk: Path, target: str) -> None:
    os.mkfifo(disk.parent / "pipe")
    link, before = store.root / "a" / "one" / "x", _content(disk)
    link.unlink()
    link.symlink_to(disk.parent / target)
    with pytest.raises(NotAPlainFileError):
        store.open("a/one/x")
    with pytest.raises(NotAPlainFileError):
        store.list("a")
    assert store.replace("a/one/x", [b"own"]) == 3
    assert not link.is_symlink() and store.read_whole("a/one/x") == b"own"
    assert _content(disk) == before


def test_deleting_takes_the_link_alone(store: LocalStore, disk: Path) -> None:
    before = _content(disk)
    (store.root / "a" / "two" / "inside").symlink_to(disk)
    (store.root / "a" / "link").symlink_to(disk)
    for key in ("a/link", "a/two"):
        store.delete(key)
    assert store.list("a") == ["a/one/deep/y", "a/one/x"]
    assert _content(disk) == before


def test_the_root_and_its_parents_may_be_links(store: LocalStore, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(store.root)
    (tmp_path / "parent").symlink_to(tmp_path)
    for root in (tmp_path / "link", tmp_path / "parent" / "run"):
        linked = LocalStore(root)
        assert linked.list("a") == store.list("a")
        linked.replace("a/one/x", [root.name.encode()])
        assert store.read_whole("a/one/x") == root.name.encode()
        linked.delete("b")
        with open_regular(root / "a" / "one" / "x") as stream:
            assert stream.read() == root.name.encode()


@pytest.mark.parametrize("link", ["run", "."])
def test_a_root_whose_disk_is_not_mounted_is_no_absence(store: LocalStore, tmp_path: Path, link: str) -> None:
    """Otherwise the run would start from step 0."""
    place = tmp_path / "runs"
    place.symlink_to(tmp_path if link == "run" else tmp_path / "nowhere")
    if link == "run":
        store.root.rename(tmp_path / "moved")
        store.root.symlink_to(tmp_path / "nowhere")
    for prefix in ("a", "a/one/deep"):
        with pytest.raises(OSError, match="mount the target") as refused:
            LocalStore(place / "run").list(prefix)
        assert not isinstance(refused.value, FileNotFoundError)


def test_no_folder_is_made_or_swept_through_a_link(store: LocalStore, disk: Path) -> None:
    for link in (store.root / "link", store.root / "a" / "link"):
        link.symlink_to(disk)
    for folder in (store.root / "link", store.root / "link" / "new"):
        for refuse in (make_folder, refuse_links):
            with pytest.raises(NotAPlainFileError):
                refuse(folder, store.root)
    for folder in ("a", "link"):
        assert sweep_temporaries(store.root / folder, store.root) == ()
    assert (disk / ".writing-1").exists() and not (disk / "new").exists()
    for folder in (store.root / "absent" / "folder", disk):
        refuse_links(folder, store.root)
