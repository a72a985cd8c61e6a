from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ray_ulysses.checkpoint.checksums import checksum
from ray_ulysses.peer_memory import PeerMemoryAgent, authentication
from ray_ulysses.peer_memory.authentication import NONCE_BYTES, PROOF_BYTES, Gate, authenticate, seal, unseal
from ray_ulysses.peer_memory.client import AgentClient, AgentGoneError
from ray_ulysses.peer_memory.wire import receive_head, send_frame, split_address
from tests.polling import wait_until
from tests.unit.peer_memory.conftest import TOKEN
from tests.wire_recorder import Recorder, replay

MIB = 2**20


class SetClock:
    """A clock that only a test advances."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def monotonic(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds


@contextmanager
def running(**settings: object) -> Iterator[tuple[PeerMemoryAgent, AgentClient]]:
    agent = PeerMemoryAgent(TOKEN, **settings)  # type: ignore[arg-type]
    client = AgentClient(agent.start(), TOKEN, progress_s=20.0)
    try:
        yield agent, client
    finally:
        client.close()
        agent.close()


def connected(agent_address: str) -> socket.socket:
    return socket.create_connection(split_address(agent_address), timeout=10)


def num_memfds() -> int:
    """Return the number of this process's memfds; a mapped memfd has two descriptors."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            if "ray-ulysses-peer-memory" in os.readlink(f"/proc/self/fd/{number}"):
                found.add(os.stat(f"/proc/self/fd/{number}").st_ino)
    return len(found)


def test_neither_a_client_nor_an_agent_without_the_runs_token_is_accepted() -> None:
    # Another run's agent may listen at the port of a dead agent.
    with running() as (agent, client), contextlib.closing(PeerMemoryAgent("another")) as other:
        taken = AgentClient(other.start(), TOKEN)
        with pytest.raises(AgentGoneError, match="token"):
            taken.put("key", [b"secret state"], replace=False)
        client.put("key", [b"secret state"], replace=False)
        for token in ("another", ""):
            with pytest.raises(AgentGoneError, match="token"):
                AgentClient(client.address, token).delete("key")
        assert agent.files.sizes("key") == {"key": 12}
        with pytest.raises(OSError, match="token") as refused:
            client.copy("key", taken.address)
        assert refused.value.errno == errno.EHOSTUNREACH
        assert other.files.sizes("") == {}


def test_bytes_that_are_no_frames_end_their_connection_and_nothing_else() -> None:
    with running() as (_, client):
        client.put("key", [b"state"], replace=False)
        for noise in (b"{}", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 12, b"\xff" * 100):
            with connected(client.address) as raw, contextlib.suppress(ConnectionError):
                raw.sendall(noise)
                # The agent may have ended the connection already (ENOTCONN, which is no ConnectionError).
                with contextlib.suppress(OSError):
                    raw.shutdown(socket.SHUT_WR)
                while raw.recv(1000):
                    pass
        for request in ({}, {"op": "close"}, {"op": "sizes"}, {"op": "read", "key": 3, "offset": 0, "num_bytes": 1}):
            with connected(client.address) as raw:
                authenticate(raw, TOKEN)
                send_frame(raw, request)
                with contextlib.suppress(ConnectionError):
                    reply = receive_head(raw)
                    assert reply is None or "errno" in reply[0]
        assert client.sizes("key") == {"key": 5}


def test_a_connection_for_which_there_is_no_thread_is_not_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with running() as (_, client):
        client.put("key", [b"state"], replace=False)
        start, refused = threading.Thread.start, []

        def without_threads(thread: threading.Thread) -> None:
            if thread.name == "peer-memory-serve" and not refused:
                refused.append(thread)
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", without_threads)
        with connected(client.address) as raw, contextlib.suppress(ConnectionError):
            assert raw.recv(1) == b""
        assert len(refused) == 1
        another = AgentClient(client.address, TOKEN)
        assert another.sizes("key") == {"key": 5}
        another.close()


def test_a_chunk_that_arrived_damaged_is_refused_and_its_memory_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray_ulysses.peer_memory.client.checksum", lambda chunk: checksum(b"sent"))
    with running() as (agent, client):
        with pytest.raises(OSError, match="a chunk was damaged in transit"):
            client.put("key", [b"cent"], replace=False)
        wait_until(lambda: agent.files.num_bytes == 0, "the memory is given back")
        assert client.sizes("key") == {}
        assert client.put("key", [b"sent"], replace=False) == 4


