"""What every store has in common: keys, and reads of streams that give little at a time."""

from __future__ import annotations

import io

import pytest

from ray_ulysses.storage.store import checked_key, read_exactly
from tests.stores import CountingStore, MemoryStore
from tests.unit.storage.short_reads import ShortStore, ShortStream

CONTENT = bytes(range(256)) * 5


@pytest.mark.parametrize("most", [1, 99, 100, 1279, 1280, 5000])
def test_a_read_is_whole_however_little_a_stream_gives_at_once(most: int) -> None:
    for start, size in ((0, 1280), (0, 0), (3, 100), (3, 101), (0, 1), (1279, 1)):
        stream = ShortStream(CONTENT, most)
        stream.seek(start)
        assert read_exactly(stream, size) == CONTENT[start : start + size]
        assert stream.tell() == start + size


@pytest.mark.parametrize("most", [7, 5000])
def test_a_read_beyond_the_end_gives_what_there_is(most: int) -> None:
    stream = ShortStream(CONTENT, most)
    stream.seek(1000)
    assert read_exactly(stream, 281) == CONTENT[1000:]
    assert read_exactly(stream, 1) == b""


def test_a_stream_that_gives_all_at_once_is_asked_once() -> None:
    store = CountingStore(MemoryStore())
    store.create("a", [CONTENT])
    with store.open("a") as stream:
        assert read_exactly(stream, 1000) == CONTENT[:1000]
    assert store.read_whole("a") == CONTENT
    assert store.calls["read"] == 2


@pytest.mark.parametrize("content", [b"", b"x", CONTENT])
def test_a_whole_file_is_read_however_little_a_stream_gives_at_once(content: bytes) -> None:
    store = ShortStore(MemoryStore(), 100)
    store.create("a", [content])
    assert store.read_whole("a") == content


def test_the_stream_of_these_tests_is_short() -> None:
    assert isinstance(ShortStream(CONTENT, 100), io.RawIOBase)
    assert len(ShortStream(CONTENT, 100).read(1000) or b"") == 100
    assert len(ShortStream(CONTENT, 100).read() or b"") == 100


@pytest.mark.parametrize("key", ["", "/a", "../a", "a/../../b", "a/./b", "a//b", "a/", "."])
def test_a_key_that_is_no_plain_path_inside_the_store_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match="is not a plain relative path"):
        checked_key(key)
