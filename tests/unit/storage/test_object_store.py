"""The object store when the other side fails: lost answers, overload, refusals, no space, nobody there."""

from __future__ import annotations

import errno
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from ray_ulysses.storage import AlreadyExistsError, open_store, parse_location
from ray_ulysses.storage import object_store as object_store_module
from ray_ulysses.storage.location import ObjectLocation
from ray_ulysses.storage.object_store import ObjectStore
from tests.s3_server import FaultyProxy, S3Server
from tests.unit.storage.conftest import PART_BYTES, object_store

_EVERY_TIME = 10**6
_NUM_PARTS = 3


def _is_put(method: str, path: str) -> bool:
    return method == "PUT" and "uploadId" not in path


def _is_get(method: str, path: str) -> bool:
    return method == "GET" and "list-type" not in path


def _is_completion(method: str, path: str) -> bool:
    return method == "POST" and "uploadId" in path


def _is_second_part(method: str, path: str) -> bool:
    return "partNumber=2" in path


def _objects(s3: S3Server, prefix: str) -> list[str]:
    """Return the keys of all objects below a prefix."""
    found = s3.client().list_objects_v2(Bucket="bucket", Prefix=prefix).get("Contents", [])
    return [entry["Key"] for entry in found]


def _shard() -> Iterator[bytes]:
    for number in range(_NUM_PARTS):
        yield bytes([number]) * PART_BYTES


@pytest.mark.parametrize("fault", ["503", "drop", "409"])
def test_a_create_that_fails_once_succeeds_at_the_next_try(
    broken_s3: ObjectStore, proxy: FaultyProxy, fault: str
) -> None:
    proxy.fail(fault, _is_put)  # type: ignore[arg-type]
    broken_s3.create("manifest.json", [b"{}"])
    assert broken_s3.read_whole("manifest.json") == b"{}"
    assert proxy.count("PUT") == 2


def test_a_create_whose_answer_was_lost_knows_its_own_file(broken_s3: ObjectStore, proxy: FaultyProxy) -> None:
    proxy.fail("lose-answer", _is_put)
    assert broken_s3.create("manifest.json", [b"{}"]) == 2
    assert [exchange.status for exchange in proxy.exchanges] == [0, 412, 200]
    with pytest.raises(AlreadyExistsError):
        # The same bytes, but not the same writer.
        broken_s3.create("manifest.json", [b"{}"])


def test_a_create_whose_answers_are_all_lost_says_what_is_true(broken_s3: ObjectStore, proxy: FaultyProxy) -> None:
    proxy.fail("lose-answer", _is_put, _EVERY_TIME)
    assert broken_s3.create("manifest.json", [b"{}"]) == 2


def test_a_create_that_lost_against_another_while_it_was_tried_again_says_so(
    broken_s3: ObjectStore, proxy: FaultyProxy, s3: S3Server, prefix: str
) -> None:
    proxy.fail("drop", _is_put)
    object_store(s3.uri(prefix)).create("manifest.json", [b"theirs"])
    with pytest.raises(AlreadyExistsError, match=f"s3://bucket/{prefix}/manifest.json"):
        broken_s3.create("manifest.json", [b"ours"])
    assert broken_s3.read_whole("manifest.json") == b"theirs"


@pytest.mark.parametrize(("fault", "where"), [("503", _is_second_part), ("lose-answer", _is_completion)])
def test_a_long_file_that_meets_a_failure_is_whole(
    broken_s3: ObjectStore, proxy: FaultyProxy, fault: str, where: object
) -> None:
    proxy.fail(fault, where)  # type: ignore[arg-type]
    assert broken_s3.create("shard", _shard()) == _NUM_PARTS * PART_BYTES
    assert broken_s3.read_whole("shard") == b"".join(_shard())


@pytest.mark.parametrize(("fault", "where"), [("403", _is_second_part), ("507", _is_completion)])
def test_a_long_file_that_is_refused_leaves_nothing(
    broken_s3: ObjectStore, proxy: FaultyProxy, s3: S3Server, prefix: str, fault: str, where: object
) -> None:
    proxy.fail(fault, where, _EVERY_TIME)  # type: ignore[arg-type]
    with pytest.raises(OSError) as refused:
        broken_s3.create("shard", _shard())
    assert refused.value.errno == {"403": errno.EACCES, "507": errno.ENOSPC}[fault]
    assert not _objects(s3, prefix)
    uploads = s3.client().list_multipart_uploads(Bucket="bucket", Prefix=prefix).get("Uploads")
    assert uploads is None


