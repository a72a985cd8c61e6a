"""The object store when the other side fails: lost answers, overload, refusals, no space, nobody there."""

from __future__ import annotations

import errno
import io
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import obstore
import pytest
from obstore.exceptions import AlreadyExistsError as TakenError
from obstore.exceptions import GenericError, PermissionDeniedError, PreconditionError

from ray_ulysses.storage.location import ObjectLocation
from ray_ulysses.storage.object_client import explain
from ray_ulysses.storage.object_store import READ_AHEAD_BYTES, ObjectStore
from ray_ulysses.storage.place import open_store, place_of
from ray_ulysses.storage.probe import check_storage
from ray_ulysses.storage.store import AlreadyExistsError, Store
from ray_ulysses.tracking.journal import claim_journal
from ray_ulysses.tracking.journal_reader import read_journal
from tests.google_stand_in import GoogleHandler
from tests.s3_server import FaultyProxy, S3Server, faulty_proxy
from tests.unit.storage.conftest import PART_BYTES, object_store

_EVERY_TIME = 10**6
_NUM_PARTS = 3
_ANY: dict[str, Callable[[str, str], bool]] = {
    "put": lambda method, path: method == "PUT" and "uploadId" not in path,
    "get": lambda method, path: method == "GET" and "list-type" not in path,
    "completion": lambda method, path: method == "POST" and "uploadId" in path,
    "second part": lambda method, path: "partNumber=2" in path,
}


def _has_objects(s3: S3Server, prefix: str) -> bool:
    return "Contents" in s3.client().list_objects_v2(Bucket="bucket", Prefix=prefix)


def _shard() -> Iterator[bytes]:
    for number in range(_NUM_PARTS):
        yield bytes([number]) * PART_BYTES


@pytest.mark.parametrize("fault", ["503", "drop", "409"])
def test_create_retries(broken_s3: ObjectStore, proxy: FaultyProxy, s3: S3Server, prefix: str, fault: str) -> None:
    proxy.fail(fault, _ANY["put"])
    broken_s3.create("manifest.json", [b"{}"])
    assert broken_s3.read_whole("manifest.json") == b"{}"
    assert proxy.count("PUT") == 2
    # Another writer's file, without a mark.
    s3.client().put_object(Bucket="bucket", Key=f"{prefix}/theirs", Body=b"theirs")
    for chunks in ([b"ours"], _shard()):
        proxy.fail("drop", _ANY["put"])
        with pytest.raises(AlreadyExistsError, match=f"s3://bucket/{prefix}/theirs"):
            broken_s3.create("theirs", chunks)
        proxy.heal()
    assert broken_s3.read_whole("theirs") == b"theirs"


def test_a_create_whose_answers_are_lost_knows_its_own_file(
    broken_s3: ObjectStore, hasty_s3: ObjectStore, proxy: FaultyProxy
) -> None:
    proxy.fail("lose-answer", _ANY["put"])
    assert broken_s3.create("manifest.json", [b"{}"]) == 2
    assert [exchange.status for exchange in proxy.exchanges] == [0, 412, 200]
    with pytest.raises(AlreadyExistsError):
        # The same bytes, but not the same writer.
        broken_s3.create("manifest.json", [b"{}"])
    proxy.fail("lose-answer", _ANY["put"], _EVERY_TIME)
    assert hasty_s3.create("other.json", [b"{}"]) == 2


@pytest.mark.parametrize(("fault", "request_"), [("503", "second part"), ("lose-answer", "completion")])
def test_a_long_file_survives_a_failure(broken_s3: ObjectStore, proxy: FaultyProxy, fault: str, request_: str) -> None:
    proxy.fail(fault, _ANY[request_])
    assert broken_s3.create("shard", _shard()) == _NUM_PARTS * PART_BYTES
    assert broken_s3.read_whole("shard") == b"".join(_shard())


