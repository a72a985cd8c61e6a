"""A child reads streams through its supervisor."""

from __future__ import annotations

import socket
import threading
from collections.abc import Generator, Iterator
from multiprocessing.connection import Connection
from typing import Any

import pyarrow as pa
import pytest

from ray_ulysses.errors import RunError, UserError
from ray_ulysses.supervision.remote_streams import RemoteStreams, serve_streams
from tests.polling import wait_until


class Counting:
    """Yields as many tables as the first "block" says, with its name, and notes which streams have ended."""

    def __init__(self) -> None:
        self.ended: list[Any] = []
        self.waits = threading.Event()

    def read(self, blocks: Any, stopped: Any) -> Generator[pa.Table, None, None]:
        ((name, count),) = blocks
        try:
            if count == 0:  # it waits for CPUs
                self.waits.set()
                assert stopped.wait(60)
            for number in range(count):
                if number == 3:
                    raise UserError("the shard is broken")
                yield pa.table({"stream": [name], "number": [number]})
        finally:
            self.ended.append(name)


@pytest.fixture
def served() -> Iterator[tuple[RemoteStreams, Counting]]:
    mine, theirs = socket.socketpair()
    streams = Counting()
    serve_streams(lambda: streams, Connection(mine.detach()))
    remote = RemoteStreams(theirs.detach())
    yield remote, streams
    remote._connection.close()


def numbers(tables: Iterator[pa.Table]) -> list[int]:
    return [table.column("number")[0].as_py() for table in tables]


def test_tables_come_in_order_a_stream_ends_and_an_error_is_raised_in_the_child(
    served: tuple[RemoteStreams, Counting],
) -> None:
    remote, streams = served
    assert numbers(remote.read([("a", 2)], threading.Event())) == [0, 1]
    assert streams.ended == ["a"]
    assert numbers(remote.read([("b", 1)], threading.Event())) == [0]
    tables = remote.read([("c", 9)], threading.Event())
    assert [next(tables)["number"][0].as_py() for _ in range(3)] == [0, 1, 2]
    with pytest.raises(UserError, match="the shard is broken"):
        next(tables)


def test_a_new_stream_ends_the_one_before_which_gives_no_more(served: tuple[RemoteStreams, Counting]) -> None:
    remote, streams = served
    old, new = remote.read([("old", 3)], threading.Event()), remote.read([("new", 3)], threading.Event())
    assert next(old)["stream"][0].as_py() == "old"
    assert next(new)["stream"][0].as_py() == "new"
    assert streams.ended == ["old"]
    assert numbers(old) == [], "a reader that was given up takes no table of the other"
    assert numbers(new) == [1, 2]


def test_the_stream_of_a_child_that_is_gone_ends(served: tuple[RemoteStreams, Counting]) -> None:
    remote, streams = served
    next(remote.read([("a", 3)], threading.Event()))
    remote._connection.close()
    wait_until(lambda: streams.ended == ["a"], "the stream has ended")
    with pytest.raises(RunError, match="the worker's supervisor does not respond"):
        next(remote.read([("b", 3)], threading.Event()))


def test_a_stream_that_waits_ends_on_request_and_with_its_child(served: tuple[RemoteStreams, Counting]) -> None:
    remote, streams = served
    stopped = threading.Event()

    def stop() -> None:
        assert streams.waits.wait(60)
        stopped.set()

    threading.Thread(target=stop).start()
    assert numbers(remote.read([("asked", 0)], stopped)) == []
    assert streams.ended == ["asked"]
    assert numbers(remote.read([("next", 2)], threading.Event())) == [0, 1]
    remote._connection.send((9, (("gone", 0),)))
    assert remote._connection.recv() == (None, None)
    remote._connection.send((9, None))
    remote._connection.close()
    wait_until(lambda: streams.ended == ["asked", "next", "gone"], "the stream has ended")