@pytest.mark.parametrize(
    ("fault", "kind"), [("403", PermissionError), ("507", OSError), ("503", OSError), ("drop", OSError)]
)
def test_a_create_that_keeps_failing_ends_in_time_without_naming_hosts(
    broken_s3: ObjectStore, proxy: FaultyProxy, s3: S3Server, prefix: str, fault: str, kind: type[OSError]
) -> None:
    proxy.fail(fault, _is_put, _EVERY_TIME)  # type: ignore[arg-type]
    begun = time.monotonic()
    with pytest.raises(kind) as refused:
        broken_s3.create("manifest.json", [b"{}"])
    # 1 s of retry, at most one pause beyond it, and one more look.
    assert time.monotonic() - begun < 8
    assert "127.0.0.1" not in str(refused.value)
    proxy.heal()
    assert not _objects(s3, prefix)


def test_a_read_that_breaks_off_is_taken_up_where_it_broke(broken_s3: ObjectStore, proxy: FaultyProxy) -> None:
    broken_s3.create("shard", _shard())
    proxy.fail("cut-body", _is_get, 2)
    with broken_s3.open("shard") as stream:
        stream.seek(1000)
        content = stream.read(2 * PART_BYTES)
    assert content == b"".join(_shard())[1000 : 1000 + 2 * PART_BYTES]
    ranges = [exchange.range for exchange in proxy.exchanges if _is_get(exchange.method, exchange.path)]
    assert ranges == [
        f"bytes={1000 + start}-{999 + 2 * PART_BYTES}" for start in (0, PART_BYTES, PART_BYTES + PART_BYTES // 2)
    ]


@pytest.mark.parametrize("size", [0, 1_000_000])
def test_a_small_file_is_read_by_a_single_request(broken_s3: ObjectStore, proxy: FaultyProxy, size: int) -> None:
    broken_s3.create("manifest.json", [b"x" * size])
    proxy.exchanges.clear()
    assert broken_s3.read_whole("manifest.json") == b"x" * size
    assert [(exchange.method, exchange.range) for exchange in proxy.exchanges] == [("GET", None)]


@pytest.mark.parametrize("fault", ["503", "cut-body"])
def test_a_small_file_whose_read_fails_is_read_again(broken_s3: ObjectStore, proxy: FaultyProxy, fault: str) -> None:
    content = b"".join(b"%07d" % number for number in range(100_000))
    broken_s3.create("manifest.json", [content])
    proxy.fail(fault, _is_get, 2)  # type: ignore[arg-type]
    assert broken_s3.read_whole("manifest.json") == content
    assert proxy.count("GET") == 3


def test_a_large_file_is_read_whole_as_a_stream_that_resumes_where_it_broke(
    broken_s3: ObjectStore, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store_module, "_LARGEST_SINGLE_READ_BYTES", 1000)
    broken_s3.create("shard", _shard())
    proxy.fail("cut-body", lambda method, path: _is_get(method, path) and proxy.count("HEAD") > 1)
    assert broken_s3.read_whole("shard") == b"".join(_shard())
    ranges = [exchange.range for exchange in proxy.exchanges if _is_get(exchange.method, exchange.path)]
    last = _NUM_PARTS * PART_BYTES - 1
    assert ranges == [None, f"bytes=0-{last}", f"bytes={_NUM_PARTS * PART_BYTES // 2}-{last}"]


def test_a_read_that_keeps_failing_is_an_error_in_time(broken_s3: ObjectStore, proxy: FaultyProxy) -> None:
    broken_s3.create("shard", [b"x" * 100_000])
    with broken_s3.open("shard") as stream:
        proxy.fail("drop", _is_get, _EVERY_TIME)
        begun = time.monotonic()
        with pytest.raises(OSError):
            stream.read()
        assert time.monotonic() - begun < 8


def test_a_store_that_is_away_is_an_error_in_time(s3: S3Server) -> None:
    away = object_store(s3.uri("run", port=1), retry_s=0.2)
    calls = [
        lambda: away.create("a", [b""]),
        lambda: away.create("a", _shard()),
        lambda: away.open("a"),
        lambda: away.read_whole("a"),
        lambda: away.list("a"),
    ]
    for call in calls:
        begun = time.monotonic()
        with pytest.raises(OSError, match="unreachable") as refused:
            call()
        assert not isinstance(refused.value, FileNotFoundError)
        assert time.monotonic() - begun < 8


@pytest.mark.parametrize("says_not_found", [False, True], ids=["s3", "google"])
def test_a_folder_in_which_other_tools_have_marked_folders_is_deleted_and_the_markers_stay(
    s3: S3Server, prefix: str, says_not_found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    markers = ["checkpoints/step-00000100", "checkpoints/step-00000100/attempt-0001", "checkpoints/step-00000100/made"]
    for marker in markers:
        s3.client().put_object(Bucket="bucket", Key=f"{prefix}/{marker}/", Body=b"")
    store = object_store(s3.uri(prefix))
    for name in ("attempt-0001/shard", "manifest.json", "more"):
        store.create(f"{markers[0]}/{name}", [b"x"])
    calls, delete = [0], object_store_module.obstore.delete

    def limited(client: object, keys: list[str]) -> None:
        calls[0] += 1
        assert calls[0] < 50, "it never ends"
        if says_not_found and set(keys) & set(markers):
            raise FileNotFoundError(keys[0])
        delete(client, keys)  # type: ignore[arg-type]

    monkeypatch.setattr(object_store_module.obstore, "delete", limited)
    store.delete(markers[0])
    assert store.list("checkpoints") == markers
    store.delete(markers[0])


def test_a_bucket_that_is_not_there_is_no_empty_store(s3: S3Server) -> None:
    store = open_store(s3.uri("run").replace("bucket/", "no-such-bucket/"), retry_s=0.5)
    for call in (lambda: store.create("a", [b""]), lambda: store.list("a"), lambda: store.delete("a")):
        with pytest.raises(FileNotFoundError, match="bucket does not exist"):
            call()


def test_a_short_file_costs_one_request_and_a_long_one_its_parts(broken_s3: ObjectStore, proxy: FaultyProxy) -> None:
    broken_s3.create("short", (b"x" * 100 for _ in range(5)))
    assert [exchange.method for exchange in proxy.exchanges] == ["PUT"]
    proxy.exchanges.clear()
    broken_s3.create("long", _shard())
    assert proxy.count("PUT", "partNumber") == _NUM_PARTS
    proxy.exchanges.clear()
    # All in memory already, as a manifest is: one conditional put, however long.
    broken_s3.create("manifest", [b"".join(_shard())])
    assert [exchange.method for exchange in proxy.exchanges] == ["PUT"]


_STREAMER = """
import resource, sys
from ray_ulysses.storage import parse_location
from ray_ulysses.storage.object_store import ObjectStore
location = parse_location(sys.argv[1])
store = ObjectStore(location, part_bytes=5 * 2**20)
store.create("warm", (bytes(2**20) for _ in range(11)))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
store.create("shard", (bytes(2**20) for _ in range(int(sys.argv[2]))))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


@pytest.mark.slow
def test_a_long_file_is_written_in_the_memory_of_a_few_parts(s3: S3Server, prefix: str) -> None:
    command = [sys.executable, "-c", _STREAMER, s3.uri(prefix), "90"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    # Four parts under way, one being filled, two looked at before the upload began, and the allocator's slack.
    assert float(done.stdout) < 50
    s3.client().delete_object(Bucket="bucket", Key=f"{prefix}/shard")


def test_a_file_that_others_wrote_without_a_mark_is_taken_all_the_same(s3: S3Server, prefix: str) -> None:
    s3.client().put_object(Bucket="bucket", Key=f"{prefix}/a", Body=b"theirs")
    store = object_store(s3.uri(prefix))
    for chunks in ([b"ours"], _shard()):
        with pytest.raises(AlreadyExistsError):
            store.create("a", chunks)
    assert store.read_whole("a") == b"theirs"


def test_a_file_beyond_the_largest_number_of_parts_is_refused(
    s3: S3Server, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray_ulysses.storage.object_store.MAX_PARTS", 2)
    store = object_store(s3.uri(prefix))
    with pytest.raises(ValueError, match=f"{2 * PART_BYTES} bytes"):
        store.create("shard", _shard())
    assert not _objects(s3, prefix)


def test_a_pickled_store_holds_no_credentials_and_uses_those_that_are_there_when_it_is_first_asked(
    s3: S3Server, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    location = parse_location(s3.uri(prefix))
    assert isinstance(location, ObjectLocation)
    store = ObjectStore(location)
    store.create("a", [b"abc"])
    content = pickle.dumps(store)
    assert os.environ["AWS_SECRET_ACCESS_KEY"].encode() not in content
    secret = os.environ["AWS_SECRET_ACCESS_KEY"]
    # As in a process that reads its secrets only after it was given the store.
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    there = pickle.loads(content)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    assert there.read_whole("a") == b"abc" and there.name == store.name
