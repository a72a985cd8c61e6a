"""Lets a child, which has no Ray, build and read streams of rows through its supervisor, which has.

Two connections, since a stream must be built while another one is being read: requests that take an answer, and the
blocks of the stream that this rank reads.
"""

from __future__ import annotations

import contextlib
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from ray_ulysses.errors import RunError, UlyssesError

if TYPE_CHECKING:
    import pyarrow as pa

    from ray_ulysses.data.plan.mixture import PlannedSource
    from ray_ulysses.data.read.streamed_source import Slot, Streams


class RemoteStreams:
    """The child's side: the same calls as those of the supervisor's streams.

    Args:
        requests: Descriptor of the connection for requests.
        blocks: Descriptor of the connection for blocks.
    """

    def __init__(self, requests: int, blocks: int) -> None:
        self._requests, self._blocks = Connection(requests), Connection(blocks)
        self._has_built = False

    def build(self, sources: Sequence[PlannedSource], slots: Sequence[Slot], num_ends: int) -> list[bytes]:
        """Return one end per rank of a stream of these slots."""
        self._has_built = True
        ends: list[bytes] = _ask(self._requests, ("build", tuple(sources), list(slots), num_ends))
        return ends

    def read(self, end: bytes) -> Iterator[pa.Table]:
        """Yield the blocks of one end, in order."""
        _ask(self._blocks, end)
        while (block := _ask(self._blocks, None)) is not None:
            yield block

    def drop(self, keep: int) -> None:
        """End the oldest streams that were built here, all but so many."""
        if self._has_built:
            _ask(self._requests, ("drop", keep))


def serve_streams(make: Callable[[], Streams], requests: Connection, blocks: Connection) -> None:
    """Serve one child until its connections close; returns at once.

    Args:
        make: Makes the supervisor's streams for this child; called in a thread, since it may take seconds.
        requests: The other end of the child's connection for requests.
        blocks: The other end of its connection for blocks.
    """
    made: list[Streams] = []
    lock = threading.Lock()

    def streams() -> Streams:
        with lock:
            if not made:
                made.append(make())
        return made[0]

    def answer(message: Any) -> Any:
        if message[0] == "build":
            # As bytes, since only processes with Ray can open them.
            return [pickle.dumps(end) for end in streams().build(*message[1:])]
        return streams().drop(message[1])

    def answer_requests() -> None:
        _answer_all(requests, answer)
        # The child is gone, and its streams with it.
        with contextlib.suppress(Exception):
            if made:
                made[0].drop(0)

    def answer_reads() -> None:
        reading: Iterator[pa.Table] = iter(())

        def read(message: Any) -> Any:
            nonlocal reading
            if message is not None:
                reading = iter(streams().read(pickle.loads(message)))
                return None
            return next(reading, None)

        _answer_all(blocks, read)

    for target in (answer_requests, answer_reads):
        threading.Thread(target=target, name="row-stream", daemon=True).start()


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