def test_a_file_that_exceeds_the_memory_is_refused_and_what_was_there_stays() -> None:
    with running(limit_bytes=3 * MIB) as (agent, client):
        client.put("first", [b"1" * MIB] * 2, replace=False)
        with pytest.raises(OSError, match=r"elastic\.peer_memory_gib") as full:
            client.put("second", [b"2" * MIB] * 2, replace=False)
        assert full.value.errno == errno.ENOSPC
        wait_until(lambda: agent.files.num_bytes == 2 * MIB, "the memory is given back")
        client.delete("first")
        assert client.put("second", [b"2" * MIB] * 3, replace=False) == 3 * MIB
        # What is replaced is there until its successor is.
        client.delete("second")
        client.put("third", [b"3" * MIB], replace=False)
        assert client.put("third", [b"4" * MIB], replace=True) == MIB
        assert agent.files.num_bytes == MIB


def test_a_writer_that_dies_leaves_neither_a_file_nor_memory() -> None:
    with running() as (agent, client):
        with connected(client.address) as raw:
            authenticate(raw, TOKEN)
            begin = {"is_large": True}
            send_frame(raw, {"op": "append", "begin": begin, "checksum": checksum(b"x" * MIB)}, b"x" * MIB)
            assert receive_head(raw) == ({}, 0)
            assert agent.files.num_bytes == MIB
            raw.sendall(b"half a frame")
        wait_until(lambda: agent.files.num_bytes == 0, "the memory is given back")
        assert client.sizes("") == {}


def test_pages_of_dropped_files_serve_the_next_ones_within_the_limit_and_go_with_the_agent() -> None:
    before = num_memfds()
    with running(limit_bytes=8 * MIB) as (agent, client):
        for number in range(6):
            client.put(str(number), [bytes([number]) * MIB] * 3, replace=False, is_large=True)
            if number:
                client.delete(str(number - 1))
            assert agent.files.num_bytes + agent.files.spare_bytes <= 6 * MIB
            target = bytearray(3 * MIB)
            assert client.read_into(str(number), 0, memoryview(target)) == 3 * MIB
            assert target == bytes([number]) * 3 * MIB
        assert num_memfds() == before + 2
        # A shorter one in longer pages has its own size, and gives back what is much too long.
        client.put("short", [b"s" * MIB, b"end"], replace=False, is_large=True)
        assert client.sizes("short") == {"short": MIB + 3}
        assert agent.files.num_bytes == 4 * MIB + 3 and agent.files.spare_bytes == 0
        # Spare pages never keep a file from being written.
        client.delete("5")
        assert agent.files.spare_bytes == 3 * MIB
        client.put("long", [b"l" * MIB] * 6, replace=False)
        assert agent.files.num_bytes == 7 * MIB + 3 and agent.files.spare_bytes == 0
    assert num_memfds() == before


def test_a_file_that_is_dropped_while_it_is_read_stays_as_it_was_for_its_reader() -> None:
    with running() as (agent, client):
        client.put("old", [b"old" * MIB], replace=False, is_large=True)
        with agent.files.reading("old") as file:
            client.delete("old")
            client.put("new", [b"new" * MIB], replace=False, is_large=True)
            assert bytes(file.pages.view(0, 3 * MIB)) == b"old" * MIB
        assert agent.files.spare_bytes == 3 * MIB


def _is_alone(agent: PeerMemoryAgent) -> bool:
    with agent._lock:
        return not agent._connections


@pytest.mark.parametrize("is_used", [True, False], ids=["left", "never used"])
def test_an_agent_ends_itself_when_nobody_was_connected_for_a_while(is_used: bool) -> None:
    clock, ended = SetClock(), threading.Event()
    with running(idle_limit_s=120.0, clock=clock, on_end=ended.set) as (agent, client):
        if is_used:
            client.put("key", [b"state"], replace=False)
            clock.time = 1000.0
            # The connection is open: a step may take hours. If its node disappears, the kernel ends it in a minute.
            assert not ended.wait(1.5)
            (connection,) = agent._connections
            assert 0 < connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) <= 60_000
            client.close()
            wait_until(lambda: _is_alone(agent), "the connection is closed")
        clock.time += 119.0
        assert not ended.wait(1.5)
        clock.time += 2.0
        assert ended.wait(20)
        assert agent.files.num_bytes == 0
        with pytest.raises(AgentGoneError, match="does not respond"):
            client.sizes("key")


