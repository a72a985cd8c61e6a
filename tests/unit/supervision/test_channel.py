"""Messages between the coordinator and the supervisors arrive whole, and nothing else is taken for one."""

from __future__ import annotations

import socket

import pytest

from ray_ulysses.supervision.channel import MOST_BYTES, Channel, ChannelClosedError, encode


@pytest.fixture
def ends() -> tuple[Channel, socket.socket]:
    one, other = socket.socketpair()
    return Channel(one), other


def test_messages_arrive_whole_however_they_are_split(ends: tuple[Channel, socket.socket]) -> None:
    channel, other = ends
    content = encode({"do": "beat"}) + encode({"do": "start", "rank": 3})
    other.sendall(content[:5])
    assert channel.receive() == []
    other.sendall(content[5:-1])
    assert channel.receive() == [{"do": "beat"}]
    other.sendall(content[-1:])
    assert channel.receive() == [{"do": "start", "rank": 3}]
    channel.send({"type": "beat"})
    assert other.recv(100) == b'{"type":"beat"}\n'


def test_a_closed_connection_and_an_endless_line_are_errors(ends: tuple[Channel, socket.socket]) -> None:
    channel, other = ends
    channel._received = b"x" * MOST_BYTES
    other.sendall(b"xx")
    with pytest.raises(ChannelClosedError, match="what is not a message"):
        channel.receive()
    other.close()
    with pytest.raises(ChannelClosedError, match="closed by the other side"):
        channel.receive()
    with pytest.raises(OSError):
        channel.send({})
    channel.close()
