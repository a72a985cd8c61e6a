"""Client of a peer memory agent, with a pool of idle connections."""

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
"""Timeout for opening a connection, in seconds; short, so that a lost node does not delay a recovery."""
PROGRESS_S = 10.0
"""Timeout for progress within a request, in seconds; longer, because an agent may be busy with many gigabytes."""
PARTNER_S = PROGRESS_S / 2
"""Timeout for progress of a copy between two agents, in seconds. It is shorter than the client's `PROGRESS_S`, so that
the client learns which of the two agents does not respond."""
SMALL_BYTES = 2**20
_JOINED_BYTES = 4 * SMALL_BYTES


class AgentGoneError(OSError):
    """The agent does not respond."""


class AgentClient:
    """Client of one agent; thread-safe.

    Args:
        address: The agent's ``host:port``.
        token: The run's secret.
        progress_s: Timeout for the handshake, and for progress within a request, in seconds.
        is_local: Whether to connect through the agent's Unix socket, which is required to lend memory.
    """

    def __init__(
        self,
        address: str,
        token: str,
        *,
        progress_s: float = PROGRESS_S,
        is_local: bool = False,
    ) -> None:
        self.address, self._is_local = address, is_local
        self._token, self._progress_s = token, progress_s
        self._lock = threading.Lock()
        self._idle: list[socket.socket] = []

    def greet(self) -> None:
        """Check that the agent answers.

        Raises:
            AgentGoneError: The agent does not respond.
        """
        with self._connection():
            pass

    def sizes(self, prefix: str) -> dict[str, int]:
        """Return the size in bytes of each file whose key is `prefix` or is in the folder `prefix`, by key."""
        with self._connection() as connection:
            return dict(_call(connection, op="sizes", prefix=prefix)["sizes"])

    def delete(self, prefix: str) -> None:
        """Delete the file `prefix`, or all files under the folder `prefix`."""
        with self._connection() as connection:
            _call(connection, op="delete", prefix=prefix)

    def read_into(self, key: str, offset: int, target: memoryview) -> int:
        """Read from `offset` until `target` is full or the file ends, and return the number of bytes read.

        Raises:
            FileNotFoundError: The agent does not have the file.
            AgentGoneError: The agent does not respond.
        """
        with self._connection() as connection:
            send_frame(connection, {"op": "read", "key": key, "offset": offset, "num_bytes": len(target)})
            num_bytes = _reply(connection)[1]
            if num_bytes > len(target):
                raise FrameError("the reply has more bytes than requested")
            receive_into(connection, target[:num_bytes])
        return num_bytes

    def copy(self, key: str, to: str) -> None:
        """Make this agent copy a file to the agent at address `to`; returns once the latter has verified the copy.

        Raises:
            AgentGoneError: The source agent does not respond.
            OSError: The target agent does not respond (``EHOSTUNREACH``), or its memory is full.
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
        """Write a file and return its size in bytes; the agent verifies each chunk that is sent.

        Args:
            key: Key of the file.
            chunks: Content of the file.
            replace: Whether to replace an existing file.
            is_large: Whether many bytes will probably be sent, in which case the agent reuses spare pages.
            lent: Shared memory of this process. Chunks in it are lent instead of sent. Requires `is_local`.

        Raises:
            AlreadyExistsError: The key exists, and `replace` is false.
            AgentGoneError: The agent does not respond.
            OSError: The agent's memory is full.
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
        """Start the upload of a file, which becomes visible once its last chunk is appended; see `put`."""
        with self._connection() as connection:
            try:
                yield Uploading(connection, key, replace=replace, is_large=is_large)
            except (_Refused, AlreadyExistsError):
                raise
            except BaseException:
                # When the connection closes, the agent drops the incomplete file.
                connection.close()
                raise

    def close(self) -> None:
        """Close the idle connections."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def drop_ended(self) -> None:
        """Close the idle connections that the agent has closed, so that the next request opens a new connection."""
        with self._lock:
            kept, self._idle = self._idle, []
            for connection in kept:
                if has_ended(connection):
                    connection.close()
                else:
                    self._idle.append(connection)

    @contextmanager
    def _connection(self) -> Iterator[socket.socket]:
        """Yield a connection, and return it to the pool unless an error left it in the middle of a frame."""
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
            connection = socket.create_connection(split_address(self.address), timeout=ANSWER_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(ANSWER_S)
            connection.connect(local_address(self.address))
            # Any user on the node can listen on an abstract socket address.
            if peer_user(connection) != os.geteuid():
                raise PermissionError(errno.EACCES, "the socket belongs to another user")
        except OSError:
            connection.close()
            raise
        return connection

    def _gone(self, error: OSError) -> AgentGoneError:
        return AgentGoneError(errno.EHOSTUNREACH, f"the peer memory agent at {self.address} does not respond ({error})")


class Uploading:
    """A file that is being uploaded to an agent."""

    def __init__(self, connection: socket.socket, key: str, *, replace: bool, is_large: bool) -> None:
        self.connection, self._key, self._replace = connection, key, replace
        self._first: dict[str, Any] = {"begin": {"is_large": is_large}}
        self.size = 0
        """Size of the file in bytes, set after the last chunk."""

    def append(self, run: _Run, *, is_last: bool) -> None:
        """Append the bytes of one request: lend the buffer's extents and send the payload, which the agent verifies."""
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
        """Send a stored chunk together with its stored checksum."""
        send_head(self.connection, self._request(chunk.checksum, is_last=is_last), chunk.num_bytes)
        send_file(self.connection, chunk.pages.fileno(), chunk.offset, chunk.num_bytes)
        self._finish(is_last=is_last)

    def _request(self, content_sum: int, *, is_last: bool) -> dict[str, Any]:
        # `begin` and `keep` are fields of append requests: separate requests would cost as much as copying a megabyte.
        first, self._first = self._first, {}
        last = {"keep": {"key": self._key, "replace": self._replace}} if is_last else {}
        return {"op": "append", "checksum": content_sum, **first, **last}

    def _finish(self, *, is_last: bool) -> None:
        fields, _ = _reply(self.connection)
        if is_last:
            self.size = fields["size"]


