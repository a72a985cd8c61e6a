"""Wire format of peer memory requests and replies: frames that contain a JSON object and a binary payload."""

from __future__ import annotations

import json
import os
import select
import socket
import struct
from collections.abc import Mapping
from typing import Any

from ray_ulysses.storage import Buffer

PROTOCOL = 5
"""Protocol version. Increment it with every change, because a new driver may find agents of an older version."""
CHUNK_BYTES = 16 * 2**20
"""Maximum size of a chunk in bytes."""
_HEAD = struct.Struct("!IQ")


class FrameError(ConnectionError):
    """The peer sent an invalid frame, or closed the connection within a frame."""


def send_frame(connection: socket.socket, fields: Mapping[str, Any], payload: Buffer = b"") -> None:
    """Send a frame with its payload.

    Raises:
        OSError: The connection is broken, or the peer receives nothing within the socket's timeout.
    """
    send_head(connection, fields, memoryview(payload).nbytes)
    if payload:
        connection.sendall(payload)


def send_head(connection: socket.socket, fields: Mapping[str, Any], payload_bytes: int) -> None:
    """Send a frame without its payload, which the caller must send next."""
    text = json.dumps(fields).encode()
    connection.sendall(_HEAD.pack(len(text), payload_bytes) + text)


def send_file(connection: socket.socket, descriptor: int, offset: int, num_bytes: int) -> None:
    """Send a range of a file as a payload, without copying it through user space.

    Raises:
        OSError: The connection is broken, or the peer receives nothing within the socket's timeout.
    """
    # If the connection breaks, `socket.sendfile` falls back to reading the file, which hides the error.
    while num_bytes > 0:
        try:
            sent = os.sendfile(connection.fileno(), descriptor, offset, num_bytes)
        except BlockingIOError:
            _wait_until_writable(connection)
            continue
        if not sent:
            raise FrameError("the file is shorter than expected")
        offset, num_bytes = offset + sent, num_bytes - sent


def _wait_until_writable(connection: socket.socket) -> None:
    timeout_s = connection.gettimeout()
    poll = select.poll()
    poll.register(connection, select.POLLOUT)
    if not poll.poll(None if timeout_s is None else 1000 * timeout_s):
        raise TimeoutError("timed out")


def receive_head(connection: socket.socket) -> tuple[dict[str, Any], int] | None:
    """Receive a frame's fields and payload size, or return None if the peer closed the connection between frames.

    Raises:
        OSError: The connection is broken, or the peer sends nothing within the socket's timeout.
    """
    first = connection.recv(1)
    if not first:
        return None
    head = bytearray(_HEAD.size)
    head[:1] = first
    receive_into(connection, memoryview(head)[1:])
    text_bytes, payload_bytes = _HEAD.unpack(head)
    text = bytearray(text_bytes)
    receive_into(connection, memoryview(text))
    return json.loads(text), payload_bytes


def receive_into(connection: socket.socket, target: memoryview) -> None:
    """Receive bytes until `target` is full.

    Raises:
        OSError: The connection is broken, or the peer sends nothing within the socket's timeout.
    """
    filled = 0
    while filled < len(target):
        count = connection.recv_into(target[filled:])
        if not count:
            raise FrameError("the connection was closed within a frame")
        filled += count


def discard(connection: socket.socket, num_bytes: int) -> None:
    """Receive and drop `num_bytes` bytes, so that the next frame can be received."""
    scratch = memoryview(bytearray(min(num_bytes, 2**20)))
    while num_bytes > 0:
        part = scratch[: min(num_bytes, len(scratch))]
        receive_into(connection, part)
        num_bytes -= len(part)


def has_ended(connection: socket.socket) -> bool:
    """Return whether the peer has closed an idle connection; received data also counts, because none is expected."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(0))


def peer_user(connection: socket.socket) -> int:
    """Return the user ID of the process at the other end of a Unix socket."""
    credentials = struct.Struct("3i")
    return int(credentials.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size))[1])


def local_address(address: str) -> str:
    """Return the abstract Unix socket address of an agent, to which processes on its node can send descriptors."""
    return f"\0ray-ulysses-peer_memory/{address}"


def split_address(address: str) -> tuple[str, int]:
    """Split ``host:port`` into host and port; an IPv6 host may be in brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
