"""Mutual authentication between a run's processes, based on a shared token that is never sent.

The client sends a random nonce. The server answers with its own nonce and a proof that it knows the token, and the
client replies with its own proof. A proof is an HMAC-SHA256 over the sender's role and both nonces, with the token as
the key. Nonces and proofs have a fixed size, and nothing else is read before the handshake succeeds. The data that
follows is neither encrypted nor signed.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import resource
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ray_ulysses.clock import Clock, SystemClock
from ray_ulysses.logging import get_logger

NONCE_BYTES = PROOF_BYTES = 32
HANDSHAKE_S = 10.0
"""Maximum duration of a handshake in seconds, even if data keeps arriving."""
MOST_PENDING = 1024
"""Maximum number of pending handshakes, large enough for a complete cluster to connect at once. Beyond this number, a
new connection aborts the oldest handshake. If a quarter of the limit on open files is lower, that number applies."""
_LOG_EVERY_S = 60.0
_CONNECTS, _LISTENS, _SEALS = b"ray-ulysses connects", b"ray-ulysses listens", b"ray-ulysses seals"
_log = get_logger(__name__)


def authenticate(connection: socket.socket, token: str, timeout_s: float = HANDSHAKE_S) -> None:
    """Authenticate a new connection as the client: verify the server's proof of the token, and send a proof.

    Raises:
        PermissionError: The server does not know the token.
        OSError: The connection was closed, or the server did not respond in time.
    """
    deadline = time.monotonic() + timeout_s
    nonce = secrets.token_bytes(NONCE_BYTES)
    connection.settimeout(timeout_s)
    connection.sendall(nonce)
    answer = _receive(connection, NONCE_BYTES + PROOF_BYTES, deadline)
    nonces = nonce + answer[:NONCE_BYTES]
    if not hmac.compare_digest(answer[NONCE_BYTES:], _proof(token, _LISTENS, nonces)):
        raise PermissionError(errno.EACCES, "the server does not know this run's token")
    connection.sendall(_proof(token, _CONNECTS, nonces))


class Gate:
    """The server's side of the handshake, which admits clients that know the token; thread-safe.

    The number and duration of pending handshakes are limited, and so is the rate of log lines about refused clients.
    """

    def __init__(self, token: str, clock: Clock | None = None) -> None:
        self._token, self._clock = token, clock or SystemClock()
        self._lock = threading.Lock()
        self._most_pending = min(MOST_PENDING, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        self._pending: dict[object, Callable[[], object]] = {}
        self._num_refused = 0
        self._logged_at: float | None = None

    def admits(self, connection: socket.socket) -> bool:
        """Return whether a connection's client knows the token; if not, the caller must close the connection."""
        deadline = time.monotonic() + HANDSHAKE_S
        with self._handshake(lambda: connection.shutdown(socket.SHUT_RDWR)):
            answer, expected = self._challenge(_receive(connection, NONCE_BYTES, deadline))
            connection.sendall(answer)
            if hmac.compare_digest(_receive(connection, PROOF_BYTES, deadline), expected):
                return True
        self._refused()
        return False

    async def admits_stream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Return whether the client of an asyncio connection knows the token; see `admits`."""
        with self._handshake(writer.transport.abort):
            async with asyncio.timeout(HANDSHAKE_S):
                answer, expected = self._challenge(await reader.readexactly(NONCE_BYTES))
                writer.write(answer)
                if hmac.compare_digest(await reader.readexactly(PROOF_BYTES), expected):
                    return True
        self._refused()
        return False

    def _challenge(self, nonce: bytes) -> tuple[bytes, bytes]:
        """Return the server's answer to the client's nonce, and the proof that the client must send."""
        own = secrets.token_bytes(NONCE_BYTES)
        return own + _proof(self._token, _LISTENS, nonce + own), _proof(self._token, _CONNECTS, nonce + own)

    @contextmanager
    def _handshake(self, end: Callable[[], object]) -> Iterator[None]:
        """Register a pending handshake, which `end` can abort, and suppress the handshake's connection errors."""
        key, oldest = object(), None
        with self._lock:
            self._pending[key] = end
            if len(self._pending) > self._most_pending:
                oldest = self._pending.pop(next(iter(self._pending)))
        with contextlib.suppress(OSError, EOFError):
            if oldest is not None:
                oldest()
        try:
            with contextlib.suppress(OSError, EOFError):
                yield
        finally:
            with self._lock:
                self._pending.pop(key, None)

    def _refused(self) -> None:
        """Log the first refused connection immediately, and then the number of refused connections once a minute."""
        now = self._clock.monotonic()
        with self._lock:
            self._num_refused += 1
            if self._logged_at is not None and now - self._logged_at < _LOG_EVERY_S:
                return
            count, self._num_refused, self._logged_at = self._num_refused, 0, now
        _log.warning("refused %d connections from clients that did not prove that they know this run's token", count)


def seal(token: str, secret: str) -> str:
    """Encrypt a secret of at most 32 bytes so that `unseal` can decrypt it with the same token."""
    nonce, content = secrets.token_bytes(NONCE_BYTES), secret.encode()
    return (nonce + _masked(token, nonce, content)).hex()


def unseal(token: str, sealed: str) -> str:
    """Decrypt a secret that `seal` encrypted with the same token."""
    content = bytes.fromhex(sealed)
    return _masked(token, content[:NONCE_BYTES], content[NONCE_BYTES:]).decode()


def _masked(token: str, nonce: bytes, content: bytes) -> bytes:
    assert len(content) <= PROOF_BYTES
    return bytes(one ^ other for one, other in zip(content, _proof(token, _SEALS, nonce), strict=False))


def _proof(token: str, role: bytes, nonces: bytes) -> bytes:
    return hmac.digest(token.encode(), role + nonces, "sha256")


def _receive(connection: socket.socket, num_bytes: int, deadline: float) -> bytes:
    """Receive exactly `num_bytes` bytes before `deadline`, a monotonic time in seconds."""
    received = b""
    while len(received) < num_bytes:
        connection.settimeout(max(deadline - time.monotonic(), 1e-3))
        part = connection.recv(num_bytes - len(received))
        if not part:
            raise ConnectionResetError(errno.ECONNRESET, "the connection was closed during the handshake")
        received += part
    return received
