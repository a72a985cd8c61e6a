from __future__ import annotations

import contextlib
import logging
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ray_ulysses.peer_memory import PeerMemoryAgent, authentication
from ray_ulysses.peer_memory.authentication import NONCE_BYTES, PROOF_BYTES, Gate, authenticate, seal, unseal
from ray_ulysses.peer_memory.client import AgentClient
from ray_ulysses.peer_memory.wire import split_address
from tests.polling import wait_until
from tests.unit.peer_memory.test_agent import SetClock
from tests.wire_recorder import Recorder, replay

TOKEN = "0123456789abcdef"


@contextmanager
def _pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


@contextmanager
def running_agent(token: str = TOKEN) -> Iterator[tuple[PeerMemoryAgent, tuple[str, int]]]:
    agent = PeerMemoryAgent(token)
    try:
        yield agent, split_address(agent.start())
    finally:
        agent.close()


def test_requests_that_were_recorded_on_the_wire_are_refused_when_they_are_sent_again() -> None:
    with running_agent() as (agent, address):
        recorder = Recorder(address)
        client = AgentClient(f"127.0.0.1:{recorder.address[1]}", TOKEN)
        client.put("key", [b"state"], replace=False)
        client.delete("key")
        client.close()
        client = AgentClient(f"127.0.0.1:{address[1]}", TOKEN)
        client.put("key", [b"newer state"], replace=False)
        assert len(replay(address, bytes(recorder.sent))) in (0, NONCE_BYTES + PROOF_BYTES)
        assert client.sizes("key") == agent.files.sizes("key") == {"key": 11}
        assert TOKEN.encode() not in recorder.sent + recorder.answered
        client.close()


def test_a_listener_gets_no_proof_that_it_can_use_elsewhere() -> None:
    with running_agent() as (_, address):
        recorder = Recorder(address)
        AgentClient(f"127.0.0.1:{recorder.address[1]}", TOKEN).greet()
        wait_until(lambda: len(recorder.answered) == NONCE_BYTES + PROOF_BYTES, "the agent has answered")
    for answer in (bytes(recorder.answered), b"\0" * (NONCE_BYTES + PROOF_BYTES)):
        with _pair() as (one, other):
            other.sendall(answer)
            with pytest.raises(PermissionError, match="token"):
                authenticate(one, TOKEN)
            assert len(other.recv(1000)) == NONCE_BYTES


def test_a_peer_that_sends_byte_after_byte_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authentication, "HANDSHAKE_S", 0.2)
    with running_agent() as (_, address), socket.create_connection(address) as slow:
        slow.settimeout(0.05)
        for _ in range(NONCE_BYTES - 1):
            # The agent may close before it has read the last byte.
            with contextlib.suppress(TimeoutError, ConnectionResetError, BrokenPipeError):
                slow.sendall(b"\0")
                if slow.recv(1) == b"":
                    return
    raise AssertionError("each byte has won more time")


@pytest.mark.parametrize("limit", ["connections", "descriptors"])
def test_silent_peers_make_room_for_new_ones(monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    if limit == "connections":
        monkeypatch.setattr(authentication, "MOST_PENDING", 4)
    else:
        monkeypatch.setattr(resource, "getrlimit", lambda _: (16, 16))
    with running_agent() as (_, address), contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(address, timeout=20.0)) for _ in range(10)]
        for one in silent[:6]:
            assert one.recv(1) == b""
        client = AgentClient(f"127.0.0.1:{address[1]}", TOKEN)
        assert client.sizes("") == {}
        client.close()
        silent[-1].setblocking(False)
        with pytest.raises(BlockingIOError):
            silent[-1].recv(1)


def test_wrong_tokens_are_logged_once_and_then_counted_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    clock = SetClock()
    gate = Gate(TOKEN, clock)
    with caplog.at_level(logging.INFO, logger="ray_ulysses"):
        for clock.time in (0.0, 1.0, 59.0, 61.0, 62.0):
            with _pair() as (one, other):
                one.sendall(b"GET / HTTP/1.1\r\n" * 4)
                assert not gate.admits(other)
    assert [record.args for record in caplog.records] == [(1,), (3,)]


def test_a_sealed_secret_is_read_with_the_token_alone() -> None:
    sealed = seal(TOKEN, "f" * 32)
    assert unseal(TOKEN, sealed) == "f" * 32
    assert seal(TOKEN, "f" * 32) != sealed
    assert (b"f" * 32).hex() not in sealed and "f" * 32 not in sealed


def test_silent_peers_leave_descriptors_for_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may have 1,024 open by default, and an agent needs some for each file that it keeps."""
    monkeypatch.setattr(authentication, "HANDSHAKE_S", 60.0)
    silent = (
        "import socket, sys\n"
        "held = [socket.create_connection((sys.argv[1], int(sys.argv[2]))) for _ in range(int(sys.argv[3]))]\n"
        "print(flush=True)\n"
        "sys.stdin.read()"
    )
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 2 * (max(map(int, os.listdir("/proc/self/fd"))) + 32)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, limits[1]))
    try:
        with running_agent() as (_, (host, port)), subprocess.Popen(
            [sys.executable, "-S", "-c", silent, host, str(port), str(most - 8)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        ) as stranger:  # fmt: skip
            assert stranger.stdout is not None and stranger.stdout.readline()
            client = AgentClient(f"{host}:{port}", TOKEN)
            for key in "abcdefgh":
                client.put(key, [b"state"], replace=False)
            client.close()
            stranger.kill()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
