"""Carries messages between the coordinator and the supervisors: one JSON object per line over TCP."""

from __future__ import annotations

import errno
import json
import socket
from dataclasses import dataclass, field
from typing import Any

BACKLOG = 1024
"""Most connections that wait to be accepted: all supervisors of a group may connect at once."""
_SEND_TIMEOUT_S = 5.0
"""Longest wait for the other side to take a message, in seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Announcement:
    """How a supervisor reaches its coordinator."""

    host: str
    port: int
    token: str = field(repr=False)
    """Secret that both know, and never send."""
    group: int
    """Number of the worker group."""


def listen(host: str) -> socket.socket:
    """Listen at this node's address, at a free port; at all addresses if it is an address that others translate."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, 0), family=family, backlog=BACKLOG)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
    return socket.create_server(("", 0), family=family, backlog=BACKLOG)


def encode(message: dict[str, Any]) -> bytes:
    """Return a message as it is sent."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


class Channel:
    """One side of a connection, read without waiting."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket, self._received = connection, b""
        # A cut cable must not stop whoever sends.
        connection.settimeout(_SEND_TIMEOUT_S)

    def fileno(self) -> int:
        """Return the socket's descriptor, for a selector."""
        return self._socket.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """Send a message.

        Raises:
            OSError: The connection is closed, or the other side takes nothing.
        """
        self._socket.sendall(encode(message))

    def receive(self) -> list[dict[str, Any]]:
        """Return the messages that have arrived; call it when the descriptor is readable.

        Raises:
            OSError: The connection is closed, or has failed.
        """
        content = self._socket.recv(1 << 16)
        if not content:
            raise ConnectionError("the connection was closed by the other side")
        *lines, self._received = (self._received + content).split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()
