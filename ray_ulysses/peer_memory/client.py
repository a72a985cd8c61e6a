"""Talks to one peer memory agent, over connections that are kept for the next request."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ray_ulysses.checkpoint.checksums import checksum
from ray_ulysses.peer_memory.authentication import authenticate
from ray_ulysses.peer_memory.files import Chunk, LentBuffer, LentMemory
from ray_ulysses.peer_memory.wire import (
    CHUNK_BYTES,
    FrameError,
    has_ended,
    local_address,
    peer_user,
    receive_head,
    receive_into,
    send_file,
    send_frame,
    send_head,
    split_address,
)
from ray_ulysses.storage import AlreadyExistsError, Buffer
from ray_ulysses.storage.retry import is_transient

ANSWER_S = 2.0
"""Longest wait for a connection, in seconds: a node that is gone must not hold up a recovery."""
PROGRESS_S = 10.0
"""Longest wait for any news of an agent whose node answers, in seconds: it may be busy with many gigabytes."""
PARTNER_S = PROGRESS_S / 2
"""Longest wait of an agent for news of its copy's target, in seconds: the client of the copy waits for `PROGRESS_S`,
and must learn by then which of the two does not answer."""
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
        progress_s: Longest handshake, and longest wait for news within a request, in seconds.
        is_local: Whether to connect as a process of the agent's node, which can lend it memory.
    """

    def __init__(
        self,
        address: str,
        token: str,
        *,
        answer_s: float = ANSWER_S,
        progress_s: float = PROGRESS_S,
        is_local: bool = False,
    ) -> None:
        self.address, self._is_local = address, is_local
        self._token, self._answer_s, self._progress_s = token, answer_s, progress_s
        self._lock = threading.Lock()
        self._idle: list[socket.socket] = []

    def greet(self) -> None:
        """Check that it answers.

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

    def put(
        self,
        key: str,
        chunks: Iterable[Buffer],
        *,
        replace: bool,
        is_large: bool = False,
        lent: LentMemory | None = None,
    ) -> int:
        """Write a file, each chunk verified where it is stored; return its size in bytes.

        Args:
            key: Its key.
            chunks: Its bytes.
            replace: Whether it may take the place of another.
            is_large: Whether much of it is likely to be sent.
            lent: Memory whose bytes are not sent but lent; the client must be one that `is_local`.

        Raises:
            AlreadyExistsError: The key is taken, and ``replace`` is false.
            AgentGoneError: The agent does not answer.
            OSError: Its memory is full.
        """
        buffer = None
        with self.uploading(key, replace=replace, is_large=is_large) as upload:
            for run, is_last in _runs(chunks, lent):
                upload.append(run, is_last=is_last)
                buffer = run.buffer or buffer
        if lent is not None and buffer is not None:
            lent.kept(buffer)
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
            except (_Refused, AlreadyExistsError):
                raise
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
                if has_ended(connection):
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
            connection = self._open()
            try:
                authenticate(connection, self._token, self._progress_s)
            except OSError:
                connection.close()
                raise
        except OSError as error:
            raise self._gone(error) from error
        connection.settimeout(self._progress_s)
        return connection

    def _open(self) -> socket.socket:
        if not self._is_local:
            connection = socket.create_connection(split_address(self.address), timeout=self._answer_s)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(self._answer_s)
            connection.connect(local_address(self.address))
            # Any user of the node can take an address of this kind.
            if peer_user(connection) != os.geteuid():
                raise PermissionError(errno.EACCES, "another user listens there")
        except OSError:
            connection.close()
            raise
        return connection

    def _gone(self, error: OSError) -> AgentGoneError:
        return AgentGoneError(errno.EHOSTUNREACH, f"the peer memory agent at {self.address} does not answer ({error})")


class Uploading:
    """A file that is being written to an agent.

    Attributes:
        connection: The connection that it is written over.
        size: Its size in bytes, once it has its name.
    """

    def __init__(self, connection: socket.socket, key: str, *, replace: bool, is_large: bool) -> None:
        self.connection, self._key, self._replace = connection, key, replace
        self._first: dict[str, Any] = {"begin": {"is_large": is_large}}
        self.size = 0

    def append(self, run: _Run, *, is_last: bool) -> None:
        """Have the agent use lent bytes in place, and send the others, which it verifies once they are stored."""
        fields = self._request(checksum(run.payload), is_last=is_last)
        if run.buffer is None:
            send_frame(self.connection, fields, run.payload)
        else:
            run.buffer.lend(self.connection)
            places = {"num_bytes": run.buffer.num_bytes, "chunks": _summed(run.buffer.memory, run.extents)}
            send_head(self.connection, fields | {"lent": places}, memoryview(run.payload).nbytes)
            socket.send_fds(self.connection, [b"\0"], [run.buffer.descriptor])
            self.connection.sendall(run.payload)
        self._finish(is_last=is_last)

    def append_from(self, chunk: Chunk, *, is_last: bool) -> None:
        """Send a chunk of a file under the checksum that it was stored with."""
        send_head(self.connection, self._request(chunk.checksum, is_last=is_last), chunk.num_bytes)
        send_file(self.connection, chunk.pages.fileno(), chunk.offset, chunk.num_bytes)
        self._finish(is_last=is_last)

    def _request(self, content_sum: int, *, is_last: bool) -> dict[str, Any]:
        # The file begins and ends with its chunks: each request costs as much as to copy a megabyte.
        first, self._first = self._first, {}
        last = {"keep": {"key": self._key, "replace": self._replace}} if is_last else {}
        return {"op": "append", "checksum": content_sum, **first, **last}

    def _finish(self, *, is_last: bool) -> None:
        fields, _ = _reply(self.connection)
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


def _summed(memory: memoryview, extents: Iterable[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Return offset, size and checksum of each chunk of some extents."""
    pieces = [
        (start, min(start + CHUNK_BYTES, offset + size))
        for offset, size in extents
        for start in range(offset, offset + size, CHUNK_BYTES)
    ]
    return [(start, stop - start, checksum(memory[start:stop])) for start, stop in pieces]


