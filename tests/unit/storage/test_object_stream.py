"""Reading from an object store: no byte more than was asked for, and never of two versions."""

from __future__ import annotations

import io

import pytest

from ray_ulysses.storage.object_store import READ_AHEAD_BYTES, ObjectStore
from tests.s3_server import FaultyProxy

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
        stream.seek(123_456)
        assert stream.read(200_000) == _CONTENT[123_456:323_456]
        stream.seek(500_000)
        assert stream.readinto(target) == 300_000  # type: ignore[attr-defined]
    assert bytes(target) == _CONTENT[500_000:800_000]
    assert _got(proxy) == [("bytes=123456-323455", 200_000), ("bytes=500000-799999", 300_000)]


def test_small_reads_are_exact_and_share_a_request_where_they_are_in_a_row(
    shard: ObjectStore, proxy: FaultyProxy
) -> None:
    with shard.open("shard") as stream:
        stream.seek(700_000)
        assert stream.read(100) == _CONTENT[700_000:700_100]
        stream.seek(0)
        assert b"".join(stream.read(1000) for _ in range(100)) == _CONTENT[:100_000]
    assert [sent for _, sent in _got(proxy)] == [100, 1000, READ_AHEAD_BYTES, READ_AHEAD_BYTES]


def test_opening_and_asking_for_the_size_reads_nothing_of_a_large_file(shard: ObjectStore, proxy: FaultyProxy) -> None:
    with shard.open("shard") as stream:
        assert stream.seek(0, io.SEEK_END) == _SIZE
    assert [exchange.method for exchange in proxy.exchanges] == ["HEAD"]


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


def test_a_small_file_that_is_replaced_between_the_two_requests_is_read_anew(
    broken_s3: ObjectStore, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    import obstore

    broken_s3.replace("beat", [b"1"])
    head = obstore.head

    def head_then_replace(*args: object) -> object:
        meta = head(*args)  # type: ignore[arg-type]
        monkeypatch.setattr(obstore, "head", head)
        broken_s3.replace("beat", [b"22"])
        return meta

    monkeypatch.setattr(obstore, "head", head_then_replace)
    with broken_s3.open("beat") as stream:
        assert stream.read() == b"22"


def test_a_stream_behaves_like_a_file(shard: ObjectStore) -> None:
    with shard.open("shard") as stream:
        assert (stream.readable(), stream.seekable(), stream.writable(), stream.tell()) == (True, True, False, 0)
        assert stream.seek(_SIZE + 5) == _SIZE + 5 and stream.read(1) == b""
        with pytest.raises(ValueError):
            stream.seek(-1)
    with pytest.raises(ValueError):
        stream.read(1)
