"""A peer memory agent in a process of its own, which a test can kill, and whose files it can damage by a signal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from threading import Thread
from typing import Any

from ray_ulysses.peer_memory import PeerMemoryAgent
from ray_ulysses.peer_memory.files import MemoryFile

DAMAGE, CUT = signal.SIGUSR1, signal.SIGUSR2
"""Have an agent change a byte of each file that it holds, or cut each to half of its size; manifests stay whole."""
SPOIL_S = 2.0


@dataclass
class AgentProcess:
    process: Any
    address: str

    @classmethod
    def start(cls, environment: dict[str, str]) -> AgentProcess:
        """Start one, and return it once it listens."""
        process: Any = subprocess.Popen(
            [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            start_new_session=True, env=os.environ | environment,
        )  # fmt: skip
        return cls(process, process.stdout.readline().strip())

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


def main() -> None:
    agent = PeerMemoryAgent("token", host="127.0.0.1", limit_bytes=1 << 30)
    for number in (DAMAGE, CUT):
        signal.signal(number, lambda number, _: Thread(target=_spoil, args=(agent, number)).start())
    sys.stdout.write(f"{agent.start()}\n")
    sys.stdout.flush()
    sys.stdin.read()


def _spoil(agent: PeerMemoryAgent, number: int) -> None:
    """Spoil all shards, those too that come while the ranks that write them are ended."""
    spoiled: set[MemoryFile] = set()
    until = time.monotonic() + SPOIL_S
    while time.monotonic() < until:
        for key, file in dict(agent.files._files).items():
            if not key.endswith(".safetensors") or file in spoiled:
                continue
            spoiled.add(file)
            if number == CUT:
                file.size //= 2
            else:
                ((pages, offset, _),) = file.ranges(file.size // 2, file.size // 2 + 1)
                (byte,) = os.pread(pages.fileno(), 1, offset)
                os.pwrite(pages.fileno(), bytes([byte ^ 1]), offset)
        time.sleep(0.005)


if __name__ == "__main__":
    main()
