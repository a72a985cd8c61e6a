"""Lets a child, which is not connected to Ray, read row streams through its supervisor."""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
from collections.abc import Callable, Generator, Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from ray_ulysses.errors import RunError, UlyssesError

if TYPE_CHECKING:
    import pyarrow as pa

    from ray_ulysses.data.read.blocks import Block, Streams


_POLL_S = 0.1


class RemoteStreams:
    """Child side, with the interface of the supervisor's streams. Only the newest stream yields blocks."""

    def __init__(self, descriptor: int) -> None:
        self._connection = Connection(descriptor)
        self._numbers = itertools.count(1)
        # An abandoned thread may still be waiting for an answer.
        self._lock = threading.Lock()

    def read(self, blocks: Sequence[Block], stopped: threading.Event) -> Generator[pa.Table, None, None]:
        """Yield the blocks' slots in order; setting `stopped` also ends the supervisor's stream."""
        if stopped.is_set():
            # An abandoned reader must not end its successor's stream.
            return
        number = next(self._numbers)
        self._ask((number, tuple(blocks)), stopped)
        while (table := self._ask((number, None), stopped)) is not None:
            yield table

    def _ask(self, message: Any, stopped: threading.Event) -> Any:
        """Return the supervisor's answer to a message, or raise the error in the answer."""
        try:
            with self._lock:
                self._connection.send(message)
                while not self._connection.poll(_POLL_S):
                    if stopped.is_set():
                        self._connection.send(None)
                        break
                answer, error = self._connection.recv()
        except (EOFError, OSError) as gone:
            raise RunError(f"the worker's supervisor does not respond ({gone})") from gone
        if error is not None:
            raise error
        return answer


def serve_streams(make: Callable[[], Streams], connection: Connection) -> None:
    """Serve one child in a thread until its connection closes.

    Args:
        make: Creates the supervisor's streams for this child; called in the thread, because it may take seconds.
        connection: The supervisor's end of the child's connection.
    """
    threading.Thread(target=_Served(make).answer_all, args=(connection,), name="row-stream", daemon=True).start()


class _Served:
    """Supervisor side: the stream that one child reads."""

    def __init__(self, make: Callable[[], Streams]) -> None:
        self._make = make
        self._streams: Streams | None = None
        self._number = 0
        self._reading: Generator[pa.Table, None, None] | None = None
        self._stopped = threading.Event()

    def answer_all(self, connection: Connection) -> None:
        """Answer messages until the child is gone, and then end its stream."""
        messages: queue.SimpleQueue[tuple[int, Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._receive, args=(connection, messages), daemon=True).start()
        with contextlib.suppress(OSError):
            while (message := messages.get()) is not None:
                connection.send(self._answer_or_error(message))
        with contextlib.suppress(Exception):
            self._end()
        connection.close()

    def _receive(self, connection: Connection, messages: queue.SimpleQueue[tuple[int, Any] | None]) -> None:
        """Receive the child's messages. A message of None, or the child's death, stops a waiting stream."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                if (message := connection.recv()) is None:
                    self._stopped.set()
                else:
                    messages.put(message)
        self._stopped.set()
        messages.put(None)

    def _answer_or_error(self, message: tuple[int, Any]) -> tuple[pa.Table | None, UlyssesError | None]:
        try:
            return self._answer(message), None
        except UlyssesError as error:
            return None, error
        except Exception as error:
            return None, RunError(f"{type(error).__name__}: {error}")

    def _answer(self, message: tuple[int, Any]) -> pa.Table | None:
        number, request = message
        if request is not None:
            self._end()
            if self._streams is None:
                self._streams = self._make()
            self._stopped = threading.Event()
            self._number, self._reading = number, self._streams.read(request, self._stopped)
            return None
        return None if number != self._number or self._reading is None else next(self._reading, None)

    def _end(self) -> None:
        if self._reading is not None:
            self._reading.close()
            self._reading = None
