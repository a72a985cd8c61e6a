"""Lets a child, which has no Ray, read streams of rows through its supervisor, which has."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Generator, Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from ray_ulysses.errors import RunError, UlyssesError

if TYPE_CHECKING:
    import pyarrow as pa

    from ray_ulysses.data.plan.mixture import PlannedSource
    from ray_ulysses.data.read.streamed_source import Blocks, Streams


class RemoteStreams:
    """The child's side: the same call as that of the supervisor's streams. Only the newest stream gives blocks.

    Args:
        descriptor: Descriptor of the connection.
    """

    def __init__(self, descriptor: int) -> None:
        self._connection = Connection(descriptor)
        self._numbers = itertools.count(1)
        # A thread that was given up may still be waiting for an answer.
        self._lock = threading.Lock()

    def read(self, sources: Sequence[PlannedSource], blocks: Blocks) -> Generator[pa.Table, None, None]:
        """Yield the slots of the blocks in order."""
        number = next(self._numbers)
        self._ask(number, (tuple(sources), blocks))
        while (table := self._ask(number, None)) is not None:
            yield table

    def _ask(self, number: int, request: Any) -> Any:
        with self._lock:
            return _ask(self._connection, (number, request))


def serve_streams(make: Callable[[], Streams], connection: Connection) -> None:
    """Serve one child until its connection closes; returns at once.

    Args:
        make: Makes the supervisor's streams for this child; called in a thread, since it may take seconds.
        connection: The other end of the child's connection.
    """
    threading.Thread(target=_Served(make).answer_all, args=(connection,), name="row-stream", daemon=True).start()


class _Served:
    """The stream that a child reads now."""

    def __init__(self, make: Callable[[], Streams]) -> None:
        self._make = make
        self._streams: Streams | None = None
        self._number = 0
        self._reading: Generator[pa.Table, None, None] | None = None

    def answer_all(self, connection: Connection) -> None:
        """Answer until the child is gone, and its stream with it."""
        _answer_all(connection, self._answer)
        with contextlib.suppress(Exception):
            self._end()

    def _answer(self, message: tuple[int, Any]) -> pa.Table | None:
        number, request = message
        if request is not None:
            self._end()
            if self._streams is None:
                self._streams = self._make()
            self._number, self._reading = number, self._streams.read(*request)
            return None
        return None if number != self._number or self._reading is None else next(self._reading, None)

    def _end(self) -> None:
        if self._reading is not None:
            self._reading.close()
            self._reading = None


def _ask(connection: Connection, message: Any) -> Any:
    """Return the answer to a message, or raise what the supervisor raised.

    Raises:
        RunError: The supervisor is gone, or could not do it.
    """
    try:
        connection.send(message)
        answer, error = connection.recv()
    except (EOFError, OSError) as gone:
        raise RunError(f"the worker's supervisor does not answer ({gone})") from gone
    if error is not None:
        raise error
    return answer


def _answer_all(connection: Connection, answer: Any) -> None:
    failure: UlyssesError | None
    with contextlib.suppress(EOFError, OSError):
        while True:
            message = connection.recv()
            reply, failure = None, None
            try:
                reply = answer(message)
            except UlyssesError as error:
                failure = error
            except Exception as error:
                failure = RunError(f"{type(error).__name__}: {error}")
            connection.send((reply, failure))
    connection.close()