def test_requests_that_were_recorded_on_the_wire_are_refused_when_they_are_sent_again() -> None:
    with running() as (agent, client):
        recorder = Recorder(split_address(client.address))
        recorded = AgentClient(f"127.0.0.1:{recorder.address[1]}", TOKEN)
        recorded.put("key", [b"state"], replace=False)
        recorded.delete("key")
        recorded.close()
        client.put("key", [b"newer state"], replace=False)
        answer = replay(split_address(client.address), bytes(recorder.sent))
        assert len(answer) in (0, NONCE_BYTES + PROOF_BYTES)
        assert client.sizes("key") == agent.files.sizes("key") == {"key": 11}
        assert TOKEN.encode() not in recorder.sent + recorder.answered


def test_a_listener_gets_no_proof_that_it_can_use_elsewhere() -> None:
    with running() as (_, client):
        recorder = Recorder(split_address(client.address))
        AgentClient(f"127.0.0.1:{recorder.address[1]}", TOKEN).greet()
        wait_until(lambda: len(recorder.answered) == NONCE_BYTES + PROOF_BYTES, "the agent has answered")
    for answer in (bytes(recorder.answered), b"\0" * (NONCE_BYTES + PROOF_BYTES)):
        one, other = socket.socketpair()
        with one, other:
            other.sendall(answer)
            with pytest.raises(PermissionError, match="token"):
                authenticate(one, TOKEN)
            assert len(other.recv(1000)) == NONCE_BYTES


def test_a_peer_that_sends_byte_after_byte_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authentication, "HANDSHAKE_S", 0.2)
    with running() as (_, client), connected(client.address) as slow:
        slow.settimeout(0.15)
        for _ in range(NONCE_BYTES - 1):
            try:
                slow.sendall(b"\0")
                assert slow.recv(1) == b""
            except TimeoutError:
                continue
            except ConnectionError:
                # The agent closed before it had read the last byte.
                return
            return
    raise AssertionError("each byte has won more time")


@pytest.mark.parametrize("limit", ["connections", "descriptors"])
def test_silent_peers_make_room_for_new_ones(monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    if limit == "connections":
        monkeypatch.setattr(authentication, "MOST_PENDING", 4)
    else:
        monkeypatch.setattr(resource, "getrlimit", lambda _: (16, 16))
    with running() as (agent, client), contextlib.ExitStack() as stack:
        silent: list[socket.socket] = []
        for number in range(10):
            silent.append(stack.enter_context(connected(client.address)))
            if number < 4:
                wait_until(lambda: len(agent._gate._pending) == len(silent), "the agent waits for its proof")
            else:
                assert silent[number - 4].recv(1) == b""
        assert client.sizes("") == {}
        silent[-1].setblocking(False)
        with pytest.raises(BlockingIOError):
            silent[-1].recv(1)


def test_a_connection_that_proves_its_token_while_the_agent_closes_is_not_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    admits, has_proof, is_closed = Gate.admits, threading.Event(), threading.Event()

    def admits_late(gate: Gate, connection: socket.socket) -> bool:
        admitted = admits(gate, connection)
        has_proof.set()
        assert is_closed.wait(20)
        return admitted

    monkeypatch.setattr(Gate, "admits", admits_late)
    with running() as (agent, client):
        client.greet()
        assert has_proof.wait(20)
        agent.close()
        is_closed.set()
        with pytest.raises(AgentGoneError, match="does not respond"):
            client.sizes("")


def test_wrong_tokens_are_logged_once_and_then_counted_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    clock = SetClock()
    gate = Gate(TOKEN, clock)
    with caplog.at_level(logging.INFO, logger="ray_ulysses"):
        for clock.time in (0.0, 1.0, 59.0, 61.0, 62.0):
            one, other = socket.socketpair()
            with one, other:
                one.sendall(b"GET / HTTP/1.1\r\n" * 4)
                assert not gate.admits(other)
    assert [record.args for record in caplog.records] == [(1,), (3,)]


def test_a_sealed_secret_is_read_with_the_token_alone() -> None:
    sealed = seal(TOKEN, "f" * 32)
    assert unseal(TOKEN, sealed) == "f" * 32
    assert seal(TOKEN, "f" * 32) != sealed
    assert (b"f" * 32).hex() not in sealed and "f" * 32 not in sealed
