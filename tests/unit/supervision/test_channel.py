"""Messages between the coordinator and the supervisors arrive whole."""

from __future__ import annotations

import socket

import pytest

from ray_ulysses.supervision.supervisor import Channel, encode, listen


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


def test_a_closed_connection_is_an_error(ends: tuple[Channel, socket.socket]) -> None:
    channel, other = ends
    other.close()
    with pytest.raises(ConnectionError, match="closed by the other side"):
        channel.receive()
    with pytest.raises(OSError):
        channel.send({})
    channel.close()


@pytest.mark.parametrize(("host", "bound"), [("127.0.0.1", "127.0.0.1"), ("203.0.113.77", "0.0.0.0")])
def test_only_the_address_that_others_connect_to_is_listened_at(host: str, bound: str) -> None:
    """An address that is translated on the way to this machine belongs to no interface."""
    with listen(host) as listener:
        assert listener.getsockname()[0] == bound
