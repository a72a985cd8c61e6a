"""Talks to one vault agent, over connections that are kept for the next request."""

from __future__ import annotations

import errno
import select
import socket
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ray_ulysses.checkpoint.checksums import checksum
from ray_ulysses.storage import AlreadyExistsError, Buffer
from ray_ulysses.storage.patience import is_transient
from ray_ulysses.vault.files import Chunk
from ray_ulysses.vault.wire import (
    CHUNK_BYTES,
    FrameError,
    HasDescriptor,
    receive_head,
    receive_into,
    send_file,
    send_frame,
    send_head,
    split_address,
)

ANSWER_S = 2.0
"""Longest wait for a connection, in seconds: a node that is gone must not hold up a recovery."""
PROGRESS_S = 10.0
"""Longest wait for any news of an agent whose node answers, in seconds: it may be busy with many gigabytes."""
PARTNER_S = PROGRESS_S / 2
"""Longest wait of an agent for any news of the one that it copies to, in seconds: whoever asked for the copy waits for
`PROGRESS_S`, and must hear by then which of the two does not answer."""
SMALL_BYTES = 2**20
_JOINED_BYTES = 4 * SMALL_BYTES


class AgentGoneError(OSError):
    """An agent does not answer."""


class AgentClient:
    """One agent, as another process sees it; any thread may call.

    Args:
        address: ``host:port``.
        token: The run's secret.
        answer_s: Longest wait for a connection, in seconds.
        progress_s: Longest wait for its greeting, and for news within a request, in seconds.
    """

    def __init__(self, address: str, token: str, *, answer_s: float = ANSWER_S, progress_s: float = PROGRESS_S) -> None:
        self.address = address
        self._token, self._answer_s, self._progress_s = token, answer_s, progress_s
        self._lock = threading.Lock()
        self._idle: list[socket.socket] = []

    def greet(self) -> None:
        """Make sure that it answers.

        Raises:
            AgentGoneError: It does not.
        """
        with self._connection():
            pass

    def sizes(self, prefix: str) -> dict[str, int]:
        """Return the size of each file at or under a folder, by its key."""
        with self._connection() as connection:
            found: dict[str, int] = _call(connection, op="sizes", prefix=prefix)["sizes"]
        return found

    def delete(self, prefix: str) -> None:
        """Drop a file, or all files under a folder."""
        with self._connection() as connection:
            _call(connection, op="delete", prefix=prefix)

    def read_into(self, key: str, offset: int, target: memoryview) -> int:
        """Read a range of a file into a buffer, and return how many bytes there were.

        Raises:
            FileNotFoundError: The agent does not have it.
            AgentGoneError: It does not answer.
        """
        with self._connection() as connection:
            send_frame(connection, {"op": "read", "key": key, "offset": offset, "num_bytes": len(target)})
            num_bytes = _reply(connection)[1]
            if num_bytes > len(target):
                raise FrameError("more bytes than asked for")
            receive_into(connection, target[:num_bytes])
        return num_bytes

    def copy(self, key: str, to: str) -> None:
        """Have the agent copy a file to another agent; returns when it is verified there.

        Raises:
            AgentGoneError: It does not answer.
            OSError: The other one does not (``EHOSTUNREACH``), or its memory is full.
        """
        with self._connection() as connection:
            send_frame(connection, {"op": "copy", "key": key, "to": to})
            while "size" not in _reply(connection)[0]:
                pass

    def put(self, key: str, chunks: Iterable[Buffer], *, replace: bool, is_large: bool = False) -> int:
        """Write a file, each chunk verified where it is stored; return its size in bytes.

        Raises:
            AlreadyExistsError: The key is taken, and ``replace`` is false.
            AgentGoneError: The agent does not answer.
            OSError: Its memory is full.
        """
        with self.uploading(key, replace=replace, is_large=is_large) as upload:
            for chunk, is_last in _joined(chunks):
                upload.append(chunk, is_last=is_last)
        return upload.size

    @contextmanager
    def uploading(self, key: str, *, replace: bool, is_large: bool) -> Iterator[Uploading]:
        """Write a file chunk by chunk; it gets its name with the last one.

        Args:
            key: Its key.
            replace: Whether it may take the place of another.
            is_large: Whether it is likely to be larger than a manifest.
        """
        with self._connection() as connection:
            try:
                yield Uploading(connection, key, replace=replace, is_large=is_large)
            except BaseException:
                # The agent then drops what it holds of the file.
                connection.close()
                raise

    def close(self) -> None:
        """Close the connections that no thread uses."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def drop_ended(self) -> None:
        """Drop the kept connections whose other end is gone, so that an agent in its place is connected to anew."""
        with self._lock:
            kept, self._idle = self._idle, []
            for connection in kept:
                if _has_ended(connection):
                    connection.close()
                else:
                    self._idle.append(connection)

    @contextmanager
    def _connection(self) -> Iterator[socket.socket]:
        """Give a connection; it is kept for others unless an error leaves it in the middle of a frame."""
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        connection = connection or self._connect()
        try:
            yield connection
        except (_Refused, AlreadyExistsError) as refusal:
            self._keep(connection)
            raise refusal.error if isinstance(refusal, _Refused) else refusal from None
        except OSError as error:
            connection.close()
            if isinstance(error, ConnectionError | TimeoutError) or is_transient(error):
                raise self._gone(error) from error
            raise
        except BaseException:
            connection.close()
            raise
        self._keep(connection)

    def _keep(self, connection: socket.socket) -> None:
        if connection.fileno() != -1:
            with self._lock:
                self._idle.append(connection)

    def _connect(self) -> socket.socket:
        try:
            connection = socket.create_connection(split_address(self.address), timeout=self._answer_s)
        except OSError as error:
            raise self._gone(error) from error
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(self._progress_s)
            _call(connection, token=self._token)
        except _Refused as refusal:
            connection.close()
            raise refusal.error from None
        except OSError as error:
            connection.close()
            raise self._gone(error) from error
        return connection

    def _gone(self, error: OSError) -> AgentGoneError:
        return AgentGoneError(errno.EHOSTUNREACH, f"the vault agent at {self.address} does not answer ({error})")


class Uploading:
    """A file that is being written to an agent.

    Attributes:
        size: Its size in bytes, once it has its name.
    """

    def __init__(self, connection: socket.socket, key: str, *, replace: bool, is_large: bool) -> None:
        self._connection, self._key, self._replace = connection, key, replace
        self._first: dict[str, Any] = {"begin": {"is_large": is_large}}
        self.size = 0

    def append(self, chunk: Buffer, *, is_last: bool) -> None:
        """Send a chunk, which the agent verifies where it has stored it."""
        send_frame(self._connection, self._request(checksum(chunk), is_last=is_last), chunk)
        self._finish(is_last=is_last)

    def append_from(self, file: HasDescriptor, offset: int, chunk: Chunk, *, is_last: bool) -> None:
        """Send a chunk of a file under the checksum that it was stored with."""
        send_head(self._connection, self._request(chunk.checksum, is_last=is_last), chunk.num_bytes)
        send_file(self._connection, file, offset, chunk.num_bytes)
        self._finish(is_last=is_last)

    def _request(self, content_sum: int, *, is_last: bool) -> dict[str, Any]:
        # The file begins and ends with its chunks: each request costs as much as to copy a megabyte.
        first, self._first = self._first, {}
        last = {"keep": {"key": self._key, "replace": self._replace}} if is_last else {}
        return {"op": "append", "checksum": content_sum, **first, **last}

    def _finish(self, *, is_last: bool) -> None:
        fields, _ = _reply(self._connection)
        if is_last:
            self.size = fields["size"]


class _Refused(Exception):
    """The agent has answered with an error; the connection is in order."""

    def __init__(self, error: OSError) -> None:
        self.error = error


def _call(connection: socket.socket, **fields: Any) -> dict[str, Any]:
    """Send a request without a payload and return the reply's fields."""
    send_frame(connection, fields)
    return _reply(connection)[0]


