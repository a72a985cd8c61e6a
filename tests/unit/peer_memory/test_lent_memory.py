from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from ray_ulysses.checkpoint.staging import Staging
from ray_ulysses.checkpoint.state import ShardedState, StateDescription, TensorPart
from ray_ulysses.peer_memory import PeerMemoryAgent, PeerMemoryStore
from ray_ulysses.peer_memory.authentication import authenticate
from ray_ulysses.peer_memory.client import AgentClient, _Run
from ray_ulysses.peer_memory.files import LentBuffer, LentMemory, MemoryFile, check_lent
from ray_ulysses.peer_memory.wire import local_address, receive_head, send_head
from tests.polling import wait_until
from tests.unit.peer_memory.conftest import FOLDER, TOKEN
from tests.unit.peer_memory.test_agent import SetClock, running

MIB = 2**20
SHARD = f"{FOLDER}/rank-00000-of-00001.safetensors"


class Lender:
    """A worker that writes files of its memory to an agent."""

    def __init__(self, client: AgentClient) -> None:
        self.clock = SetClock()
        self.memory = LentMemory(self.clock)
        self.client = AgentClient(client.address, TOKEN, is_local=True)

    def filled(self, num_bytes: int, seed: int = 0) -> LentBuffer:
        buffer = self.memory.make(num_bytes)
        buffer.memory[:] = np.random.default_rng(seed).bytes(num_bytes)
        return buffer

    def put(self, key: str, chunks: Iterable[bytes | memoryview], *, replace: bool = False) -> int:
        return self.client.put(key, chunks, replace=replace, lent=self.memory)


@contextmanager
def lending(client: AgentClient) -> Iterator[Lender]:
    lender = Lender(client)
    try:
        yield lender
    finally:
        lender.client.close()


def content_of(client: AgentClient, key: str) -> bytes:
    target = bytearray(client.sizes(key)[key])
    assert client.read_into(key, 0, memoryview(target)) == len(target)
    return bytes(target)


