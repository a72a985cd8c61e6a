from __future__ import annotations

import errno
from pathlib import Path

import pytest

from ray_ulysses.storage import AlreadyExistsError, LocalStore, Store
from tests.stores import CountingStore, FaultyStore, Kind, MemoryStore, permission_lost


def _work(store: Store) -> None:
    store.create("a", [b"1", b"2"])
    store.read_whole("a")
    store.replace("a", [b"3"])
    store.list("a")
    store.delete("a")


_CALLS: list[Kind] = ["create", "chunk", "chunk", "open", "read", "replace", "chunk", "list", "delete"]


@pytest.mark.parametrize("call", range(1, len(_CALLS) + 2))
def test_a_fault_comes_at_its_call_and_leaves_nothing_half_written(tmp_path: Path, call: int) -> None:
    counting = CountingStore(LocalStore(tmp_path))
    store = FaultyStore(counting, fail_at=call)
    if call > len(_CALLS):
        _work(store)
        assert not store.has_failed
        return
    with pytest.raises(OSError) as failed:
        _work(store)
    assert failed.value.errno == errno.ENOSPC
    assert (store.has_failed, store.num_calls) == (True, call)
    begun = [kind for kind, _ in counting.log if kind != "chunk"]
    assert begun == [kind for kind in _CALLS[: call - 1] if kind != "chunk"]
    assert (tmp_path / "a").exists() == (call > 3)


def test_a_fault_may_come_after_the_deed_last_and_know_its_keys() -> None:
    store = FaultyStore(MemoryStore(), fail_at=1, kinds=["create"], when="after", error=permission_lost())
    with pytest.raises(PermissionError):
        store.create("a", [b"1"])
    assert store.read_whole("a") == b"1"
    store.create("b", [b"1"])

    store = FaultyStore(MemoryStore(), fail_at=1, kinds=["create"], lasting=True, only=lambda key: key != "free")
    for _ in range(3):
        with pytest.raises(OSError):
            store.create("a", [b"1"])
        store.replace("free", [b"1"])


def test_the_store_in_memory_keeps_the_contract() -> None:
    store = MemoryStore()
    store.create("a/b", [b"1"])
    with pytest.raises(AlreadyExistsError):
        store.create("a/b", [b"2"])
    store.replace("ab", [b"3"])
    assert store.list("a") == ["a/b"]
    store.delete("a")
    with pytest.raises(FileNotFoundError):
        store.open("a/b")
    assert store.read_whole("ab") == b"3"
