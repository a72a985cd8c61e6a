"""Sends garbage to every TCP port at which the processes of a run listen, as a stranger on its network does.

``python -m tests.stranger ROOT RATE SECONDS [HEX ...]`` looks for the ports of a process and of all that it has
started, opens RATE connections a second for SECONDS, and prints how many each kind of process has accepted as JSON.
Recorded bytes, as HEX, are sent as well. It can be ended earlier by SIGTERM.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

_RATE = 200
_LOOK_EVERY_S = 2.0
_MOST_OPEN = 300
_RESET = struct.pack("ii", 1, 0)
_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}
GARBAGE = (
    b"",
    b"\0" * 8,
    b"\0" * 200,
    b"\xff" * 200,
    b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    b"POST /api/jobs/ HTTP/1.1\r\nContent-Length: 999999999999\r\n\r\n{}",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 64,
    struct.pack("!IQ", 2**32 - 1, 2**63) + b"{}",
    struct.pack("<QQ", 2**63, 2**63),
    b"[" * 100_000 + b"\n",
    b'{"token": "\\ud800", "group": 1, "worker": 0}\n',
)
"""Silence, numbers, requests of other protocols, lengths without end, deep JSON and a lone surrogate."""


def listening(root: int) -> dict[tuple[str, int], str]:
    found: dict[tuple[str, int], str] = {}
    addresses = _listening_sockets()
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in (psutil.Process(root), *psutil.Process(root).children(recursive=True)):
            with contextlib.suppress(psutil.Error, OSError):
                for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
                    address = addresses.get(os.readlink(descriptor))
                    if address is not None:
                        found[address] = " ".join(process.cmdline())
    return found


def _listening_sockets() -> dict[str, tuple[str, int]]:
    found = {}
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                host, _, port = fields[1].partition(":")
                words = [struct.pack("=I", int(host[at : at + 8], 16)) for at in range(0, len(host), 8)]
                found[f"socket:[{fields[9]}]"] = (socket.inet_ntop(family, b"".join(words)), int(port, 16))
    return found


@contextmanager
def disturbing(root: int, seconds: float, recorded: Sequence[bytes] = ()) -> Iterator[Counter[str]]:
    """Disturb a process in a block, for so long at most; after it, the counter has the connections by command."""
    command = [sys.executable, "-m", __name__, str(root), str(_RATE), str(seconds), *(one.hex() for one in recorded)]
    found: Counter[str] = Counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield found
        finally:
            process.terminate()
            text, _ = process.communicate(timeout=60.0)
            found.update(json.loads(text or "{}"))


def main(root: int, rate: float, seconds: float, recorded: Sequence[bytes]) -> None:
    """Disturb a process until the time is up."""
    chance, due = random.Random(0), time.monotonic()
    until, looked_at = due + seconds, -_LOOK_EVERY_S
    ended: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: ended.append(number))
    targets: dict[tuple[str, int], str] = {}
    sent: Counter[str] = Counter()
    opened: deque[socket.socket] = deque()
    while time.monotonic() < until and not ended:
        now = time.monotonic()
        if now - looked_at > _LOOK_EVERY_S:
            looked_at, targets = now, listening(root)
        if targets:
            (host, port), command = chance.choice([*targets.items()])
            content = chance.choice((*GARBAGE, *recorded, chance.randbytes(chance.randint(1, 4096))))
            sent[command] += _send(host, port, content, opened, how=chance.randrange(4))
        while len(opened) > _MOST_OPEN:
            opened.popleft().close()
        # It catches up where the machine is busy.
        due = max(due + 1 / rate, now - _LOOK_EVERY_S)
        time.sleep(max(0.0, due - time.monotonic()))
    sys.stdout.write(json.dumps(sent))


def _send(host: str, port: int, content: bytes, opened: deque[socket.socket], how: int) -> int:
    connection = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    connection.settimeout(0.5)
    opened.append(connection)
    with contextlib.suppress(OSError):
        connection.connect((_EVERYWHERE.get(host, host), port))
        connection.sendall(content)
        if how == 0:
            connection.shutdown(socket.SHUT_WR)
        elif how == 1:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            connection.close()
        return 1
    return 0


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]), [bytes.fromhex(one) for one in sys.argv[4:]])
