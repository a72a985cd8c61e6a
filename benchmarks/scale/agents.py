"""The agents of many nodes in a few processes, and what each of them sends and receives."""

from __future__ import annotations

import functools
import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

from benchmarks.runner import REPOSITORY
from ray_ulysses.peer_memory import PeerMemoryAgent, wire
from ray_ulysses.peer_memory import agent as agent_module
from ray_ulysses.peer_memory.client import AgentClient, Uploading
from ray_ulysses.run_names import SHARD_KEY

TOKEN = "the token of the benchmark"
NUM_PROCESSES = 2


@dataclass
class Tally:
    """What a member sent and received."""

    num_bytes: int = 0
    """Bytes through sockets in both directions."""
    payload: int = 0
    """Of these, contents of shards."""
    requests: Counter[str] = field(default_factory=Counter)
    num_connections: int = 0
    """Connections that were opened."""

    @property
    def control(self) -> int:
        """Bytes besides the contents of shards."""
        return self.num_bytes - self.payload


class Tallies:
    """The tallies of the members of a process, counted in the methods of sockets."""

    def __init__(self) -> None:
        self.lock, self.thread = threading.Lock(), threading.local()
        self.of: defaultdict[Any, Tally] = defaultdict(Tally)
        self.member: Any = None
        self.addresses: weakref.WeakKeyDictionary[socket.socket, str] = weakref.WeakKeyDictionary()

    def add(self, where: socket.socket | None, num_bytes: int, *, payload: int = 0) -> None:
        """Charge the thread's agent or, in the process of the ranks, the rank and the agent that it talks to."""
        member = getattr(self.thread, "agent", None)
        if member is None:
            member = (self.member, self.addresses.get(where) if where is not None else None)
        with self.lock:
            self.of[member].num_bytes += num_bytes
            self.of[member].payload += payload

    def take(self) -> dict[Any, Tally]:
        """Return the tallies and begin anew."""
        with self.lock:
            taken, self.of = dict(self.of), defaultdict(Tally)
        return taken

    def install(self) -> None:
        """Count from now on."""
        sizes: dict[str, Callable[[Any, Any], int]] = {
            "sendall": lambda args, _: memoryview(args[0]).nbytes,
            "recv": lambda _, got: len(got),
            "recv_into": lambda _, got: int(got),
            "sendmsg": lambda _, got: int(got),
            "recvmsg": lambda _, got: len(got[0]),
        }
        for name, size in sizes.items():
            setattr(socket.socket, name, self._counted(getattr(socket.socket, name), size))
        sendfile = os.sendfile

        def counted_sendfile(out: int, *args: Any) -> int:
            sent = sendfile(out, *args)
            self.add(None, sent)
            return sent

        swap(os, sendfile=counted_sendfile)
        self._install_payload()
        plain_open = AgentClient._open

        def opened(client: AgentClient) -> socket.socket:
            connection = plain_open(client)
            self.addresses[connection] = client.address
            if getattr(self.thread, "agent", None) is None:
                self.of[self.member, client.address].num_connections += 1
            return connection

        swap(AgentClient, _open=opened)

    def _counted(self, plain: Any, size: Callable[[Any, Any], int]) -> Any:
        @functools.wraps(plain)
        def call(connection: socket.socket, *args: Any) -> Any:
            got = plain(connection, *args)
            self.add(connection, size(args, got))
            return got

        return call

    def _install_payload(self) -> None:
        """Count contents of shards separately: what clients append and read, and what agents do for them."""
        tallies = self
        append, append_from, read_into = Uploading.append, Uploading.append_from, AgentClient.read_into

        def counted_append(upload: Uploading, run: Any, *, is_last: bool) -> None:
            append(upload, run, is_last=is_last)
            tallies.add(upload.connection, 0, payload=_of_shard(upload._key, memoryview(run.payload).nbytes))

        def counted_append_from(upload: Uploading, chunk: Any, *, is_last: bool) -> None:
            append_from(upload, chunk, is_last=is_last)
            tallies.add(upload.connection, 0, payload=_of_shard(upload._key, chunk.num_bytes))

        def counted_read_into(client: AgentClient, key: str, offset: int, target: memoryview) -> int:
            count = read_into(client, key, offset, target)
            with tallies.lock:
                tallies.of[tallies.member, client.address].payload += _of_shard(key, count)
            return count

        swap(Uploading, append=counted_append, append_from=counted_append_from)
        swap(AgentClient, read_into=counted_read_into)


def swap(owner: Any, **values: Any) -> None:
    """Replace attributes of a module or class."""
    for name, value in values.items():
        setattr(owner, name, value)


def _of_shard(key: str, num_bytes: int) -> int:
    return num_bytes if SHARD_KEY.match(key) else 0


