"""Supervises one worker's child: starts it on the coordinator's orders, watches it, and reports how it ended.

The coordinator and the supervisors exchange JSON objects over TCP, one per line.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from ray_ulysses.checkpoint.notice import Notice
from ray_ulysses.clock import SystemClock
from ray_ulysses.elastic.causes import process_end
from ray_ulysses.elastic.reform import END_S
from ray_ulysses.errors import PeerError, RunError
from ray_ulysses.peer_memory.authentication import authenticate, unseal
from ray_ulysses.peer_memory.store import AgentAddresses
from ray_ulysses.supervision.order import (
    STACKS_SIGNAL,
    Exited,
    Job,
    LauncherProcess,
    Order,
    Ready,
    Result,
    Started,
    Stop,
    StopTimer,
    process_state,
)
from ray_ulysses.supervision.remote_streams import serve_streams
from ray_ulysses.supervision.shared_progress import SharedProgress, read_dump

if TYPE_CHECKING:
    from ray_ulysses.data.read.blocks import Streams
    from ray_ulysses.elastic.hang import RankProgress

LOOK_EVERY_S = 0.25
BEAT_S = 1.0
"""Seconds between messages in either direction. The coordinator receives one message per worker in this time."""
SILENCE_S = 10.0
"""Seconds of silence after which the coordinator counts as gone, or this node as cut off from it."""
_CLOCKS_AGREE_S = 60.0
"""Clock differences below this many seconds are ignored, because they may be due to message latency."""
_STACKS_S = 1.5
"""Longest wait for a child's stacks and its flight record, which the child writes to the run's storage."""
_MOST_STACKS_BYTES = 1 << 16
BACKLOG = 1024
"""Backlog of the listening socket: all supervisors of a group may connect at once."""
_SEND_TIMEOUT_S = 5.0
"""Longest wait for the other side to accept a message, in seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Announcement:
    """Connection details of a coordinator."""

    host: str
    port: int
    token: str = field(repr=False)
    """Shared secret, which is never sent."""
    group: int
    """Number of the worker group."""


def listen(host: str) -> socket.socket:
    """Listen on a free port of this node's address, or on all addresses if the node's address is translated (NAT)."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, 0), family=family, backlog=BACKLOG)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
    return socket.create_server(("", 0), family=family, backlog=BACKLOG)


def encode(message: dict[str, Any]) -> bytes:
    """Encode a message as a line of JSON."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


Entries = list[list[Any]]
"""For consecutive ranks on the same node, the node's ID and the number of ranks; or a node's ID and agent's address."""


def changes(before: Entries, after: Entries) -> tuple[int, Entries, int]:
    """Return how many entries at the start and at the end of a list stay, and the entries that come between them."""
    least = min(len(before), len(after))
    first = next((at for at in range(least) if before[at] != after[at]), least)
    last = next((at for at in range(least - first) if before[-1 - at] != after[-1 - at]), least - first)
    return first, after[first : len(after) - last], last


def changed(before: Entries, news: tuple[int, Entries, int]) -> Entries:
    """Return the list after the `changes`."""
    first, between, last = news
    return before[:first] + between + before[len(before) - last :]


class Channel:
    """One side of a connection, read without blocking."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket, self._received = connection, b""
        # A cut cable must not block the sender.
        connection.settimeout(_SEND_TIMEOUT_S)

    def fileno(self) -> int:
        """Return the socket's file descriptor, for a selector."""
        return self._socket.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """Send a message.

        Raises:
            OSError: The connection is closed, or the other side does not read.
        """
        self._socket.sendall(encode(message))

    def receive(self) -> list[dict[str, Any]]:
        """Return the messages that have arrived; call this when the descriptor is readable.

        Raises:
            OSError: The connection is closed, or has failed.
        """
        content = self._socket.recv(1 << 16)
        if not content:
            raise ConnectionError("the connection was closed by the other side")
        *lines, self._received = (self._received + content).split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


class ChildLostError(RunError):
    """A child's process is gone, or was killed for lack of progress."""


