"""Supervisors without children in one process, which speak the real protocol with a coordinator.

Started by `benchmarks.scale.coordinator`. A command is a line of JSON on stdin; its answer is a line on stdout.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from benchmarks.scale.limits import allow_open_files
from ray_ulysses.elastic.hang import RankProgress
from ray_ulysses.peer_memory.authentication import NONCE_BYTES, PROOF_BYTES, authenticate
from ray_ulysses.supervision.supervisor import BEAT_S, Announcement, encode

STEP_S = 0.5
"""Seconds of a step."""
STACK_BYTES = 10_000
_WHEEL_S = 0.01
_AT_ONCE = 64
_BEAT, _START, _STOP, _STACKS = (f'{{"do":"{name}"'.encode() for name in ("beat", "start", "stop", "stacks"))


class Stub(asyncio.Protocol):
    """A supervisor whose child trains, and ends when it is stopped."""

    def __init__(self, stubs: Stubs, worker: int) -> None:
        self._stubs, self.worker, self._received = stubs, worker, b""
        self.generation, self.rank = 0, 0
        self.transport: Any = None

    def connection_made(self, transport: Any) -> None:
        """Remember the connection."""
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """Obey the messages."""
        self._stubs.received += len(data)
        *lines, self._received = (self._received + data).split(b"\n")
        for line in lines:
            if not line.startswith(_BEAT):
                self._obey(line)

    def connection_lost(self, error: Exception | None) -> None:
        """Forget the supervisor."""
        self._stubs.here.pop(self.worker, None)

    def send(self, message: dict[str, Any]) -> None:
        """Send a message to the coordinator."""
        content = encode(message)
        self._stubs.sent += len(content)
        self.transport.write(content)

    def beat(self, now: float) -> None:
        """Send what a supervisor sends every half second."""
        message: dict[str, Any] = {"type": "beat"}
        if self.generation:
            trained_s = now - self._stubs.formed_at
            progress = RankProgress(
                rank=self.rank, phase="step", step=int(trained_s / STEP_S) + 1, micro_batch=0,
                idle_s=trained_s % STEP_S if self._stubs.hung_at is None else now - self._stubs.hung_at,
                state="S", steps=int(trained_s / STEP_S), step_s=STEP_S,
            )  # fmt: skip
            message |= {"generation": self.generation, "progress": asdict(progress)}
        self.send(message)

    def end(self, **fields: Any) -> None:
        """Report the child's end."""
        generation, self.generation = self.generation, 0
        self.send({"type": "ended", "generation": generation, "port": 70, "step": 9, "stepped": True, **fields})

    def _obey(self, line: bytes) -> None:
        if line.startswith(_START):
            began = time.thread_time()
            order = json.loads(line)
            self._stubs.orders_read_s += time.thread_time() - began
            self.generation, self.rank = order["generation"], order["rank"]
            self._stubs.started(self.generation)
        elif line.startswith(_STOP):
            if self.generation == json.loads(line)["generation"]:
                self.end()
        elif line.startswith(_STACKS):
            self.send({"type": "stacks", "generation": self.generation, "text": "x" * STACK_BYTES, "left": ""})


class Stubs:
    """All supervisors of a worker group."""

    def __init__(self) -> None:
        self.here: dict[int, Stub] = {}
        self.received = self.sent = 0
        self.orders_read_s = 0.0
        """CPU time spent on reading orders."""
        self.hung_at: float | None = None
        self.formed_at = 0.0
        self._num_started: dict[int, int] = {}
        self._awaited: tuple[int, int, asyncio.Future[float]] | None = None
        self._pool = ThreadPoolExecutor(_AT_ONCE)

    def started(self, generation: int) -> None:
        """Count a child that was started."""
        self.formed_at, self.hung_at = time.monotonic(), None
        count = self._num_started[generation] = self._num_started.get(generation, 0) + 1
        if self._awaited is not None and self._awaited[:2] == (generation, count):
            self._awaited[2].set_result(self.formed_at)

    async def join(self, announcement: Mapping[str, Any], workers: Mapping[str, str]) -> None:
        """Connect more supervisors."""
        to, loop = Announcement(**announcement), asyncio.get_running_loop()

        def connect() -> socket.socket:
            connection = socket.create_connection((to.host, to.port))
            authenticate(connection, to.token)
            connection.setblocking(False)
            return connection

        async def one(worker: int, node: str) -> None:
            connection = await loop.run_in_executor(self._pool, connect)
            stub = Stub(self, worker)
            await loop.create_connection(lambda: stub, sock=connection)
            self.received, self.sent = self.received + NONCE_BYTES + PROOF_BYTES, self.sent + NONCE_BYTES + PROOF_BYTES
            self.here[worker] = stub
            host = f"10.{worker >> 11}.{worker >> 3 & 255}.1"
            stub.send({"group": to.group, "worker": worker, "node": node, "host": host, "port": 40_000})

        await asyncio.gather(*(one(int(worker), node) for worker, node in workers.items()))

    async def formed(self, generation: int, count: int) -> float:
        """Return when the last of a generation's children was started."""
        if self._num_started.get(generation, 0) < count:
            self._awaited = generation, count, asyncio.get_running_loop().create_future()
            return await asyncio.wait_for(self._awaited[2], 60.0)
        return self.formed_at

    def lose(self, workers: list[int]) -> float:
        """Close the connections of workers; return when the first was closed."""
        began = time.monotonic()
        for worker in workers:
            self.here.pop(worker).transport.abort()
        return began

    def end(self, status: str) -> float:
        """Let all children end with a status; return when the first did."""
        began = time.monotonic()
        for stub in self.here.values():
            if stub.generation:
                stub.end(status=status)
        return began

    def hang(self) -> float:
        """Let all children stop moving; return since when."""
        self.hung_at = time.monotonic()
        return self.hung_at

    def beat(self) -> None:
        """Let each supervisor beat once."""
        for stub in tuple(self.here.values()):
            stub.beat(time.monotonic())

    def stats(self) -> dict[str, float]:
        """Return totals so far."""
        used = {"orders_read_s": self.orders_read_s, "cpu_s": time.process_time()}
        return {"received": self.received, "sent": self.sent, **used}

    async def keep_beating(self) -> None:
        """Let each supervisor beat at its own time of the interval."""
        turn, num_turns = 0, round(BEAT_S / _WHEEL_S)
        began = time.monotonic()
        while True:
            for worker, stub in tuple(self.here.items()):
                if worker % num_turns == turn % num_turns:
                    stub.beat(time.monotonic())
            turn += 1
            await asyncio.sleep(max(0.0, began + turn * _WHEEL_S - time.monotonic()))


async def _main(beats: bool) -> None:
    stubs, loop = Stubs(), asyncio.get_running_loop()
    beating = loop.create_task(stubs.keep_beating()) if beats else None
    do: dict[str, Callable[..., Any]] = {
        name: getattr(stubs, name) for name in ("join", "formed", "lose", "end", "hang", "beat", "stats")
    }
    with ThreadPoolExecutor(1) as reading:
        while line := await loop.run_in_executor(reading, sys.stdin.readline):
            name, arguments = json.loads(line)
            answer = do[name](*arguments)
            sys.stdout.write(json.dumps(await answer if asyncio.iscoroutine(answer) else answer) + "\n")
            sys.stdout.flush()
    if beating is not None:
        beating.cancel()


if __name__ == "__main__":
    allow_open_files()
    asyncio.run(_main(sys.argv[1] == "beats"))
