"""The peer memory agent of a node: a TCP server that keeps a run's files while the run's processes start and stop.

Processes on the same node can also connect through a Unix socket and lend memory that already contains a file's
content. The agent needs neither Ray nor torch. Each connection starts with a handshake and is served by its own thread.
If no connection has been open for a while, the agent exits, so that an abandoned run does not occupy memory.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ray_ulysses.clock import Clock, SystemClock
from ray_ulysses.logging import get_logger
from ray_ulysses.peer_memory.authentication import Gate
from ray_ulysses.peer_memory.client import PARTNER_S, SMALL_BYTES, AgentClient
from ray_ulysses.peer_memory.files import Chunk, LentPages, MemoryFile, MemoryFiles, check_lent
from ray_ulysses.peer_memory.wire import (
    CHUNK_BYTES,
    FrameError,
    discard,
    local_address,
    receive_head,
    receive_into,
    send_file,
    send_frame,
    send_head,
)
from ray_ulysses.storage import AlreadyExistsError

IDLE_LIMIT_S = 120.0
"""Seconds without a connection after which an agent exits. A new driver must connect within this time."""
_LOOKS_S = 0.5
_BACKLOG = 256
_UNACKNOWLEDGED_MS = 50_000
_log = get_logger(__name__)


class PeerMemoryAgent:
    """Server that stores a run's files in the memory of this process.

    Args:
        token: The run's secret. The agent closes connections from clients that do not prove that they know the token.
        host: The node's address, on which the agent listens.
        port: Port to listen on, or any free port if it is in use. Clients of a dead agent reconnect to the same port.
        limit_bytes: Maximum total size of all files, or None for no limit.
        idle_limit_s: Seconds without a connection after which the agent exits.
        clock: Source of time.
        on_end: Called once after the agent has closed because it was idle.
    """

    def __init__(
        self,
        token: str,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        limit_bytes: int | None = None,
        idle_limit_s: float = IDLE_LIMIT_S,
        clock: Clock | None = None,
        on_end: Callable[[], Any] = lambda: None,
    ) -> None:
        self.files = MemoryFiles(limit_bytes)
        self._token, self._host, self._port = token, host, port
        self._idle_limit_s, self._on_end = idle_limit_s, on_end
        self._clock = clock if clock is not None else SystemClock()
        self._gate = Gate(token, self._clock)
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._alone_since = self._clock.monotonic()
        self._closed = threading.Event()
        self._listeners: list[socket.socket] = []
        self._accepting: list[threading.Thread] = []

    def start(self) -> str:
        """Start listening, and return the address as ``host:port``."""
        self._listeners.append(self._listen())
        address = f"{self._host}:{self._listeners[0].getsockname()[1]}"
        with contextlib.suppress(OSError):
            # Without the Unix socket, processes on this node send their files instead of lending memory.
            self._listeners.append(_listen_locally(address))
        for listener in self._listeners:
            thread = threading.Thread(target=self._accept, args=(listener,), name="peer-memory-accept", daemon=True)
            thread.start()
            self._accepting.append(thread)
        threading.Thread(target=self._watch_idleness, name="peer-memory-watch", daemon=True).start()
        return address

    def _listen(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        try:
            return socket.create_server((self._host, self._port), family=family, backlog=_BACKLOG)
        except OSError as error:
            if not self._port or error.errno != errno.EADDRINUSE:
                raise
        return socket.create_server((self._host, 0), family=family, backlog=_BACKLOG)

    def close(self) -> None:
        """Stop listening, close all connections and drop all files."""
        self._closed.set()
        for listener in self._listeners:
            # close() does not wake the thread in accept(), and the address stays in use until that thread returns.
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        for thread in self._accepting:
            thread.join(1.0)
        with self._lock:
            connections = tuple(self._connections)
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self.files.clear()

    def _accept(self, listener: socket.socket) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = listener.accept()
            except OSError:
                if self._closed.wait(0.1):
                    return
                continue
            thread = threading.Thread(target=self._serve, args=(connection,), name="peer-memory-serve", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                # The thread limit is reached; an uncaught error would stop the agent from accepting connections.
                connection.close()
                self._closed.wait(0.1)

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            if not self._gate.admits(connection):
                return
            connection.settimeout(None)
            if connection.family != socket.AF_UNIX:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                _keep_alive(connection)
            with self._counted(connection), _Requests(self.files, self._token, connection) as requests:
                while requests.answer_one():
                    pass

    @contextmanager
    def _counted(self, connection: socket.socket) -> Iterator[None]:
        with self._lock:
            if self._closed.is_set():
                # close() has listed the connections without this one.
                raise ConnectionAbortedError
            self._connections.add(connection)
        try:
            yield
        finally:
            with self._lock:
                self._connections.discard(connection)
                self._alone_since = self._clock.monotonic()

    def _watch_idleness(self) -> None:
        while not self._closed.wait(_LOOKS_S):
            with self._lock:
                is_over = not self._connections and self._clock.monotonic() - self._alone_since > self._idle_limit_s
            if is_over:
                _log.info(
                    "no process connected for %.0f s: releasing this run's peer memory on this node", self._idle_limit_s
                )
                self.close()
                self._on_end()


class _Requests:
    """Request handler for one connection."""

    def __init__(self, files: MemoryFiles, token: str, connection: socket.socket) -> None:
        self._files, self._token, self._connection = files, token, connection
        self._upload: MemoryFile | None = None
        # Clients are closed with this connection, because an open connection would keep the other agent from exiting.
        self._partners: dict[str, AgentClient] = {}

    def __enter__(self) -> _Requests:
        return self

    def __exit__(self, *_: object) -> None:
        self._release()
        for client in self._partners.values():
            client.close()

    def answer_one(self) -> bool:
        """Receive a request and answer it; return False if the client has closed the connection."""
        head = receive_head(self._connection)
        if head is None:
            return False
        fields, payload_bytes = head
        answers: dict[str, Callable[..., None]] = {
            "sizes": self._sizes, "read": self._read, "delete": self._delete, "append": self._append,
            "copy": self._copy,
        }  # fmt: skip
        try:
            answers[str(fields.pop("op", None))](payload_bytes, **fields)
        except ConnectionError:
            raise
        except AlreadyExistsError as error:
            self._release()
            send_frame(self._connection, {"exists": str(error)})
        except OSError as error:
            self._release()
            number = error.errno if error.errno is not None else errno.EIO
            send_frame(self._connection, {"errno": number, "text": error.strerror or str(error)})
        except (KeyError, TypeError, ValueError) as error:
            raise FrameError(f"invalid request ({error})") from error
        return True

    def _sizes(self, _: int, *, prefix: str) -> None:
        send_frame(self._connection, {"sizes": self._files.sizes(prefix)})

    def _read(self, _: int, *, key: str, offset: int, num_bytes: int) -> None:
        with self._files.reading(key) as file:
            num_bytes = max(min(num_bytes, file.size - offset), 0)
            send_head(self._connection, {}, num_bytes)
            try:
                for pages, start, count in file.ranges(offset, offset + num_bytes):
                    send_file(self._connection, pages.fileno(), start, count)
            except OSError as error:
                raise FrameError("the payload was only sent in part") from error

    def _delete(self, _: int, *, prefix: str) -> None:
        self._files.delete(prefix)
        send_frame(self._connection, {})

    def _append(
        self,
        payload_bytes: int,
        *,
        checksum: int,
        begin: Mapping[str, Any] | None = None,
        lent: Mapping[str, Any] | None = None,
        keep: Mapping[str, Any] | None = None,
    ) -> None:
        """Append chunks to the upload: first the chunks in lent memory, then the request's payload.

        The first request of an upload has `begin`, and the last request has `keep`, which gives the file its name.
        """
        if payload_bytes > CHUNK_BYTES or (begin is None and self._upload is None):
            raise FrameError("a chunk is too large or does not belong to an upload")
        unread = payload_bytes + (1 if lent is not None else 0)
        try:
            if begin is not None:
                self._release()
                self._upload = self._files.begin(is_large=bool(begin["is_large"]))
            upload = self._upload
            assert upload is not None
            if lent is not None:
                pages = upload.borrow(self._receive_lent(lent["num_bytes"]))
                unread = payload_bytes
                for offset, num_bytes, content_sum in lent["chunks"]:
                    upload.take(pages, offset, num_bytes, content_sum)
            room = upload.room(payload_bytes) if payload_bytes else None
        except ConnectionError:
            raise
        except OSError:
            discard(self._connection, unread)
            raise
        if room is not None:
            with room:
                receive_into(self._connection, room)
                upload.accept(room, checksum)
        reply = {}
        if keep is not None:
            reply = {"size": self._files.keep(keep["key"], upload, replace=bool(keep["replace"]))}
            self._release()
        send_frame(self._connection, reply)

    def _receive_lent(self, num_bytes: int) -> LentPages:
        _, descriptors, *_ = socket.recv_fds(self._connection, 1, 1)
        if len(descriptors) != 1:
            raise FrameError("a request that lends memory has no file descriptor")
        try:
            os.set_inheritable(descriptors[0], False)
            check_lent(descriptors[0], num_bytes)
        except (OSError, TypeError, ValueError) as error:
            os.close(descriptors[0])
            raise FrameError(f"the request's descriptor does not refer to memory that can be lent ({error})") from error
        return LentPages(descriptors[0], num_bytes)

    def _copy(self, _: int, *, key: str, to: str) -> None:
        """Copy a file to the agent at address `to`, and report progress to the client."""
        client = self._partners.get(to)
        if client is None:
            client = self._partners[to] = AgentClient(to, self._token, progress_s=PARTNER_S)
        client.drop_ended()
        with self._files.reading(key) as file:
            for sent in _send_copy(client, key, file):
                send_frame(self._connection, {"sent": sent})
            send_frame(self._connection, {"size": file.size})

    def _release(self) -> None:
        if self._upload is not None:
            self._files.release(self._upload)
            self._upload = None


def _send_copy(client: AgentClient, key: str, file: MemoryFile) -> Iterator[int]:
    """Copy a file to another agent, and yield the number of bytes sent so far after each chunk.

    Chunks are sent with the checksums that the original writer computed.
    """
    with client.uploading(key, replace=True, is_large=file.size >= SMALL_BYTES) as upload:
        sent = 0
        for chunk in file.chunks or (Chunk(pages=file.pages, offset=0, num_bytes=0, checksum=0),):
            sent += chunk.num_bytes
            upload.append_from(chunk, is_last=sent == file.size)
            yield sent


def _listen_locally(address: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(local_address(address))
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _keep_alive(connection: socket.socket) -> None:
    """Make the kernel close the connection if the peer's node disappears, so that the agent can become idle."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 20)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    # Keepalive is inactive while data is unacknowledged: the kernel would retransmit the data for about 15 minutes.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MS)