def install_in_agents(tallies: Tallies) -> None:
    """Count the requests and connections of each agent of this process."""
    tallies.install()
    serve = PeerMemoryAgent._serve

    def counted_serve(agent: PeerMemoryAgent, connection: socket.socket) -> None:
        tallies.thread.agent, tallies.thread.upload = id(agent), 0
        with tallies.lock:
            tallies.of[id(agent)].num_connections += 1
        serve(agent, connection)

    def counted_head(connection: socket.socket) -> Any:
        head = wire.receive_head(connection)
        if head is not None:
            fields, payload = head
            # Only the last request of an upload has the key.
            thread = tallies.thread
            thread.upload = payload + (0 if "begin" in fields else thread.upload)
            kept = _of_shard(fields["keep"]["key"], thread.upload) if "keep" in fields else 0
            with tallies.lock:
                tally = tallies.of[thread.agent]
                tally.requests[fields["op"]] += 1
                tally.payload += kept
        return head

    reading = agent_module._Requests._read

    def counted_read(requests: Any, _: int, *, key: str, offset: int, num_bytes: int) -> None:
        with requests._files.reading(key) as file:
            sent = max(min(num_bytes, file.size - offset), 0)
        reading(requests, _, key=key, offset=offset, num_bytes=num_bytes)
        tallies.add(None, 0, payload=_of_shard(key, sent))

    swap(PeerMemoryAgent, _serve=counted_serve)
    swap(agent_module, receive_head=counted_head)
    swap(agent_module._Requests, _read=counted_read)


def serve_agents(pipe: Any, nodes: Sequence[str]) -> None:
    """Run the agents of some nodes in this process, and obey the orders that arrive through the pipe."""
    tallies = Tallies()
    install_in_agents(tallies)
    before = _used()
    agents = {node: PeerMemoryAgent(TOKEN) for node in nodes}
    addresses = {node: agent.start() for node, agent in agents.items()}
    names = {id(agent): node for node, agent in agents.items()}
    pipe.send(addresses)
    silent: list[socket.socket] = []
    while (order := pipe.recv())[0] != "end":
        answer: Any = None
        if order[0] == "take":
            answer = {names[member]: tally for member, tally in tallies.take().items()}
        elif order[0] == "used":
            now = _used()
            answer = {name: (now[name] - before[name]) / len(nodes) for name in now}
        elif order[0] == "close" and order[1] in agents:
            agents[order[1]].close()
        elif order[0] == "silence" and order[1] in agents:
            agents[order[1]].close()
            # The kernel accepts connections, and nobody answers.
            silent.append(socket.create_server(("127.0.0.1", int(addresses[order[1]].rpartition(":")[2]))))
        pipe.send(answer)
    for agent in agents.values():
        agent.close()


def _used() -> dict[str, float]:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "mib": int(lines["RssAnon"].split()[0]) / 1024,
        "cpu_s": time.process_time(),
    }


class Cluster:
    """The agents of all nodes, in a few processes."""

    def __init__(self, num_nodes: int) -> None:
        # The node of rank 0 is neither the first in sorted order nor the partner of the first.
        self.nodes = tuple(f"{(7 * number + 3) % num_nodes:056x}" for number in range(num_nodes))
        self._pipes: list[Any] = []
        self._processes: list[Any] = []
        for number in range(min(NUM_PROCESSES, num_nodes)):
            # A process of `multiprocessing` would import the benchmark's module, and torch with it.
            with Listener() as listener:
                command = [sys.executable, "-m", "benchmarks.scale.agents", str(listener.address)]
                self._processes.append(subprocess.Popen([*command, *self.nodes[number::NUM_PROCESSES]], cwd=REPOSITORY))
                self._pipes.append(listener.accept())
        found = {node: address for pipe in self._pipes for node, address in pipe.recv().items()}
        self.addresses = {node: found[node] for node in self.nodes}

    def ask(self, *order: Any) -> list[Any]:
        """Give every process an order, and return the answers."""
        for pipe in self._pipes:
            pipe.send(order)
        return [pipe.recv() for pipe in self._pipes]

    def take(self) -> dict[str, Tally]:
        """Return each agent's tally since the last call."""
        time.sleep(0.2)  # An agent counts a reply after its client has received it.
        return {node: tally for answer in self.ask("take") for node, tally in answer.items()}

    def used(self) -> dict[str, float]:
        """Return what an agent uses on average."""
        found = self.ask("used")
        return {name: sum(one[name] for one in found) / len(found) for name in found[0]}

    def end(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.send(("end",))
        for process in self._processes:
            process.wait(30)


if __name__ == "__main__":
    with Client(sys.argv[1]) as connection:
        serve_agents(connection, sys.argv[2:])
