"""Mutual authentication of connections between a run's processes, by a token that is never sent.

The side that connects sends a random nonce. The side that listens answers with a nonce of its own and a proof that it
knows the token, and gets a proof back: HMAC-SHA256 with the token as the key, over the prover's role and both nonces.
Nonces and proofs have a fixed size, and nothing else is read before. What follows is neither encrypted nor signed.
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
"""Longest handshake, in seconds, however many bytes arrive meanwhile."""
MOST_PENDING = 1024
"""Most connections in a handshake; a new one then ends the oldest. A whole cluster may connect at once.

It is less where the process may open few descriptors: most of them stay free for the run.
"""
_LOG_EVERY_S = 60.0
_CONNECTS, _LISTENS, _SEALS = b"ray-ulysses connects", b"ray-ulysses listens", b"ray-ulysses seals"
_log = get_logger(__name__)


def authenticate(connection: socket.socket, token: str, timeout_s: float = HANDSHAKE_S) -> None:
    """Prove to the listening side of a new connection that the token is known, and make sure that it knows it too.

    Raises:
        PermissionError: The listening side does not know the token.
        OSError: It is gone, or does not answer in time.
    """
    deadline = time.monotonic() + timeout_s
    nonce = secrets.token_bytes(NONCE_BYTES)
    connection.settimeout(timeout_s)
    connection.sendall(nonce)
    answer = _receive(connection, NONCE_BYTES + PROOF_BYTES, deadline)
    nonces = nonce + answer[:NONCE_BYTES]
    if not hmac.compare_digest(answer[NONCE_BYTES:], _proof(token, _LISTENS, nonces)):
        raise PermissionError(errno.EACCES, "it does not know this run's token")
    connection.sendall(_proof(token, _CONNECTS, nonces))


class Gate:
    """The listening side: admits the connections whose other side knows the token. Any thread may call.

    Handshakes are bounded in number and time, and so is the logging of failed ones.

    Args:
        token: The secret that both sides know.
        clock: Time.
    """

    def __init__(self, token: str, clock: Clock | None = None) -> None:
        self._token, self._clock = token, clock or SystemClock()
        self._lock = threading.Lock()
        self._most_pending = min(MOST_PENDING, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        self._pending: dict[object, Callable[[], object]] = {}
        self._num_refused = 0
        self._logged_at: float | None = None

    def admits(self, connection: socket.socket) -> bool:
        """Return whether the other side of an accepted connection knows the token; the caller closes it if not."""
        deadline = time.monotonic() + HANDSHAKE_S
        with self._handshake(lambda: connection.shutdown(socket.SHUT_RDWR)):
            answer, expected = self._challenge(_receive(connection, NONCE_BYTES, deadline))
            connection.sendall(answer)
            if hmac.compare_digest(_receive(connection, PROOF_BYTES, deadline), expected):
                return True
        self._refused()
        return False

    async def admits_stream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Like `admits`, for a connection of an event loop."""
        with self._handshake(writer.transport.abort):
            async with asyncio.timeout(HANDSHAKE_S):
                answer, expected = self._challenge(await reader.readexactly(NONCE_BYTES))
                writer.write(answer)
                if hmac.compare_digest(await reader.readexactly(PROOF_BYTES), expected):
                    return True
        self._refused()
        return False

    def _challenge(self, nonce: bytes) -> tuple[bytes, bytes]:
        """Return the answer to the nonce of the connecting side, and the proof that it has to give."""
        own = secrets.token_bytes(NONCE_BYTES)
        return own + _proof(self._token, _LISTENS, nonce + own), _proof(self._token, _CONNECTS, nonce + own)

    @contextmanager
    def _handshake(self, end: Callable[[], object]) -> Iterator[None]:
        """Count a handshake as pending, ending the oldest if there are too many; suppress its error if it fails."""
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
        """Log the first connection that was refused, and then a count at most once a minute."""
        now = self._clock.monotonic()
        with self._lock:
            self._num_refused += 1
            if self._logged_at is not None and now - self._logged_at < _LOG_EVERY_S:
                return
            count, self._num_refused, self._logged_at = self._num_refused, 0, now
        _log.warning("refused %d connections whose other side did not prove that it knows this run's token", count)


def seal(token: str, secret: str) -> str:
    """Return a secret of at most 32 bytes in a form that only holders of the token can read."""
    nonce, content = secrets.token_bytes(NONCE_BYTES), secret.encode()
    return (nonce + _masked(token, nonce, content)).hex()


def unseal(token: str, sealed: str) -> str:
    """Return the secret that `seal` was given."""
    content = bytes.fromhex(sealed)
    return _masked(token, content[:NONCE_BYTES], content[NONCE_BYTES:]).decode()


def _masked(token: str, nonce: bytes, content: bytes) -> bytes:
    assert len(content) <= PROOF_BYTES
    return bytes(one ^ other for one, other in zip(content, _proof(token, _SEALS, nonce), strict=False))


def _proof(token: str, role: bytes, nonces: bytes) -> bytes:
    return hmac.digest(token.encode(), role + nonces, "sha256")


def _receive(connection: socket.socket, num_bytes: int, deadline: float) -> bytes:
    """Receive exactly ``num_bytes`` until a deadline of the monotonic clock."""
    received = b""
    while len(received) < num_bytes:
        connection.settimeout(max(deadline - time.monotonic(), 1e-3))
        part = connection.recv(num_bytes - len(received))
        if not part:
            raise ConnectionResetError(errno.ECONNRESET, "the connection ended within the handshake")
        received += part
    return received