class _Refused(Exception):
    """The agent replied with an error; the connection can be reused."""

    def __init__(self, error: OSError) -> None:
        self.error = error


def _call(connection: socket.socket, **fields: Any) -> dict[str, Any]:
    send_frame(connection, fields)
    return _reply(connection)[0]


def _reply(connection: socket.socket) -> tuple[dict[str, Any], int]:
    """Receive a reply's fields and payload size, or raise the error in the reply."""
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
    """Split extents (offset, size) of `memory` into chunks, and return each chunk's offset, size and checksum."""
    pieces = [
        (start, min(start + CHUNK_BYTES, offset + size))
        for offset, size in extents
        for start in range(offset, offset + size, CHUNK_BYTES)
    ]
    return [(start, stop - start, checksum(memory[start:stop])) for start, stop in pieces]


@dataclass(slots=True)
class _Run:
    """The bytes that one request appends to a file: extents of a lent buffer, followed by a payload."""

    buffer: LentBuffer | None = None
    """Lent buffer, or None if the request only has a payload."""
    extents: list[tuple[int, int]] = field(default_factory=list)
    """Offset in `buffer` and size of each extent, in file order."""
    payload: Buffer = b""
    """Bytes to send."""

    def extend(self, buffer: LentBuffer, offset: int, num_bytes: int) -> None:
        """Add an extent of `buffer`, merging it with the previous extent if they are adjacent."""
        self.buffer = buffer
        if self.extents and sum(self.extents[-1]) == offset:
            offset, before = self.extents.pop()
            num_bytes += before
        self.extents.append((offset, num_bytes))


def _runs(chunks: Iterable[Buffer], lent: LentMemory | None) -> Iterator[tuple[_Run, bool]]:
    """Group chunks into few requests; yield each request's bytes and whether it is the last request.

    Lent bytes and large chunks are not copied. Small chunks are joined in a buffer that the next `_Run` overwrites, so
    each `_Run` must be sent before the next is requested. The last `_Run` may be empty.
    """
    # Uninitialized memory, so that the kernel only allocates the pages that are used.
    joined = memoryview(np.empty(_JOINED_BYTES, dtype=np.uint8))  # type: ignore[arg-type]  # numpy 2 arrays are buffers
    run, filled = _Run(), 0
    for chunk in chunks:
        view = memoryview(chunk).cast("B")
        place = lent.place(view) if lent is not None and view else None
        is_large = place is None and len(view) >= SMALL_BYTES
        # The lent bytes of a request come from one buffer and precede its payload.
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
