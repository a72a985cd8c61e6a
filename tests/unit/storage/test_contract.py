"""What every store promises, on a directory and on an S3 server alike."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from ray_ulysses.storage import AlreadyExistsError, Store
from tests.unit.storage.conftest import PART_BYTES

_MIB = 2**20
_PATTERN = bytes(range(256)) * 4096  # 1 MiB in which every 256 bytes look different from their neighbours shifted

_CREATOR = """
import json, sys, time
from ray_ulysses.storage import AlreadyExistsError, open_store
location, start, me = sys.argv[1], float(sys.argv[2]), sys.argv[3]
store, won = open_store(location), []
store.list("contested")
time.sleep(max(start - time.time(), 0))
for number in range(20):
    try:
        store.create(f"contested/{number:02d}", [me.encode() * 1000])
        won.append(number)
    except AlreadyExistsError:
        pass
print(json.dumps(won))
"""


def _breaks_after(num_mib: int) -> Iterator[bytes]:
    for _ in range(num_mib):
        yield _PATTERN
    raise RuntimeError("the GPU is gone")


def test_a_file_is_read_back_and_its_size_returned(store: Store) -> None:
    assert store.create("a/b/c.bin", [b"one", memoryview(b"two"), bytearray(b"!")]) == 7
    assert store.create("a/empty", []) == 0
    assert store.create("a/streamed", (part for part in (b"x" * 10, b"", b"y"))) == 11
    assert store.read_whole("a/b/c.bin") == b"onetwo!"
    assert store.read_whole("a/empty") == b""
    assert store.read_whole("a/streamed") == b"x" * 10 + b"y"


def test_a_name_may_hold_what_a_uri_would_not(store: Store) -> None:
    key = "a folder/é+b=c%20&d~#?.json"
    store.create(key, [b"1"])
    assert store.list("a folder") == [key]
    assert store.read_whole(key) == b"1"
    store.delete(key)
    assert store.list("a folder") == []


def test_a_file_of_several_parts_is_whole_although_its_chunks_are_reused(store: Store) -> None:
    scratch = bytearray(_MIB)

    def chunks() -> Iterator[memoryview]:
        for number in range(17):
            scratch[:] = bytes([number]) * _MIB
            yield memoryview(scratch)
        yield memoryview(b"end")

    assert store.create("shard", chunks()) == 17 * _MIB + 3
    assert store.read_whole("shard") == b"".join(bytes([number]) * _MIB for number in range(17)) + b"end"


def test_create_never_writes_over(store: Store) -> None:
    store.create("a", [b"first"])
    with pytest.raises(AlreadyExistsError, match="a already exists"):
        store.create("a", [b"second"])
    with pytest.raises(AlreadyExistsError):
        store.create("a", (_PATTERN for _ in range(12)))
    assert store.read_whole("a") == b"first"


def test_of_several_processes_exactly_one_creates_each_file(store: Store, location: str) -> None:
    command = [sys.executable, "-c", _CREATOR, location, str(time.time() + 1.5)]
    processes = [subprocess.Popen([*command, me], stdout=subprocess.PIPE, text=True) for me in "ab"]
    won = [json.loads(process.communicate(timeout=60)[0]) for process in processes]
    assert sorted(number for numbers in won for number in numbers) == list(range(20))
    for me, numbers in zip("ab", won, strict=True):
        assert all(store.read_whole(f"contested/{number:02d}") == me.encode() * 1000 for number in numbers)


@pytest.mark.parametrize("num_mib", [0, PART_BYTES // _MIB, 18], ids=lambda n: f"after-{n}-MiB")
@pytest.mark.parametrize("method", ["create", "replace"])
def test_broken_writes_leave_nothing(store: Store, method: str, num_mib: int, request: pytest.FixtureRequest) -> None:
    with pytest.raises(RuntimeError, match=r"^the GPU is gone$"):
        getattr(store, method)("folder/key", _breaks_after(num_mib))
    assert store.list("folder") == []
    with pytest.raises(FileNotFoundError):
        store.open("folder/key")
    if "s3" in request.node.callspec.id:
        # Parts that stay are paid for.
        assert request.getfixturevalue("s3").client().list_multipart_uploads(Bucket="bucket").get("Uploads") is None


def test_a_replacement_that_breaks_off_keeps_the_old_file(store: Store) -> None:
    store.replace("key", [b"old"])
    with pytest.raises(RuntimeError):
        store.replace("key", _breaks_after(12))
    assert store.read_whole("key") == b"old"
    store.replace("key", (_PATTERN for _ in range(12)))
    assert store.read_whole("key") == _PATTERN * 12
    store.replace("key", [b"new"])
    assert store.read_whole("key") == b"new"


def test_any_range_is_read_exactly(store: Store) -> None:
    store.create("file", [_PATTERN, b"tail"])
    size = len(_PATTERN) + 4
    with store.open("file") as stream:
        assert stream.seek(0, os.SEEK_END) == size
        assert stream.read(10) == b""
        for start, length in ((0, 8), (8, 300), (308, 70_000), (100_001, 200_003), (size - 3, 100), (5, 0), (size, 1)):
            assert stream.seek(start) == start
            assert stream.read(length) == (_PATTERN + b"tail")[start : start + length]
            assert stream.tell() == min(start + length, size)
        stream.seek(-6, os.SEEK_END)
        target = bytearray(10)
        assert stream.readinto(target) == 6
        assert bytes(target) == _PATTERN[-2:] + b"tail" + bytes(4)
        stream.seek(2)
        stream.seek(3, os.SEEK_CUR)
        assert stream.read() == (_PATTERN + b"tail")[5:]
        assert (stream.readable(), stream.seekable(), stream.writable()) == (True, True, False)
        assert stream.seek(size + 5) == size + 5 and stream.read(1) == b""
        with pytest.raises(ValueError):
            stream.seek(-1)
    with pytest.raises(ValueError):
        stream.read(1)


def test_many_threads_read_ranges_at_once(store: Store) -> None:
    content = _PATTERN * 4
    store.create("file", [content])

    def read(start: int) -> bool:
        with store.open("file") as stream:
            stream.seek(start)
            return stream.read(100_003) == content[start : start + 100_003]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(0, 40 * 100_003, 100_003)))


def test_a_file_that_is_not_there_is_not_found(store: Store) -> None:
    store.create("folder/key", [b""])
    for key in ("absent", "folder/absent", "folder/key2"):
        with pytest.raises(FileNotFoundError):
            store.open(key)


def test_a_list_is_sorted_recursive_and_of_whole_folders(store: Store) -> None:
    for key in ("b/2", "b/1", "b/c/3", "bc/4", "a"):
        store.create(key, [b""])
    assert store.list("b") == ["b/1", "b/2", "b/c/3"]
    assert store.list("a") == []
    assert store.list("absent") == []
    assert store.sizes("b") == {"b/1": 0, "b/2": 0, "b/c/3": 0} and store.sizes("absent") == {}


def test_names_are_those_of_the_files_and_folders_in_a_folder(store: Store) -> None:
    for key in ("b/2", "b/1", "b/c/3", "b/c/d/4", "b/ca/5", "bc/6"):
        store.create(key, [b""])
    assert store.names("b") == ["1", "2", "c", "ca"]
    assert store.names("b/c") == ["3", "d"]
    assert store.names("absent") == []


@pytest.mark.slow
def test_a_list_of_more_than_a_page_and_its_deletion_are_whole(store: Store) -> None:
    keys = [f"many/{number // 100:02d}/{number:04d}" for number in range(1003)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: store.create(key, [b"x"]), keys))
    store.create("many-more", [b""])
    assert store.list("many") == keys
    store.delete("many")
    assert store.list("many") == []
    assert store.read_whole("many-more") == b""


def test_delete_takes_files_folders_and_what_is_gone(store: Store) -> None:
    for key in ("a/b/c", "a/d", "ab", "e"):
        store.create(key, [b""])
    store.delete("a")
    store.delete("e")
    store.delete("absent/too")
    store.delete("a")
    assert store.list("a") == []
    for key in ("a/b/c", "a/d", "e"):
        with pytest.raises(FileNotFoundError):
            store.open(key)
    assert store.read_whole("ab") == b""


def test_several_may_delete_the_same_folder(store: Store) -> None:
    for number in range(40):
        store.create(f"a/{number % 7}/{number}", [b""])
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: store.delete("a"), range(4)))
    assert store.list("a") == []


@pytest.mark.parametrize("method", ["open", "list", "delete", "create", "replace"])
def test_keys_stay_inside_the_store(store: Store, method: str) -> None:
    chunks = [[b""]] if method in ("create", "replace") else []
    for key in ("", "/etc/passwd", "../other", "a/../../b", "a//b", "./a", "a/"):
        with pytest.raises(ValueError, match="relative path"):
            getattr(store, method)(key, *chunks)
