"""The local store: whole files or none, one creator, keys that stay inside."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ray_ulysses.errors import UserError
from ray_ulysses.storage import AlreadyExistsError, LocalStore
from ray_ulysses.storage.store import read_bytes


def _chunks_that_fail() -> Iterator[bytes]:
    yield b"half"
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_created_file_is_read_back_and_its_size_returned(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "run")
    assert store.create("a/b/c.bin", [b"one", memoryview(b"two")]) == 6
    assert read_bytes(store, "a/b/c.bin") == b"onetwo"


def test_create_never_writes_over(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.create("a", [b"first"])
    with pytest.raises(AlreadyExistsError, match=r"a exists already; nothing was written over it"):
        store.create("a", [b"second"])
    assert read_bytes(store, "a") == b"first"
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
    assert read_bytes(store, "folder/key") == str(won.index(True)).encode() * 1000


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
    assert read_bytes(store, "key") == b"old"
    store.replace("key", [b"new"])
    assert read_bytes(store, "key") == b"new"


def test_list_gives_sorted_keys_without_files_being_written(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    for key in ("b/2", "b/1", "a"):
        store.create(key, [b""])
    (tmp_path / "b" / ".writing-1234").write_bytes(b"half")
    assert store.list("b") == ["b/1", "b/2"]
    assert store.list("a") == ["a"]
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
    def no_links(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    with pytest.raises(UserError, match=r"run\.storage: .* has no hard links .*; use a local disk or NFS"):
        LocalStore(tmp_path).create("a", [b""])
    assert os.listdir(tmp_path) == []