class Supervisor:
    """Supervises the children of one worker, one after another.

    Args:
        announcement: Connection details of the coordinator.
        worker: Worker number in the group.
        cluster_node: Cluster ID of the worker's node.
        host: Address of the worker's node, at which other ranks reach rank 0.
        job: Settings that the worker's attempts share.
        make_streams: Creates one child's row streams, or None if children read rows themselves.
        launcher: Module that is executed as the launcher.
        joins_late: Whether to join only once a child can start immediately; the other workers train meanwhile.
    """

    def __init__(
        self,
        announcement: Announcement,
        *,
        worker: int,
        cluster_node: str,
        host: str,
        job: Job,
        make_streams: Callable[[], Streams] | None,
        launcher: str = "ray_ulysses.supervision.launcher",
        joins_late: bool = False,
    ) -> None:
        self._announcement, self._worker, self._cluster_node, self._host = announcement, worker, cluster_node, host
        self._job, self._make_streams, self._launcher = job, make_streams, launcher
        self._joins_late, self._selector = joins_late, selectors.DefaultSelector()
        self._listener = self._listen()
        self._child: WatchedChild | None = None
        self._next: dict[str, Any] | None = None
        self._error: BaseException | None = None
        self._draining: dict[str, float | None] = {}
        self._nodes: Entries = []
        self._agents: Entries = []
        self._launched: LauncherProcess | None = None
        self._heard_at = self._beaten_at = time.monotonic()

    def run(self) -> str:
        """Supervise until the attempt has ended, and return its status.

        Raises:
            BaseException: The error of this worker's child, or `PeerError` if another worker failed.
        """
        channel = None
        try:
            launched = self._launch()
            if self._joins_late:
                launched.receive()
            channel = self._connect()
            self._selector.register(channel, selectors.EVENT_READ)
            while True:
                for key, _ in self._selector.select(timeout=LOOK_EVERY_S):
                    if key.fileobj is channel:
                        self._heard_at = time.monotonic()
                        for message in channel.receive():
                            if (ended := self._obey(channel, message)) is not None:
                                return ended
                    elif self._launched is not None and key.fileobj is self._launched.stderr:
                        self._launched.stderr.pass_on()
                    elif key.fileobj is self._launched:
                        self._hear_launcher(channel)
                self._watch(channel)
        except (OSError, ValueError, EOFError) as error:
            raise PeerError(f"the worker lost contact with its group's coordinator ({error})") from error
        finally:
            self._end()
            if channel is not None:
                channel.close()

    def _connect(self) -> Channel:
        to = self._announcement
        connection = socket.create_connection((to.host, to.port), timeout=SILENCE_S)
        try:
            authenticate(connection, to.token, SILENCE_S)
        except OSError:
            connection.close()
            raise
        channel = Channel(connection)
        channel.send(
            {
                "group": to.group,
                "worker": self._worker,
                "node": self._cluster_node,
                "host": self._host,
                "port": self._port,
            }
        )
        return channel

    def _obey(self, channel: Channel, message: dict[str, Any]) -> str | None:
        """Carry out the coordinator's message; return the attempt's status if it has ended."""
        match message["do"]:
            case "beat":
                self._draining = message["draining"]
            case "start":
                # An order that is never carried out counts too: the next one names only the changes since.
                self._nodes = message["nodes"] = changed(self._nodes, message["nodes"])
                self._agents = message["agents"] = changed(self._agents, message["agents"])
                self._start(channel, message)
            case "stacks":
                self._ask_for_stacks()
            case "stop":
                if self._child is not None and self._child.order.generation == message["generation"]:
                    self._stop()
                else:
                    # The child has already ended, or its start order is still queued or was never sent.
                    self._next = None
                    channel.send(self._ended(message["generation"], step=0, stepped=False))
            case "finish":
                return str(message["status"])
            case "give up":
                # This worker's own error is more informative than a peer's.
                raise self._error or PeerError(
                    f"another worker has failed, and Ray Train restarts all workers: {message['reason']}"
                )
        return None

    def _start(self, channel: Channel, message: dict[str, Any]) -> None:
        ahead_s = message["now"] - SystemClock().now()
        message = {**message, "ahead_s": ahead_s if abs(ahead_s) > _CLOCKS_AGREE_S else 0.0}
        child = self._child
        if child is not None:
            # Freeing the old child's memory may take longer than the allowed silence: `_child_ended` starts the new
            # child.
            self._next, child.is_reported = message, True
            if child.kill_at is None:
                self._stop()
            return
        try:
            self._begin(message)
        except OSError as error:
            # For example, this node is out of memory or file descriptors; the coordinator still answers.
            if self._child is not None:
                self._child.close()
                self._child = None
            self._error = ChildLostError(f"the supervisor could not start the child: {error}")
            described = self._described("lost", str(self._error))
            channel.send(self._ended(message["generation"], step=0, stepped=False, **described))

    def _begin(self, message: dict[str, Any]) -> None:
        progress = SharedProgress.create()
        try:
            stacks = os.memfd_create("ray-ulysses-stacks", os.MFD_CLOEXEC)
        except OSError:
            progress.close()
            raise
        nodes = tuple(node for node, count in message["nodes"] for _ in range(count))
        memory = None
        if message["token"] is not None:
            token, own = unseal(self._announcement.token, message["token"]), nodes[message["rank"]]
            memory = AgentAddresses(agents=dict(message["agents"]), node=own, partner=message["partner"], token=token)
        fields = ("generation", "rank", "host", "port", "ahead_s", "is_tested", "end_s")
        as_sent = {name: message[name] for name in fields}
        order = Order(job=self._job, rank_nodes=nodes, memory=memory, **as_sent)
        started_at = time.monotonic()
        self._child = WatchedChild(order=order, progress=progress, stacks=stacks, started_at=started_at)
        self._error = None
        mine, theirs = socket.socketpair()
        with mine, theirs:
            if self._make_streams is not None:
                serve_streams(self._make_streams, Connection(mine.detach()))
            descriptors = (progress.descriptor, stacks, self._listener.fileno(), theirs.fileno())
            launched = self._launch()
            # Earlier output does not belong to this child.
            launched.stderr.forget()
            launched.send(order, descriptors)

    def _stop(self) -> None:
        assert self._child is not None and self._launched is not None
        self._child.kill_at = time.monotonic() + self._child.order.end_s
        if self._child.is_launcher:
            self._kill_all()
        else:
            self._launched.send(Stop())

    def _hear_launcher(self, channel: Channel) -> None:
        launched, child = self._launched, self._child
        assert launched is not None
        try:
            message = launched.receive()
        except EOFError:
            stderr, code = launched.stderr.end(), self._forget_launcher()
            if launched.is_ready:
                # Warm up a launcher for the next generation. One that was never ready is replaced only when needed.
                self._launch()
            if child is not None:
                self._child_ended(channel, code, stderr)
            return
        if child is None or isinstance(message, Ready):
            return
        if isinstance(message, Started):
            child.pid, child.is_launcher = message.pid, message.is_launcher
        elif isinstance(message, Result):
            child.result = message
            if message.error is None:
                self._report(channel, {"status": message.status})
        elif isinstance(message, Exited):
            self._child_ended(channel, message.code, launched.stderr.end())

    def _child_ended(self, channel: Channel, code: int, stderr: str) -> None:
        child = self._child
        assert child is not None
        self._error = child.result.error if child.result is not None else None
        if self._error is not None and child.result is not None:
            self._report(channel, self._described(child.result.kind, child.result.what, child.result.is_final))
        elif child.kill_at is not None and child.failure is None:
            self._report(channel, {})
        else:
            kind, how = ("lost", child.failure) if child.failure is not None else process_end(code, stderr)
            self._error = ChildLostError(how)
            self._report(channel, self._described(kind, how))
        child.close()
        self._child, message, self._next = None, self._next, None
        if message is not None:
            self._start(channel, message)

    def _report(self, channel: Channel, fields: dict[str, Any]) -> None:
        child = self._child
        assert child is not None
        if child.is_reported:
            return
        child.is_reported = True
        self._listener.close()
        self._listener = self._listen()
        progress = child.progress_now
        channel.send(self._ended(child.order.generation, step=progress.step, stepped=progress.steps > 0, **fields))

    def _ended(self, generation: int, **fields: Any) -> dict[str, Any]:
        return {"type": "ended", "generation": generation, "port": self._port, **fields}

    def _described(self, kind: str, what: str, is_final: bool = False) -> dict[str, Any]:
        return {"error": {"kind": kind, "what": what, "node": self._job.node}, "is_final": is_final}

    def _watch(self, channel: Channel) -> None:
        now = time.monotonic()
        if now - self._beaten_at >= BEAT_S:
            if now - self._beaten_at >= SILENCE_S / 2:
                # This process was not scheduled; the coordinator's beats wait in the socket.
                self._heard_at = now
            self._beaten_at = now
            beat: dict[str, Any] = {"type": "beat"}
            if (child := self._child) is not None and not child.is_reported:
                beat |= {"generation": child.order.generation, "progress": asdict(child.progress_now)}
            channel.send(beat)
        if now - self._heard_at > SILENCE_S:
            raise ConnectionError(f"no message from the coordinator for {SILENCE_S:g} s")
        child = self._child
        if child is None:
            return
        # Drain deadlines are in cluster time; the child uses the coordinator's clock.
        deadlines = [self._draining[node] for node in self._draining.keys() & set(child.order.rank_nodes)]
        earliest = min((one + child.order.ahead_s for one in deadlines if one is not None), default=None)
        child.progress.set_notice(Notice(deadline=earliest) if deadlines else None)
        if child.stacks_at is not None:
            text, left = read_dump(child.stacks, _MOST_STACKS_BYTES)
            if left is not None or now >= child.stacks_at:
                child.stacks_at = None
                if self._launched is not None and (stderr := self._launched.stderr.end()):
                    # NCCL's watchdog reports its findings there.
                    text += f"\n\nthe last lines of the child's stderr:\n{stderr}"
                generation = child.order.generation
                channel.send({"type": "stacks", "generation": generation, "text": text, "left": left or ""})
        if child.kill_at is not None and now >= child.kill_at:
            child.kill_at = now + child.order.end_s
            self._kill_all()
        elif child.pid is not None and child.failure is None and child.kill_at is None:
            self._look_for_stop(child, now)

    def _ask_for_stacks(self) -> None:
        """Make the child dump its stacks and flight record, which `_watch` sends a moment later."""
        child = self._child
        if child is None or child.pid is None or child.stacks_at is not None:
            return
        # The child shares this descriptor's file offset.
        os.ftruncate(child.stacks, 0)
        os.lseek(child.stacks, 0, os.SEEK_SET)
        child.stacks_at = time.monotonic() + _STACKS_S
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, STACKS_SIGNAL)

    def _look_for_stop(self, child: WatchedChild, now: float) -> None:
        assert child.pid is not None and self._launched is not None
        # A child has a process ID only after its launcher was ready.
        assert self._launched.pid is not None
        child.failure = child.find_stop(self._launched.pid, now)
        if child.failure is not None and process_state(self._launched.pid) == "T":
            # A stopped launcher would not report the child's end.
            self._kill_all()
        elif child.failure is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)

    def _listen(self) -> socket.socket:
        listener = listen(self._host)
        self._port = int(listener.getsockname()[1])
        return listener

    def _launch(self) -> LauncherProcess:
        if self._launched is None:
            self._launched = LauncherProcess(self._launcher)
            self._selector.register(self._launched, selectors.EVENT_READ)
            self._selector.register(self._launched.stderr, selectors.EVENT_READ)
        return self._launched

    def _kill_all(self) -> None:
        if self._child is not None and self._child.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGKILL)
        if self._launched is not None:
            self._launched.kill()

    def _forget_launcher(self) -> int:
        launched, self._launched = self._launched, None
        if launched is None:
            return 0
        self._selector.unregister(launched)
        self._selector.unregister(launched.stderr)
        return launched.end(END_S if self._child is None else self._child.order.end_s)

    def _end(self) -> None:
        self._kill_all()
        self._forget_launcher()
        if self._child is not None:
            self._child.close()
            self._child = None
        self._listener.close()
        self._selector.close()


