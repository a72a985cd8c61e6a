"""Frames of the requests to a peer memory agent and of its replies: a JSON object, then bytes."""

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
"""Number of the form of requests; raised with every change, since agents outlive a driver and its version."""
CHUNK_BYTES = 16 * 2**20
"""Most bytes of a file per request."""
_HEAD = struct.Struct("!IQ")


class FrameError(ConnectionError):
    """The other side sent something other than a frame."""


def send_frame(connection: socket.socket, fields: Mapping[str, Any], payload: Buffer = b"") -> None:
    """Send a frame whole.

    Raises:
        OSError: The other side is gone, or takes nothing within the socket's timeout.
    """
    send_head(connection, fields, memoryview(payload).nbytes)
    if payload:
        connection.sendall(payload)


def send_head(connection: socket.socket, fields: Mapping[str, Any], payload_bytes: int) -> None:
    """Send a frame up to its payload, which the caller sends."""
    text = json.dumps(fields).encode()
    connection.sendall(_HEAD.pack(len(text), payload_bytes) + text)


def send_file(connection: socket.socket, descriptor: int, offset: int, num_bytes: int) -> None:
    """Send a range of a file as a payload; the kernel copies it.

    Raises:
        OSError: The other side is gone, or takes nothing within the socket's timeout.
    """
    # `socket.sendfile` goes on to read from the file where the connection breaks, which hides the break.
    while num_bytes > 0:
        try:
            sent = os.sendfile(connection.fileno(), descriptor, offset, num_bytes)
        except BlockingIOError:
            _wait_until_writable(connection)
            continue
        if not sent:
            raise FrameError("the file is shorter than it was said to be")
        offset, num_bytes = offset + sent, num_bytes - sent


def _wait_until_writable(connection: socket.socket) -> None:
    timeout_s = connection.gettimeout()
    poll = select.poll()
    poll.register(connection, select.POLLOUT)
    if not poll.poll(None if timeout_s is None else 1000 * timeout_s):
        raise TimeoutError("timed out")


def receive_head(connection: socket.socket) -> tuple[dict[str, Any], int] | None:
    """Receive a frame up to its payload, and return its fields and the payload's size; None at a clean end.

    Raises:
        OSError: The other side is gone, or sends nothing within the socket's timeout.
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
    """Fill a buffer.

    Raises:
        OSError: The other side ended before it was full, or sends nothing within the socket's timeout.
    """
    filled = 0
    while filled < len(target):
        count = connection.recv_into(target[filled:])
        if not count:
            raise FrameError("the connection ended within a frame")
        filled += count


def discard(connection: socket.socket, num_bytes: int) -> None:
    """Receive bytes and drop them, so that the next frame can be received."""
    scratch = memoryview(bytearray(min(num_bytes, 2**20)))
    while num_bytes > 0:
        part = scratch[: min(num_bytes, len(scratch))]
        receive_into(connection, part)
        num_bytes -= len(part)


def has_ended(connection: socket.socket) -> bool:
    """Return whether the other end has closed a connection on which nothing is awaited."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(0))


def peer_user(connection: socket.socket) -> int:
    """Return the id of the user at the other end of a Unix socket."""
    credentials = struct.Struct("3i")
    user: int = credentials.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size))[1]
    return user


def local_address(address: str) -> str:
    """Return the address of the same agent for processes of its node: a Unix socket, which takes descriptors too."""
    return f"\0ray-ulysses-peer_memory/{address}"


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of ``host:port``; an IPv6 host may be in brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
