"""Messages between a supervisor and its launcher, pickled and sent over a local socket."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

from ray_ulysses.elastic.causes import Kind
from ray_ulysses.elastic.reform import END_S
from ray_ulysses.peer_memory.store import AgentAddresses

MOST_BYTES = 1 << 17
"""Longest message, in bytes, which fits the kernel's default socket buffers."""
_MOST_FDS = 6
IMAGE = "RAY_ULYSSES_IMAGE"
"""Environment variable with the path of the image's socket."""
STACKS_SIGNAL = signal.SIGUSR2
"""Signal that makes a child dump its threads' stacks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Settings that all attempts of one worker share."""

    config: dict[str, Any]
    session: str
    command_started: float | None
    workers_asked: float | None
    node: str
    """Name of the worker's node in the journal and logs."""
    local_rank: int
    """The worker's rank on its node, which is also the index of its GPU."""
    device: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """Order to run an attempt in a child process."""

    job: Job
    generation: int
    rank: int
    rank_nodes: tuple[str, ...]
    """Cluster ID of each rank's node, by rank."""
    host: str
    port: int
    """Port on which rank 0 listens; rank 0 receives the listening socket."""
    memory: AgentAddresses | None = None
    ahead_s: float = 0.0
    """Seconds by which the coordinator's clock, which timestamps all records, is ahead of this machine's clock."""
    is_tested: bool = False
    """Whether every rank's worker has passed the self-test and trained a step of this command."""
    end_s: float = END_S
    """Longest wait for a killed child to end, in seconds."""

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
    """Order to kill the child."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """The launcher has finished its imports."""

    pid: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """Request to an image to fork a launcher, sent with the launcher's socket, stdout and stderr."""

    environment: dict[str, str]
    folder: str
    """Working directory of the supervisor."""
    supervisor: int
    """Process ID of the supervisor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """A child was started."""

    pid: int
    """ID of the child's process, and of its process group."""
    is_launcher: bool = False
    """Whether the launcher itself became the child, because it could not fork safely."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """Outcome of a child's attempt."""

    status: str | None = None
    """How the attempt ended, or None if it failed."""
    error: BaseException | None = None
    """The error that the child raised, or a substitute with the error's text if it can't be sent."""
    kind: Kind = "raised"
    what: str = ""
    is_final: bool = False
    """Whether the error would recur."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exited:
    """A child's process has ended."""

    code: int
    """Exit code, or the negative number of the signal that killed the process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _InFile:
    """Stands in for a message too long for the socket; the first descriptor is an in-memory file with the message."""

    num_bytes: int


def send(connection: socket.socket, message: Any, descriptors: tuple[int, ...] = ()) -> None:
    """Send a message and file descriptors over a socket that preserves message boundaries.

    Raises:
        OSError: The other side is gone.
    """
    content = pickle.dumps(message)
    if len(content) <= MOST_BYTES // 2:
        socket.send_fds(connection, [content], descriptors)
        return
    # For example, an order with the addresses of a thousand nodes.
    with os.fdopen(os.memfd_create("ray-ulysses-order", os.MFD_CLOEXEC), "wb") as file:
        file.write(content)
        file.flush()
        socket.send_fds(connection, [pickle.dumps(_InFile(num_bytes=len(content)))], (file.fileno(), *descriptors))


def receive(connection: socket.socket) -> tuple[Any, list[int]]:
    """Wait for the next message, and return it with its descriptors.

    Raises:
        EOFError: The other side is gone.
    """
    content, descriptors, _, _ = socket.recv_fds(connection, MOST_BYTES, _MOST_FDS)
    if not content:
        raise EOFError("the other process closed the connection")
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    message = pickle.loads(content)
    if isinstance(message, _InFile):
        with os.fdopen(descriptors.pop(0), "rb") as file:
            message = pickle.loads(os.pread(file.fileno(), message.num_bytes, 0))
    return message, descriptors


def pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets that preserve message boundaries."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


_MOST_STDERR_BYTES = 1 << 14


class Stderr:
    """Forwards the stderr of a launcher and its child to this process's stderr, and stores the last part."""

    def __init__(self) -> None:
        self._reading, self.writing = os.pipe()
        os.set_blocking(self._reading, False)
        self._end = b""

    def fileno(self) -> int:
        """Return the file descriptor to read from, for a selector."""
        return self._reading

    def pass_on(self) -> None:
        """Forward the available output without blocking."""
        with contextlib.suppress(BlockingIOError):
            while content := os.read(self._reading, _MOST_STDERR_BYTES):
                self._end = (self._end + content)[-_MOST_STDERR_BYTES:]
                # A failing log, such as on a full disk, must not end the child.
                with contextlib.suppress(OSError):
                    os.write(2, content)

    def end(self) -> str:
        """Return the last part of the output since `forget` was called."""
        self.pass_on()
        return self._end.decode(errors="replace")

    def forget(self) -> None:
        """Discard the output so far."""
        self.pass_on()
        self._end = b""

    def close(self) -> None:
        """Close the pipe."""
        os.close(self._reading)


