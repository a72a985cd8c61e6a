"""Records what a connection carries, as somebody who reads the network does, and sends it again."""

from __future__ import annotations

import contextlib
import socket
import threading


class Recorder:
    """Forwards one connection to a listener, and keeps what is sent in both directions."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()
        self.sent, self.answered = bytearray(), bytearray()
        self._target = target
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        one, _ = self._listener.accept()
        other = socket.create_connection(self._target)
        back = threading.Thread(target=self._forward, args=(other, one, self.answered), daemon=True)
        back.start()
        self._forward(one, other, self.sent)
        back.join()

    def _forward(self, source: socket.socket, target: socket.socket, record: bytearray) -> None:
        with contextlib.suppress(OSError):
            while part := source.recv(1 << 16):
                record += part
                target.sendall(part)
            target.shutdown(socket.SHUT_WR)


def replay(target: tuple[str, int], content: bytes) -> bytes:
    """Send recorded bytes to a listener, and return its answers."""
    with socket.create_connection(target, timeout=20.0) as connection, contextlib.suppress(OSError):
        connection.sendall(content)
        connection.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))
    return b""