@pytest.mark.parametrize(
    "order", ["l3 l5", "s l17000000 l100 s", "l4 gap3 l4", "s l8 s l8 s", "o7 l7 s", "s l18000000 s20000000 s", ""]
)
def test_a_file_is_its_chunks_whichever_of_them_are_lent(order: str) -> None:
    with running() as (agent, client), running() as (other, copied), lending(client) as lender:
        buffers = {"l": lender.filled(18 * MIB if "000000" in order else MIB, 1), "o": lender.filled(64, 2)}
        places, chunks = {"l": 0, "o": 0}, list[bytes | memoryview]()
        for kind, size in re.findall(r"(\w)[a-z]*(\d*)", order):
            num_bytes = int(size or 10)
            if kind == "s":
                chunks.append(np.random.default_rng(len(chunks)).bytes(num_bytes))
            elif kind in buffers:
                chunks.append(buffers[kind].memory[places[kind] : places[kind] + num_bytes])
            places["o" if kind == "o" else "l"] += 0 if kind == "s" else num_bytes
        wanted = b"".join(map(bytes, chunks))
        lent = sum(len(chunk) for chunk in chunks if isinstance(chunk, memoryview))
        assert lender.put("key", iter(chunks)) == len(wanted)
        client.copy("key", copied.address)
        assert content_of(client, "key") == content_of(copied, "key") == wanted
        for start, count in ((0, 5), (8, 20), (len(wanted) // 2, 10), (max(len(wanted) - 3, 0), 10)):
            target = bytearray(count)
            found = client.read_into("key", start, memoryview(target))
            assert bytes(target[:found]) == wanted[start : start + count]
        assert agent.files.num_bytes == other.files.num_bytes == len(wanted)
        with agent.files.reading("key") as file:
            assert file.own_bytes == len(wanted) - lent and file.pages.num_bytes == file.own_bytes
        client.delete("key")
        assert agent.files.num_bytes == 0 and all(buffer.is_returned for buffer in buffers.values())


def test_a_buffer_is_lent_until_its_file_and_the_files_readers_are_gone() -> None:
    with running() as (agent, client), lending(client) as lender:
        buffer = lender.filled(MIB)
        assert buffer.is_returned and not buffer.is_lost
        lender.put("key", [b"head", buffer.memory])
        assert not buffer.is_returned and not buffer.is_lost
        with agent.files.reading("key"):
            client.delete("key")
            assert not buffer.is_returned
        assert buffer.is_returned
        # A file that takes another's place gives that one's memory back.
        lender.put("key", [buffer.memory])
        second = lender.filled(MIB, 1)
        lender.put("key", [second.memory], replace=True)
        assert buffer.is_returned and not second.is_returned


def test_a_file_beyond_the_limit_is_refused_and_its_buffer_returned() -> None:
    with running(limit_bytes=3 * MIB) as (agent, client), lending(client) as lender:
        first, second = lender.filled(2 * MIB), lender.filled(2 * MIB, 1)
        lender.put("first", [b"head", first.memory])
        for _ in range(3):
            with pytest.raises(OSError, match=r"elastic\.peer_memory_gib") as full:
                lender.put("second", [b"head", second.memory, b"end"])
            assert full.value.errno == errno.ENOSPC
            assert second.is_returned and not first.is_returned and not first.is_lost
            assert agent.files.num_bytes == 2 * MIB + 4
        client.delete("first")
        lender.put("second", [b"head", second.memory, b"end"])
        assert content_of(client, "second") == b"head" + bytes(second.memory) + b"end"


def test_neither_a_file_that_breaks_off_nor_bytes_that_changed_after_they_were_lent_are_kept() -> None:
    with running() as (agent, client), running() as (other, copied), lending(client) as lender:
        buffer = lender.filled(MIB)

        def chunks() -> Iterator[bytes | memoryview]:
            yield buffer.memory
            yield b"x"
            yield buffer.memory
            raise RuntimeError("the state can't be read")

        with pytest.raises(RuntimeError, match="can't be read"):
            lender.put("key", chunks())
        wait_until(lambda: agent.files.num_bytes == 0 and buffer.is_returned, "the memory is given back")
        assert client.sizes("") == {}
        assert lender.put("key", [buffer.memory]) == MIB
        buffer.memory[1000] ^= 1
        with pytest.raises(OSError, match="a chunk was damaged in transit"):
            client.copy("key", copied.address)
        wait_until(lambda: other.files.num_bytes == 0, "the memory is given back")
        assert copied.sizes("") == {}


WRITER = """
import signal, sys
from ray_ulysses.clock import SystemClock
from ray_ulysses.peer_memory.client import AgentClient
from ray_ulysses.peer_memory.files import LentMemory

memory = LentMemory(SystemClock())
client = AgentClient(sys.argv[1], sys.argv[2], is_local=True)
buffers = [memory.make(2**20) for _ in range(2)]
for number, buffer in enumerate(buffers):
    buffer.memory[:] = bytes([number + 1]) * 2**20
client.put("kept", [b"head", buffers[0].memory], replace=False, lent=memory)

def half():
    yield buffers[1].memory
    yield b"x"
    yield buffers[1].memory
    print("written", flush=True)
    signal.pause()

client.put("half", half(), replace=False, lent=memory)
"""


def test_what_a_writer_kept_outlives_it_and_what_it_had_begun_does_not() -> None:
    with running() as (agent, client):
        command = [sys.executable, "-c", WRITER, client.address, TOKEN]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            try:
                assert writer.stdout is not None and writer.stdout.readline() == "written\n"
                os.kill(writer.pid, signal.SIGSTOP)
                assert content_of(client, "kept") == b"head" + b"\1" * MIB
            finally:
                writer.kill()
        wait_until(lambda: agent.files.num_bytes == MIB + 4, "the half file is dropped")
        assert content_of(client, "kept") == b"head" + b"\1" * MIB
        client.delete("kept")
        assert agent.files.num_bytes == 0


AGENT = """
import sys, threading
from ray_ulysses.peer_memory import PeerMemoryAgent

print(PeerMemoryAgent(sys.argv[1]).start(), flush=True)
threading.Event().wait()
"""


def test_memory_that_is_lent_to_an_agent_that_is_gone_is_left_alone() -> None:
    with subprocess.Popen([sys.executable, "-c", AGENT, TOKEN], stdout=subprocess.PIPE, text=True) as agent:
        try:
            assert agent.stdout is not None
            client = AgentClient(agent.stdout.readline().strip(), TOKEN)
            with lending(client) as lender:
                kept, free = lender.filled(MIB), lender.filled(MIB, 1)
                lender.put("key", [kept.memory])
                os.kill(agent.pid, signal.SIGSTOP)
                assert not kept.is_returned and not kept.is_lost
                agent.kill()
                wait_until(lambda: kept.is_lost, "the end is noticed")
                assert not kept.is_returned and free.is_returned and not free.is_lost
        finally:
            agent.kill()


def test_a_buffer_whose_file_outlasts_its_successor_is_given_up() -> None:
    with running() as (_, client), lending(client) as lender:
        first, second = lender.filled(MIB), lender.filled(MIB, 1)
        lender.put("first", [first.memory])
        lender.clock.time = 1000.0
        # There is nothing newer: it is the state that a recovery needs.
        assert not first.is_lost
        lender.put("second", [second.memory])
        # It takes as long as it takes to copy the second to the partner; what counts is from when on it is missed.
        lender.clock.time = 2000.0
        assert not first.is_lost and not second.is_lost
        lender.clock.time = 2011.0
        assert first.is_lost and not second.is_lost
        client.delete("first")
        assert first.is_returned and not first.is_lost


def test_a_buffer_that_never_got_to_the_agent_is_given_up_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with running() as (agent, client), lending(client) as lender:
        buffers = [lender.filled(MIB), lender.filled(MIB, 1)]

        def begin(*, is_large: bool) -> MemoryFile:
            raise OSError(errno.EMFILE, "Too many open files")

        begins = agent.files.begin
        monkeypatch.setattr(agent.files, "begin", begin)
        for buffer in buffers:
            with pytest.raises(OSError, match="Too many open files"):
                lender.put("key", [buffer.memory])
        monkeypatch.setattr(agent.files, "begin", begins)
        assert not any(buffer.is_returned or buffer.is_lost for buffer in buffers)
        lender.clock.time = 11.0
        assert all(buffer.is_lost for buffer in buffers)
        assert lender.put("key", [b"head", lender.filled(MIB, 2).memory]) == MIB + 4


def test_a_stranger_and_a_request_without_memory_are_refused() -> None:
    with running() as (agent, client), lending(client) as lender:
        stranger = AgentClient(client.address, "another", is_local=True)
        with pytest.raises(OSError, match="token"):
            stranger.put("key", [lender.filled(8).memory], replace=False, lent=lender.memory)
        chunks = [(0, 8, 0)]
        for lent in ({"num_bytes": 8, "chunks": chunks}, {"chunks": chunks}, {"num_bytes": 8, "chunks": [(0,)]}):
            with socket.socket(socket.AF_UNIX) as raw:
                raw.connect(local_address(client.address))
                authenticate(raw, TOKEN)
                send_head(raw, {"op": "append", "begin": {"is_large": False}, "checksum": 0, "lent": lent}, 0)
                with contextlib.suppress(ConnectionError):
                    raw.sendall(b"\0")
                    assert receive_head(raw) is None
        with lender.client.uploading("key", replace=False, is_large=False) as upload, pytest.raises(ConnectionError):
            upload.append(_Run(buffer=lender.filled(8), extents=[(1, 8)]), is_last=True)
        buffer = lender.filled(8)
        check_lent(buffer.descriptor, 8)
        with pytest.raises(ValueError, match="size differs"):
            check_lent(buffer.descriptor, 7)
        plain = os.memfd_create("plain", os.MFD_ALLOW_SEALING)
        os.ftruncate(plain, 9)
        with pytest.raises(ValueError, match="not sealed"):
            check_lent(plain, 8)
        os.close(plain)
        assert client.sizes("") == {} and agent.files.num_bytes == 0


def test_neither_descriptors_nor_memory_grow_from_state_to_state() -> None:
    # As long as the checksum table of a large shard, which is sent.
    tail = b"t" * (3 * MIB // 2)
    of_others = set(_open_files())
    with running() as (agent, client), running() as (other, copied), lending(client) as lender:
        buffers = [lender.filled(2 * MIB, seed) for seed in range(2)]
        found = []
        for number in range(8):
            buffer = buffers[number % 2]
            assert buffer.is_returned
            lender.put(str(number), [b"head", buffer.memory, tail])
            client.copy(str(number), copied.address)
            copied.put(f"of-the-other-{number}", [bytes(buffer.memory)], replace=False, is_large=True)
            copied.copy(f"of-the-other-{number}", client.address)
            for each in (client, copied):
                each.delete(str(number - 1))
                each.delete(f"of-the-other-{number - 1}")
            wait_until(
                lambda: not [one for one in threading.enumerate() if one.name == "peer-memory-close"], "it is closed"
            )
            spare = (agent.files.spare_bytes, other.files.spare_bytes)
            descriptors = sum(each not in of_others for each in _open_files())
            found.append((descriptors, agent.files.num_bytes, other.files.num_bytes, *spare))
        assert len(set(found[4:])) == 1 and found[-1][0] > 0


def _open_files() -> list[tuple[int, int]]:
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            status = os.stat(f"/proc/self/fd/{descriptor}")
            found.append((status.st_dev, status.st_ino))
    return found


def test_without_the_local_address_a_store_sends_its_shards(
    agents: dict[str, PeerMemoryAgent], store_of: Callable[[str], PeerMemoryStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    lent = store_of("a").lent_memory()
    assert lent is not None
    buffer = lent.make(MIB)
    monkeypatch.setattr("ray_ulysses.peer_memory.client.local_address", lambda address: f"\0elsewhere/{address}")
    store = store_of("a")
    assert store.lent_memory() is None
    assert store.create(SHARD, [b"head", buffer.memory]) == MIB + 4
    assert buffer.is_returned
    assert store.read_whole(SHARD) == b"head" + bytes(buffer.memory)
    assert agents["a"].files.num_bytes == agents["b"].files.num_bytes == MIB + 4


def shard(number: int) -> str:
    return f"{FOLDER}/rank-{number:05d}-of-00006.safetensors"


def state(value: float) -> ShardedState:
    parts = tuple(
        TensorPart(key=key, start=0, tensor=torch.full((size,), value, dtype=dtype))
        for key, size, dtype in (("a", 3, torch.bfloat16), ("b", 1000, torch.float32), ("c", 70_000, torch.float32))
    )
    return ShardedState(parts=parts, description=StateDescription(tensors={}))


def bytes_of(state: ShardedState) -> list[memoryview]:
    return [memoryview(part.tensor.view(torch.uint8).numpy()) for part in state.parts]


def keep(store: PeerMemoryStore, staging: Staging, number: int) -> torch.Tensor:
    """Stage a state and store it; return its staged copy."""
    staging.reserve(state(0.0).intervals)
    assert staging.is_ready
    staged = staging.stage(state(float(number)))
    store.create(shard(number), bytes_of(staged.state))
    staging.release(staged.buffer)
    return staged.state.parts[1].tensor


def staging_over(store: PeerMemoryStore) -> Staging:
    lent = store.lent_memory()
    assert lent is not None
    return Staging(2, torch.device("cpu"), lend=lent.make)


def test_staging_leaves_a_state_alone_until_its_successor_is_kept(store_of: Callable[[str], PeerMemoryStore]) -> None:
    store = store_of("a")
    staging = staging_over(store)
    addresses = set()
    for number in range(6):
        addresses.add(keep(store, staging, number).data_ptr())
        # The state before and this one take both buffers, until the one before is dropped.
        assert not staging.is_ready
        if number:
            store.delete(shard(number - 1))
            assert staging.is_ready
        assert store.read_whole(shard(number)) == b"".join(bytes_of(state(float(number))))
    assert len(addresses) == 2


def test_staging_takes_new_memory_where_an_agent_is_gone_with_the_old(
    agents: dict[str, PeerMemoryAgent], store_of: Callable[[str], PeerMemoryStore]
) -> None:
    store = store_of("a")
    staging = staging_over(store)
    before = [keep(store, staging, number) for number in range(2)]
    assert not staging.is_ready
    size = staging.num_bytes
    for connection in tuple(agents["a"]._connections):
        connection.shutdown(socket.SHUT_RDWR)
    wait_until(lambda: not staging.is_ready and staging.num_bytes == 0, "the end is noticed", timeout_s=10.0)
    staging.reserve(state(0.0).intervals)
    assert staging.is_ready
    staged = staging.stage(state(7.0))
    assert staged.state.parts[1].tensor.data_ptr() not in {tensor.data_ptr() for tensor in before}
    assert [tensor[0].item() for tensor in before] == [0.0, 1.0]
    assert staged.state.parts[1].tensor[0] == 7.0 and staging.num_bytes == size // 2