def _reply(connection: socket.socket) -> tuple[dict[str, Any], int]:
    """Receive a reply's fields and the size of its payload, or raise the error that it holds."""
    head = receive_head(connection)
    if head is None:
        raise FrameError("the connection was closed")
    fields, payload_bytes = head
    if "exists" in fields:
        raise AlreadyExistsError(str(fields["exists"]))
    if "errno" in fields:
        raise _Refused(OSError(fields["errno"], str(fields.get("text", ""))))
    return fields, payload_bytes


def _has_ended(connection: socket.socket) -> bool:
    """Return whether the other end has closed a connection on which nothing is awaited."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(0))


def _joined(chunks: Iterable[Buffer]) -> Iterator[tuple[Buffer, bool]]:
    """Yield the same bytes in chunks, each with whether it is the last: large ones as they are, small ones joined.

    The last may be empty. A joined one is overwritten by the next.
    """
    # Not cleared, so that the kernel gives pages for what is used of it only.
    joined = memoryview(np.empty(_JOINED_BYTES, dtype=np.uint8))  # type: ignore[arg-type]  # numpy 2 arrays are buffers
    filled = 0
    for chunk in chunks:
        view = memoryview(chunk).cast("B")
        if filled and (len(view) >= SMALL_BYTES or filled + len(view) > len(joined)):
            yield joined[:filled], False
            filled = 0
        if len(view) < SMALL_BYTES:
            joined[filled : filled + len(view)] = view
            filled += len(view)
            continue
        for start in range(0, len(view), CHUNK_BYTES):
            yield view[start : start + CHUNK_BYTES], False
    yield joined[:filled], True