@dataclass(slots=True)
class _Run:
    """The bytes that one request adds to a file: those in a lent buffer, then those that are sent."""

    buffer: LentBuffer | None = None
    """The buffer; None without."""
    extents: list[tuple[int, int]] = field(default_factory=list)
    """Offset there and size, in the order of the file."""
    payload: Buffer = b""
    """The bytes that are sent."""

    def extend(self, buffer: LentBuffer, offset: int, num_bytes: int) -> None:
        """Add bytes of a buffer; those that follow the last ones become one extent with them."""
        self.buffer = buffer
        if self.extents and sum(self.extents[-1]) == offset:
            offset, before = self.extents.pop()
            num_bytes += before
        self.extents.append((offset, num_bytes))


def _runs(chunks: Iterable[Buffer], lent: LentMemory | None) -> Iterator[tuple[_Run, bool]]:
    """Yield the same bytes in few requests, each with whether it is the last, which may be empty.

    Bytes that are lent stay where they are, large chunks too, and small ones are joined, in memory that the next joined
    ones overwrite.
    """
    # Not cleared, so that the kernel gives pages for what is used of it only.
    joined = memoryview(np.empty(_JOINED_BYTES, dtype=np.uint8))  # type: ignore[arg-type]  # numpy 2 arrays are buffers
    run, filled = _Run(), 0
    for chunk in chunks:
        view = memoryview(chunk).cast("B")
        place = lent.place(view) if lent is not None and view else None
        is_large = place is None and len(view) >= SMALL_BYTES
        # A request's lent bytes are of one buffer, and come first.
        is_other = place is not None and (filled > 0 or run.buffer not in (None, place[0]))
        is_full = place is None and not is_large and filled + len(view) > len(joined)
        if is_other or is_full or (is_large and (filled > 0 or run.buffer is not None)):
            run.payload = joined[:filled]
            yield run, False
            run, filled = _Run(), 0
        if place is not None:
            run.extend(*place, len(view))
        elif is_large:
            for start in range(0, len(view), CHUNK_BYTES):
                yield _Run(payload=view[start : start + CHUNK_BYTES]), False
        else:
            joined[filled : filled + len(view)] = view
            filled += len(view)
    run.payload = joined[:filled]
    yield run, True