class LauncherProcess:
    """A running launcher, forked by this machine's image if there is an image, otherwise executed."""

    def __init__(self, module: str) -> None:
        self._connection, theirs = pair()
        self.stderr = Stderr()
        environment = without_token()
        self._process: subprocess.Popen[bytes] | None = None
        self.pid: int | None = None
        """Process ID of the launcher, or None until a forked launcher is ready."""
        self._image = _ask_image(environment, (theirs.fileno(), 1, self.stderr.writing))
        if self._image is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stderr=self.stderr.writing,
                start_new_session=True,
                env=environment,
            )
            self.pid = self._process.pid
        theirs.close()
        os.close(self.stderr.writing)
        self.is_ready = False

    def fileno(self) -> int:
        """Return the connection's file descriptor, for a selector."""
        return self._connection.fileno()

    def send(self, message: Any, descriptors: tuple[int, ...] = ()) -> None:
        """Send an order. A dead launcher is noticed only when its answer is read."""
        with contextlib.suppress(OSError):
            send(self._connection, message, descriptors)

    def receive(self) -> Any:
        """Wait for the launcher's next message, and return it.

        Raises:
            EOFError: The launcher is gone.
        """
        while self.fileno() not in wait([self.fileno(), self.stderr.fileno()]):
            # A full pipe would block the launcher.
            self.stderr.pass_on()
        try:
            message = receive(self._connection)[0]
        except OSError as error:
            raise EOFError("the launcher has exited") from error
        if isinstance(message, Ready):
            self.pid, self.is_ready = message.pid, True
        return message

    def kill(self) -> None:
        """Kill the launcher and thereby its child."""
        if self._image is not None:
            with contextlib.suppress(OSError):
                self._image.shutdown(socket.SHUT_WR)
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def end(self, within_s: float) -> int:
        """Kill the launcher, wait until it ends, and return its exit code."""
        self.kill()
        self._connection.close()
        self.stderr.close()
        code = -signal.SIGKILL
        if self._image is not None:
            with self._image, contextlib.suppress(OSError, EOFError):
                self._image.settimeout(within_s)
                code = receive(self._image)[0].code
        elif self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(within_s)
        return code


def without_token() -> dict[str, str]:
    """Return this process's environment for a process that does not connect to Ray, and needs no token."""
    return {name: value for name, value in os.environ.items() if name != "RAY_AUTH_TOKEN"}


def _ask_image(environment: dict[str, str], descriptors: tuple[int, ...]) -> socket.socket | None:
    """Ask this machine's image for a launcher; return the connection to the image, or None if there is no image."""
    path = os.environ.get(IMAGE)
    if path is None:
        return None
    image = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        image.connect(path)
        send(image, Launch(environment=environment, folder=os.getcwd(), supervisor=os.getpid()), descriptors)
    except OSError:
        image.close()
        return None
    return image


class StopTimer:
    """Detects that a process has been stopped (SIGSTOP) for too long."""

    def __init__(self, least_s: float) -> None:
        self._least_s = least_s
        self._since: float | None = None

    def is_up(self, now: float, *, is_stopped: bool) -> bool:
        """Return whether the process has been stopped for too long; call often, with the monotonic time in seconds."""
        if not is_stopped:
            self._since = None
            return False
        self._since = now if self._since is None else self._since
        return now - self._since >= self._least_s


def process_state(pid: int) -> str:
    """Return the kernel's one-letter state of a process, or an empty string if the process is gone."""
    try:
        with open(f"/proc/{pid}/stat") as stream:
            return stream.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