@pytest.mark.parametrize("fault", ["403", "507", "too long"])
def test_a_long_file_that_is_refused_leaves_nothing(
    hasty_s3: ObjectStore, proxy: FaultyProxy, s3: S3Server, prefix: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault == "too long":
        monkeypatch.setattr("ray_ulysses.storage.object_store.MAX_PARTS", 2)
        refusal: Any = pytest.raises(ValueError, match=f"{2 * PART_BYTES} bytes")
    else:
        proxy.fail(fault, _ANY["second part" if fault == "403" else "completion"], _EVERY_TIME)
        number = errno.EACCES if fault == "403" else errno.ENOSPC
        refusal = pytest.raises(OSError, check=lambda error: error.errno == number)
    with refusal:
        hasty_s3.create("shard", _shard())
    assert not _has_objects(s3, prefix)
    assert s3.client().list_multipart_uploads(Bucket="bucket", Prefix=prefix).get("Uploads") is None


@pytest.mark.parametrize("fault", ["507", "503", "drop"])
def test_a_failing_create_ends(
    hasty_s3: ObjectStore, proxy: FaultyProxy, s3: S3Server, prefix: str, fault: str
) -> None:
    proxy.fail(fault, _ANY["put"], _EVERY_TIME)
    begun = time.monotonic()
    with pytest.raises(OSError) as refused:
        hasty_s3.create("manifest.json", [b"{}"])
    # 1 s of retry, at most one pause beyond it, and one more look.
    assert time.monotonic() - begun < 8 and "127.0.0.1" not in str(refused.value)
    proxy.heal()
    assert not _has_objects(s3, prefix)


def test_a_read_that_breaks_off_is_resumed_there(broken_s3: ObjectStore, proxy: FaultyProxy) -> None:
    broken_s3.create("shard", _shard())
    proxy.fail("cut-body", _ANY["get"], 2)
    end = 1000 + 2 * PART_BYTES
    with broken_s3.open("shard") as stream:
        stream.seek(1000)
        assert stream.read(2 * PART_BYTES) == b"".join(_shard())[1000:end]
    ranges = [exchange.range for exchange in proxy.exchanges if _ANY["get"](exchange.method, exchange.path)]
    starts = (1000, 1000 + PART_BYTES, 1000 + PART_BYTES + PART_BYTES // 2)
    assert ranges == [f"bytes={start}-{end - 1}" for start in starts]


@pytest.mark.parametrize("fault", ["503", "cut-body"])
def test_a_small_file_whose_read_fails_is_read_again(broken_s3: ObjectStore, proxy: FaultyProxy, fault: str) -> None:
    content = b"".join(b"%07d" % number for number in range(100_000))
    broken_s3.create("manifest.json", [content])
    proxy.fail(fault, _ANY["get"], 2)
    assert broken_s3.read_whole("manifest.json") == content
    assert proxy.count("GET") == 3


def test_a_store_that_is_away_is_an_error_in_time(s3: S3Server, hasty_s3: ObjectStore, proxy: FaultyProxy) -> None:
    away = object_store(s3.uri("run", port=1), retry_s=0.2)
    hasty_s3.create("shard", [b"x" * 100_000])
    stream = hasty_s3.open("shard")
    proxy.fail("drop", _ANY["get"], _EVERY_TIME)
    of_away = (partial(call, "a") for call in (away.open, away.read_whole, away.list))
    creates = (partial(away.create, "a", chunks) for chunks in ([b""], _shard()))
    for call in (*creates, *of_away, stream.read):
        begun = time.monotonic()
        with pytest.raises(OSError, match="the store failed for") as refused:
            call()
        assert ("unreachable" in str(refused.value)) == (call != stream.read)
        assert not isinstance(refused.value, FileNotFoundError) and time.monotonic() - begun < 8


@pytest.mark.parametrize("says_not_found", [False, True], ids=["s3", "google"])
def test_folder_markers_stay(s3: S3Server, prefix: str, says_not_found: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    markers = ["checkpoints/step-00000100", "checkpoints/step-00000100/attempt-0001", "checkpoints/step-00000100/made"]
    for marker in markers:
        s3.client().put_object(Bucket="bucket", Key=f"{prefix}/{marker}/", Body=b"")
    store = object_store(s3.uri(prefix))
    for name in ("attempt-0001/shard", "manifest.json", "more"):
        store.create(f"{markers[0]}/{name}", [b"x"])
    calls, delete = list[object](), obstore.delete

    def limited(client: object, keys: list[str]) -> None:
        calls.append(keys)
        assert len(calls) < 50, "it never ends"
        if says_not_found and set(keys) & set(markers):
            raise FileNotFoundError(keys[0])
        delete(client, keys)

    monkeypatch.setattr(obstore, "delete", limited)
    for _ in range(2):
        store.delete(markers[0])
        assert store.list("checkpoints") == markers


def test_a_missing_bucket_is_no_empty_store(s3: S3Server) -> None:
    store = open_store(s3.uri("run").replace("bucket/", "no-such-bucket/"), retry_s=0.5)
    for call in (lambda: store.create("a", [b""]), lambda: store.list("a"), lambda: store.delete("a")):
        with pytest.raises(FileNotFoundError, match="bucket does not exist"):
            call()


def test_a_short_file_costs_one_request_and_a_long_one_its_parts(broken_s3: ObjectStore, proxy: FaultyProxy) -> None:
    def requests() -> list[tuple[str, str | None]]:
        made = [(exchange.method, exchange.range) for exchange in proxy.exchanges]
        proxy.exchanges.clear()
        return made

    for size in (0, 200_000):
        broken_s3.create(f"short-{size}", (b"x" * size for _ in range(5)))
        assert requests() == [("PUT", None)]
        assert broken_s3.read_whole(f"short-{size}") == b"x" * size * 5
        assert requests() == [("GET", None)]
    broken_s3.create("long", _shard())
    assert proxy.count("PUT", "partNumber") == _NUM_PARTS
    proxy.exchanges.clear()
    # A list of chunks, such as a manifest's, is one conditional put of any length.
    broken_s3.create("manifest", [b"".join(_shard())])
    assert requests() == [("PUT", None)]


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


def test_a_pickled_store_has_no_credentials(s3: S3Server, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store, secret = object_store(s3.uri(prefix)), os.environ["AWS_SECRET_ACCESS_KEY"]
    store.create("a", [b"abc"])
    content = pickle.dumps(store)
    assert secret.encode() not in content
    # Like a process that reads its secrets only after it was given the store.
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    there = pickle.loads(content)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    assert there.read_whole("a") == b"abc" and there.name == store.name


_SIZE = 1_000_000
_CONTENT = bytes(range(250)) * (_SIZE // 250)


@pytest.fixture
def shard(broken_s3: ObjectStore, proxy: FaultyProxy) -> ObjectStore:
    broken_s3.create("shard", [_CONTENT])
    proxy.exchanges.clear()
    return broken_s3


def _got(proxy: FaultyProxy) -> list[tuple[str | None, int]]:
    return [(exchange.range, exchange.sent_bytes) for exchange in proxy.exchanges if exchange.method == "GET"]


def test_a_large_read_is_one_request_for_exactly_its_bytes(shard: ObjectStore, proxy: FaultyProxy) -> None:
    target = bytearray(300_000)
    with shard.open("shard") as stream:
        assert stream.seek(0, io.SEEK_END) == _SIZE
        assert [exchange.method for exchange in proxy.exchanges] == ["HEAD"]
        stream.seek(123_456)
        assert stream.read(200_000) == _CONTENT[123_456:323_456]
        stream.seek(500_000)
        assert stream.readinto(target) == 300_000
    assert bytes(target) == _CONTENT[500_000:800_000]
    assert _got(proxy) == [("bytes=123456-323455", 200_000), ("bytes=500000-799999", 300_000)]


def test_small_reads_are_exact_and_sequential_ones_share_a_request(shard: ObjectStore, proxy: FaultyProxy) -> None:
    with shard.open("shard") as stream:
        stream.seek(700_000)
        assert stream.read(100) == _CONTENT[700_000:700_100]
        stream.seek(0)
        assert b"".join(stream.read(1000) for _ in range(100)) == _CONTENT[:100_000]
    assert [sent for _, sent in _got(proxy)] == [100, 1000, READ_AHEAD_BYTES, READ_AHEAD_BYTES]


def test_a_file_that_is_replaced_while_it_is_read_is_an_error_and_not_a_mixture(shard: ObjectStore) -> None:
    with shard.open("shard") as stream:
        assert stream.read(100_000) == _CONTENT[:100_000]
        shard.replace("shard", [b"z" * _SIZE])
        with pytest.raises(OSError, match="replaced"):
            stream.read(100_000)


def test_a_small_file_is_read_once_as_it_was_when_it_was_opened(broken_s3: ObjectStore, proxy: FaultyProxy) -> None:
    broken_s3.replace("beat", [b"12"])
    proxy.exchanges.clear()
    with broken_s3.open("beat") as stream:
        broken_s3.replace("beat", [b"333"])
        assert stream.read() == stream.read_at(0, 9) == b"12" and stream.read_at(1, 1) == b"2"
        assert stream.read_at(2, 1) == b""
    assert len(_got(proxy)) == 1
    with broken_s3.open("beat") as stream:
        assert stream.read() == b"333"


def test_a_small_file_replaced_during_open_is_reread(broken_s3: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    broken_s3.replace("beat", [b"1"])
    head = obstore.head

    def head_then_replace(*args: object) -> object:
        meta = head(*args)
        monkeypatch.setattr(obstore, "head", head)
        broken_s3.replace("beat", [b"22"])
        return meta

    monkeypatch.setattr(obstore, "head", head_then_replace)
    assert broken_s3.open("beat").read() == b"22"


_AT = "Generic S3 error: Error performing PUT http://host.example:9000/bucket/key in 3ms - "
_NUMBERS = {"absent": errno.ENOENT, "denied": errno.EACCES, "full": errno.ENOSPC, "refused": errno.EIO}
_KINDS = {"absent": FileNotFoundError, "denied": PermissionError}


def _status(status: str, code: str = "") -> str:
    body = f"<Error><Code>{code}</Code></Error>" if code else ""
    return f"{_AT}Server returned non-2xx status code: {status}: {body}\n\nDebug source:\n..."


@pytest.mark.parametrize(
    ("error", "meaning", "reason"),
    [
        (GenericError(_status("503 Service Unavailable", "SlowDown")), "transient", "503 Service Unavailable SlowDown"),
        (TakenError(_status("409 Conflict", "ConditionalRequestConflict")), "transient", "409 Conflict Cond"),
        (TakenError(_status("412 Precondition Failed", "PreconditionFailed")), "taken", "412 Precondition"),
        (PreconditionError(_status("412 Precondition Failed")), "changed", "412 Precondition Failed"),
        (FileNotFoundError(_status("404 Not Found", "NoSuchKey")), "absent", "the file does not exist"),
        (GenericError(_status("404 Not Found", "NoSuchBucket")), "absent", "the bucket does not exist"),
        (GenericError(_status("404 Not Found", "ContainerNotFound")), "absent", "the bucket does not exist"),
        (PermissionDeniedError(_status("403 Forbidden", "AccessDenied")), "denied", "403 Forbidden AccessDenied"),
        (GenericError(_status("403 Forbidden")), "denied", "403 Forbidden"),
        (GenericError(_status("400 Bad Request", "ExpiredToken")), "denied", "ExpiredToken"),
        (GenericError(_status("507 Insufficient Storage")), "full", "no space left"),
        (GenericError(_status("501 Not Implemented", "NotImplemented")), "refused", "501 Not Implemented"),
        (GenericError(_AT + "HTTP error\n inner: HttpError { kind: Connect,"), "away", "unreachable"),
        (GenericError(_AT + "HTTP error\n inner: HttpError { kind: Timeout,"), "transient", "timed out"),
        (GenericError("Error performing PUT http://1.2.3.4/latest/api/token"), "denied", "--trust-run"),
        (GenericError("Generic S3 error: cannot parse http://host.example/x answer"), "refused", "cannot parse answer"),
    ],
)
def test_an_error_is_classified_and_becomes_an_os_error(error: Exception, meaning: str, reason: str) -> None:
    refusal = explain(error)
    assert refusal.meaning == meaning and reason in refusal.reason
    raised = refusal.as_os_error("s3://bucket/key", 1.0)
    assert "host.example" not in str(raised) and raised.filename == "s3://bucket/key"
    assert type(raised) is _KINDS.get(meaning, OSError)
    assert raised.errno == _NUMBERS.get(meaning, raised.errno)


@pytest.fixture
def google(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    with faulty_proxy(s3, GoogleHandler) as running:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"127.0.0.1:{running.port}")
        yield running


@pytest.fixture
def store(google: FaultyProxy, prefix: str) -> Store:
    return open_store(f"gs://bucket/{prefix}")


def test_a_bucket_that_puts_if_absent_passes_the_probe_and_keeps_a_journal(google: FaultyProxy, prefix: str) -> None:
    check_storage(f"gs://bucket/{prefix}")
    place = place_of(f"gs://bucket/{prefix}/run")
    assert isinstance(place, ObjectLocation) and not open_store(place).exists()
    journal = claim_journal(place)
    journal.append({"event": "warning", "text": "begun"})
    journal.close()
    assert [getattr(entry, "text", None) for entry in read_journal(place).entries] == ["begun"]
    assert open_store(place).exists() and open_store(place).root_names() == ["journal"]


def test_a_file_is_created_once_and_a_lost_answer_is_no_failure(google: FaultyProxy, store: Store) -> None:
    google.fail("lose-answer", lambda method, path: method == "PUT")
    assert store.create("a/file", [b"one"]) == 3
    with pytest.raises(AlreadyExistsError):
        store.create("a/file", [b"two"])
    assert store.read_whole("a/file") == b"one" and store.sizes("a") == {"a/file": 3}
    store.replace("a/file", [b"three"])
    again = pickle.loads(pickle.dumps(store))
    assert isinstance(again, ObjectStore) and again.read_whole("a/file") == b"three"
    store.delete("a")
    assert store.list("a") == []
