"""What a supervisor orders its launcher to do, and what the launcher reports: pickled messages on one machine."""

from __future__ import annotations

import os
import pickle
import signal
import socket
from dataclasses import dataclass
from typing import Any

from ray_ulysses.elastic.causes import Kind
from ray_ulysses.elastic.stop_bound import END_S
from ray_ulysses.vault.store import VaultAddresses

MOST_BYTES = 1 << 17
"""Longest message: the default of the kernel's buffers takes it whole."""
_MOST_FDS = 6
STACKS_SIGNAL = signal.SIGUSR2
"""Asks a child for the stacks of its threads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What is the same for every attempt of one worker."""

    config: dict[str, Any]
    session: str
    command_started: float | None
    workers_asked: float | None
    node: str
    """Name of the worker's node in journal and logs."""
    local_rank: int
    """The worker's rank on its node, which is the index of its GPU."""
    device: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """An attempt that a child is to run."""

    job: Job
    generation: int
    rank: int
    rank_nodes: tuple[str, ...]
    """The cluster's name of each rank's node, by rank."""
    host: str
    port: int
    """Where rank 0 listens; it is handed the listening socket."""
    memory: VaultAddresses | None = None
    ahead_s: float = 0.0
    """How far the coordinator's clock, by which all of a command is recorded, is ahead of this machine's."""
    is_tested: bool = False
    """Whether every rank's worker has trained a step of this command, after its self-test."""
    end_s: float = END_S
    """Longest wait for the end of a child that was killed, in seconds."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.rank_nodes)

    @property
    def local_world_size(self) -> int:
        """Number of ranks on this node."""
        return self.rank_nodes.count(self.rank_nodes[self.rank])


@dataclass(frozen=True, kw_only=True, slots=True)
class Stop:
    """The child is to be killed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """The launcher has imported everything."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """A child runs."""

    pid: int
    """Its process, and its process group."""
    is_launcher: bool = False
    """Whether the launcher itself became the child, since it could not fork safely."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """A child's attempt has ended."""

    status: str | None = None
    """How, if it did not fail."""
    error: BaseException | None = None
    """The error that it raised, or one of ours with its text."""
    kind: Kind = "raised"
    what: str = ""
    is_final: bool = False
    """Whether it would recur."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exited:
    """A child's process is gone."""

    code: int
    """Its exit code; minus the number of the signal that killed it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _InFile:
    """A message too long for the socket; the first descriptor is a file in memory that holds it."""

    num_bytes: int


def send(connection: socket.socket, message: Any, descriptors: tuple[int, ...] = ()) -> None:
    """Send a message, and descriptors, over a socket that keeps messages apart.

    Raises:
        OSError: The other side is gone.
    """
    content = pickle.dumps(message)
    if len(content) <= MOST_BYTES // 2:
        socket.send_fds(connection, [content], descriptors)
        return
    # The addresses of a thousand nodes.
    with os.fdopen(os.memfd_create("ray-ulysses-order", os.MFD_CLOEXEC), "wb") as file:
        file.write(content)
        file.flush()
        socket.send_fds(connection, [pickle.dumps(_InFile(num_bytes=len(content)))], (file.fileno(), *descriptors))


def receive(connection: socket.socket) -> tuple[Any, list[int]]:
    """Return the next message with its descriptors; waits for one.

    Raises:
        EOFError: The other side is gone.
    """
    content, descriptors, _, _ = socket.recv_fds(connection, MOST_BYTES, _MOST_FDS)
    if not content:
        raise EOFError("the other side is gone")
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    message = pickle.loads(content)
    if isinstance(message, _InFile):
        with os.fdopen(descriptors.pop(0), "rb") as file:
            message = pickle.loads(os.pread(file.fileno(), message.num_bytes, 0))
    return message, descriptors


def pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets that keep messages apart."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