PROCESS_STOPPED = "the process was stopped (SIGSTOP)"
LAUNCHER_STOPPED = "the launcher was stopped (SIGSTOP)"
_STOPPED_S = 1.0
"""Seconds after which a process that stays stopped (SIGSTOP) is treated as failed."""


@dataclass
class WatchedChild:
    """A child of one generation, as watched by its supervisor."""

    order: Order
    progress: SharedProgress
    stacks: int
    started_at: float
    pid: int | None = None
    is_launcher: bool = False
    result: Result | None = None
    failure: str | None = None
    is_reported: bool = False
    stop_timer: StopTimer = field(default_factory=lambda: StopTimer(_STOPPED_S))
    kill_at: float | None = None
    stacks_at: float | None = None

    @property
    def progress_now(self) -> RankProgress:
        """Current progress. Until the child first reports progress, the launcher may still be importing libraries."""
        state = "" if self.pid is None else process_state(self.pid)
        return self.progress.progress(self.order.rank, idle_since=self.started_at, state=state)

    def find_stop(self, launcher: int, now: float) -> str | None:
        """Return which process has been stopped for too long, the child or its launcher, or None."""
        assert self.pid is not None
        processes = {PROCESS_STOPPED: self.pid, LAUNCHER_STOPPED: launcher}
        stopped = next((text for text, pid in processes.items() if process_state(pid) == "T"), None)
        return stopped if self.stop_timer.is_up(now, is_stopped=stopped is not None) else None

    def close(self) -> None:
        """Release the shared memory."""
        self.progress.close()
        os.close(self.stacks)
