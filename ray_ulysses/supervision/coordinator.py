"""Coordinates the supervisors of a worker group: reduces their messages to actions, and carries out the actions.

The coordinator is a thread in Ray Train's controller process, and ends with it. Only this thread changes the group's
state, and only through `elastic.reform.reduce`. The thread also detects hangs from the reported progress.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from ray_ulysses.clock import SystemClock
from ray_ulysses.elastic import reform
from ray_ulysses.elastic.causes import RankError
from ray_ulysses.elastic.hang import RECENT_STEPS, Hang, HangLimits, RankProgress, find_hang
from ray_ulysses.elastic.placement import WorkerRange
from ray_ulysses.elastic.reform import END_S
from ray_ulysses.logging import get_logger
from ray_ulysses.peer_memory.authentication import Gate, seal
from ray_ulysses.peer_memory.store import AgentAddresses
from ray_ulysses.supervision.supervisor import (
    BACKLOG,
    BEAT_S,
    LOOK_EVERY_S,
    Announcement,
    Entries,
    changes,
    encode,
    listen,
)

if TYPE_CHECKING:
    from ray_ulysses.config import Config

_log = get_logger(__name__)
SILENCE_S = 5.0
"""Seconds of silence after which a supervisor counts as lost: its node is cut off, or its process has stopped."""
_MOST_BYTES = 1 << 20
"""Longest line from a supervisor, in bytes."""
_JUDGE_S = 60.0
"""Longest wait for the decision about a failure or for peer memory addresses, in seconds: the storage may hang."""
_RECORD_S = 2.0
"""Longest wait for recording a hang, in seconds: the storage itself may hang."""

Judge = Callable[[reform.Judge, reform.Group], tuple[reform.NodesUnusable, bool]]
"""Records a generation's failure; returns the unusable nodes, and whether the run may continue."""


@dataclass
class _Connected:
    """A connection to a supervisor."""

    worker: int
    writer: asyncio.StreamWriter
    heard_at: float
    known: tuple[Entries, Entries] = ([], [])
    """Nodes and agents of the last order that was sent to this worker."""


@dataclass
class _Present:
    """The current worker group and its connections."""

    number: int
    group: reform.Group
    connections: dict[int, _Connected] = field(default_factory=dict)
    ranks: dict[int, int] = field(default_factory=dict)
    """Rank of each worker of the generation that `hangs` watches."""
    hangs: HangWatch | None = None


class Coordinator:
    """Coordinates one worker group after another.

    Args:
        judge: Records failures and decides whether the run may continue; called in a separate thread.
        memory: Returns the peer memory addresses for children on the given nodes, one per rank, or None; called in a
            separate thread.
        gather_s: Longest wait for a group's workers to join, in seconds.
        limits: Longest tolerated times without progress.
        record_hang: Records a hang's description and every rank's stacks; called in a separate thread.
        end_s: Longest wait for a killed child to end, in seconds.
        host: Address at which the workers' nodes reach this node.
    """

    def __init__(
        self,
        judge: Judge,
        host: str,
        *,
        memory: Callable[[Sequence[str]], Sequence[AgentAddresses] | None],
        gather_s: float,
        limits: HangLimits,
        record_hang: Callable[[str, Mapping[int, str]], object],
        end_s: float = END_S,
    ) -> None:
        self._gather_s, self._end_s = gather_s, end_s
        self._memory, self._limits, self._record_hang = memory, limits, record_hang
        self._judge, self._host, self._clock = judge, host, SystemClock()
        self._token = secrets.token_hex(16)
        self._gate = Gate(self._token)
        self._present: _Present | None = None
        self._draining: Mapping[str, float | None] = {}
        self._port = 0
        self._tasks: set[asyncio.Task[None]] = set()
        started = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._main(started)), name="coordinator", daemon=True
        )
        self._thread.start()
        started.wait()

    @property
    def group(self) -> reform.Group | None:
        """State of the current worker group, or None before the first group."""
        present = self._present
        return None if present is None else present.group

    def begin(self, nodes: Mapping[int, str], wanted: WorkerRange) -> Announcement:
        """Start coordinating a new worker group, and return the connection details for its supervisors.

        Args:
            nodes: Node of each worker, by worker number.
            wanted: The run's range of workers.
        """

        def begin() -> int:
            number = 1 if self._present is None else self._present.number + 1
            self._drop_connections()
            group = reform.Group(
                wanted=wanted,
                workers={worker: reform.Supervised() for worker in nodes},
                gather_until=self._clock.monotonic() + self._gather_s,
                gather_s=self._gather_s,
                end_s=self._end_s,
            )
            self._present = _Present(number=number, group=group)
            return number

        number = self._in_thread(begin)
        return Announcement(host=self._host, port=self._port, token=self._token, group=number)

    def end(self) -> None:
        """Stop coordinating until the next worker group begins."""

        def end() -> None:
            self._drop_connections()
            self._present = None

        self._in_thread(end)

    def post(self, event: reform.Event) -> None:
        """Queue an event. Thread-safe."""
        self._loop.call_soon_threadsafe(self._reduce, event)

    def announce(self, draining: Mapping[str, float | None]) -> None:
        """Send all draining nodes and their deadlines to the workers. Thread-safe."""
        self._draining = draining

    def close(self) -> None:
        """End the coordinator's thread."""
        self._loop.call_soon_threadsafe(self._closed.set)
        self._thread.join(5.0)

    def _in_thread(self, do: Callable[[], Any]) -> Any:
        async def call() -> Any:
            return do()

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result(10.0)

    async def _main(self, started: threading.Event) -> None:
        self._loop, self._closed = asyncio.get_running_loop(), asyncio.Event()
        listener = listen(self._host)
        self._port = int(listener.getsockname()[1])
        server = await asyncio.start_server(self._serve, sock=listener, limit=_MOST_BYTES, backlog=BACKLOG)
        self._keep(self._tick())
        started.set()
        await self._closed.wait()
        server.close()

    def _keep(self, coroutine: Any) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected = None
        try:
            if not await self._gate.admits_stream(reader, writer):
                return
            connected = self._accept(json.loads(await reader.readline()), writer)
            while connected is not None and (line := await reader.readline()):
                connected.heard_at = self._clock.monotonic()
                if (present := self._present_of(connected)) is not None:
                    self._heard(present, connected.worker, json.loads(line))
        except (OSError, ValueError) as error:
            _log.debug("a connection to the coordinator ended: %s", error)
        finally:
            writer.close()
            if connected is not None and (present := self._present_of(connected)) is not None:
                del present.connections[connected.worker]
                self._reduce(reform.WorkerLost(worker=connected.worker, what="the process is gone"))

    def _present_of(self, connected: _Connected) -> _Present | None:
        """Return the current group if a connection belongs to it and has not been replaced."""
        present = self._present
        return present if present is not None and present.connections.get(connected.worker) is connected else None

    def _accept(self, first: dict[str, Any], writer: asyncio.StreamWriter) -> _Connected | None:
        present = self._present
        if present is None or first["group"] != present.number:
            return None
        # Additional workers may join while others train.
        if present.group.phase == "gathering" and first["worker"] not in present.group.workers:
            return None
        connected = _Connected(worker=first["worker"], writer=writer, heard_at=self._clock.monotonic())
        present.connections[connected.worker] = connected
        place = reform.Place(node=first["node"], host=first["host"], port=first["port"])
        self._reduce(reform.Joined(worker=connected.worker, place=place))
        if present.group.phase == "ended":
            # The worker joined late, and missed the message to the others.
            over = {"do": "finish", "status": present.group.status}
            late = {"do": "give up", "reason": "this worker joined too late"}
            writer.write(encode(late if present.group.gave_up else over))
        return connected

    def _heard(self, present: _Present, worker: int, message: dict[str, Any]) -> None:
        hangs, rank = present.hangs, present.ranks.get(worker)
        # A worker that joined late may report about an earlier generation.
        if hangs is not None and rank is not None and message.get("generation") == hangs.generation:
            match message["type"]:
                case "ended":
                    hangs.done(rank)
                case "stacks":
                    hangs.hear_stacks(rank, str(message["text"]), str(message["left"]))
                case _:
                    hangs.hear(RankProgress(**message["progress"]), self._clock.monotonic())
        if message["type"] != "ended":
            return
        error = message.get("error")
        report = reform.Report(
            status=message.get("status"),
            error=None if error is None else RankError(rank=0, **error),
            step=message["step"],
            stepped=message["stepped"],
            is_final=message.get("is_final", False),
        )
        self._reduce(
            reform.ChildEnded(worker=worker, generation=message["generation"], report=report, port=message["port"])
        )

    def _reduce(self, event: reform.Event) -> None:
        present = self._present
        if present is None:
            return
        present.group, actions = reform.reduce(present.group, event, self._clock.monotonic())
        for action in actions:
            self._act(present, action)

    def _act(self, present: _Present, action: reform.Action) -> None:
        match action:
            case reform.Start():
                self._keep(self._start(present, action))
            case reform.Stop():
                self._send_all(present, {"do": "stop", "generation": action.generation})
            case reform.Judge():
                self._keep(self._ask_judge(present, action))
            case reform.Finish():
                self._send_all(present, {"do": "finish", "status": action.status})
            case reform.GiveUp():
                self._send_all(present, {"do": "give up", "reason": action.reason})

    async def _start(self, present: _Present, start: reform.Start) -> None:
        """Send the members their orders, unless the generation has already failed."""
        places = [present.group.workers[worker].place for worker in start.members]
        rank_nodes = [place.node for place in places if place is not None]
        present.hangs, memory = None, None
        try:
            memory = await asyncio.wait_for(asyncio.to_thread(self._memory, rank_nodes), _JUDGE_S)
        except Exception as error:
            _log.warning("peer memory is not used by this generation (%s)", error)
        group = present.group
        if self._present is not present or group.generation != start.generation or group.phase != "training":
            return
        present.hangs = HangWatch(self._limits, start.generation, len(start.members))
        present.ranks = {worker: rank for rank, worker in enumerate(start.members)}
        nodes: Entries = [[node, len(list(same))] for node, same in groupby(rank_nodes)]
        agents: Entries = [] if memory is None else [list(one) for one in memory[0].agents.items()]
        sealed = None if memory is None else seal(self._token, memory[0].token)
        order = {"generation": start.generation, "host": start.host, "port": start.port, "token": sealed}
        order |= {"is_tested": start.is_tested, "now": self._clock.now(), "end_s": self._end_s}
        # The lists are as long as the cluster: a member gets only the changes since its last order, encoded once for
        # all members that know the same.
        now_known, encoded = (nodes, agents), dict[int, bytes]()
        for rank, worker in enumerate(start.members):
            connected = present.connections.get(worker)
            if connected is None:
                continue
            known, connected.known = connected.known, now_known
            if id(known) not in encoded:
                news = {"nodes": changes(known[0], nodes), "agents": changes(known[1], agents)}
                encoded[id(known)] = encode(order | news)
            own = {"do": "start", "rank": rank, "partner": None if memory is None else memory[rank].partner}
            connected.writer.write(encode(own)[:-2] + b"," + encoded[id(known)][1:])

    async def _ask_judge(self, present: _Present, question: reform.Judge) -> None:
        try:
            judged = asyncio.to_thread(self._judge, question, present.group)
            unusable, may_continue = await asyncio.wait_for(judged, _JUDGE_S)
        except Exception as error:
            # Ray Train then decides.
            _log.warning("could not decide about the failure of a generation (%s)", error)
            group = present.group
            unusable, may_continue = reform.NodesUnusable(nodes=group.unusable, draining=group.draining), False
        if self._present is present:
            self._reduce(unusable)
            self._reduce(reform.Judged(generation=question.generation, may_continue=may_continue))

    def _send_all(self, present: _Present, message: dict[str, Any]) -> None:
        content = encode(message)
        for connected in present.connections.values():
            # The write buffer absorbs a slow receiver; `_tick` drops a silent one.
            connected.writer.write(content)

    async def _tick(self) -> None:
        before = beaten_at = self._clock.monotonic()
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            present, now = self._present, self._clock.monotonic()
            if present is None:
                before = now
                continue
            # Time in which this process was not scheduled does not count as silence.
            own_s, before = max(0.0, now - before - 2 * LOOK_EVERY_S), now
            for connected in tuple(present.connections.values()):
                connected.heard_at += own_s
                if now - connected.heard_at > SILENCE_S:
                    self._drop(present, connected)
            self._reduce(reform.Tick())
            is_due = now - beaten_at >= BEAT_S
            if is_due:
                beaten_at = now
                self._send_all(present, {"do": "beat", "draining": self._draining})
            if is_due or (present.hangs is not None and present.hangs.awaits_stacks):
                await self._look_for_hang(present, now)

    async def _look_for_hang(self, present: _Present, now: float) -> None:
        """If the generation hangs, request every rank's stacks, record the hang, and end the generation."""
        hangs = present.hangs
        hang = hangs.find(now) if hangs is not None and present.group.phase == "training" else None
        if hangs is None or hang is None:
            return
        if hangs.asks_for_stacks(now):
            self._send_all(present, {"do": "stacks"})
        stacks = hangs.stacks(now)
        if stacks is None:
            return
        present.hangs, what = None, hangs.in_words(hang)
        try:
            await asyncio.wait_for(asyncio.to_thread(self._record_hang, what, stacks), _RECORD_S)
        except (OSError, TimeoutError) as error:
            _log.warning("a hang could not be recorded in the journal (%s): %s", error, what)
        self._reduce(
            reform.RanksHung(generation=hangs.generation, ranks=hang.ranks, what=what, silent_s=hang.where.idle_s)
        )

    def _drop(self, present: _Present, connected: _Connected) -> None:
        del present.connections[connected.worker]
        with contextlib.suppress(OSError):
            connected.writer.transport.abort()
        what = f"the supervisor was silent for {SILENCE_S:g} s"
        self._reduce(reform.WorkerLost(worker=connected.worker, what=what, silent_s=SILENCE_S))

    def _drop_connections(self) -> None:
        if self._present is not None:
            connections, self._present.connections = self._present.connections, {}
            for connected in connections.values():
                connected.writer.close()


_STACKS_S = 2.5
"""Longest wait for the ranks' stacks, in seconds."""


def hang_limits(config: Config) -> HangLimits:
    """Return a run's longest tolerated times without progress."""
    elastic = config.elastic
    return HangLimits(
        floor_s=elastic.hang_timeout_s,
        start_s=max(elastic.start_hang_timeout_s, elastic.hang_timeout_s),
        # An evaluation's micro-batch may take as long as a step's.
        evaluation_s=max(elastic.collective_timeout_s, elastic.hang_timeout_s),
        # The row source times out earlier, with a more specific error.
        row_s=elastic.collective_timeout_s + elastic.hang_timeout_s,
        # A save also times out earlier.
        save_s=config.checkpoint.save_timeout_s + elastic.hang_timeout_s,
    )


class HangWatch:
    """Tracks the progress of a generation's ranks."""

    def __init__(self, limits: HangLimits, generation: int, world_size: int) -> None:
        self.generation = generation
        self._limits, self._world_size = limits, world_size
        self._heard: dict[int, tuple[RankProgress, float]] = {}
        self._steps = 0
        self._step_seconds: deque[float] = deque(maxlen=RECENT_STEPS)
        self._asked_at: float | None = None
        self._stacks: dict[int, str] = {}
        self._left: dict[int, str] = {}
        self._done: set[int] = set()

    def hear(self, progress: RankProgress, now: float) -> None:
        """Record a rank's progress, as reported by its supervisor."""
        self._heard[progress.rank] = (progress, now)
        # Ranks step together, so rank 0 suffices. Steps shorter than the reporting interval are missed.
        if progress.rank == 0 and progress.steps > self._steps:
            self._steps = progress.steps
            self._step_seconds.append(progress.step_s)

    def hear_stacks(self, rank: int, text: str, left: str = "") -> None:
        """Record a rank's stacks and its flight record's storage key, which is empty if there is no flight record."""
        self._stacks[rank] = text
        if left:
            self._left[rank] = left

    def done(self, rank: int) -> None:
        """Record that a rank's attempt has ended; the others may still write and save."""
        self._done.add(rank)

    def find(self, now: float) -> Hang | None:
        """Return the current hang, or None if there is none or a rank has not reported yet."""
        heard = [self._heard[rank] for rank in self._heard.keys() - self._done]
        if len(heard) < self._world_size - len(self._done):
            return None
        ranks = [replace(progress, idle_s=progress.idle_s + now - at) for progress, at in heard]
        found = find_hang(ranks, tuple(self._step_seconds), self._limits)
        if found is None:
            self._asked_at = None
        return found

    @property
    def awaits_stacks(self) -> bool:
        """Whether the ranks' stacks have been requested for a hang that persists."""
        return self._asked_at is not None

    def asks_for_stacks(self, now: float) -> bool:
        """Return whether to request the ranks' stacks, which happens once per hang."""
        is_first = self._asked_at is None
        if is_first:
            # Stacks from an earlier false alarm say nothing about this hang.
            self._asked_at, self._stacks, self._left = now, {}, {}
        return is_first

    def stacks(self, now: float) -> dict[int, str] | None:
        """Return the stacks by rank, empty for ranks that sent none, or None while waiting for them."""
        waited_s = 0.0 if self._asked_at is None else now - self._asked_at
        if len(self._stacks) < self._world_size and waited_s < _STACKS_S:
            return None
        return {rank: self._stacks.get(rank, "") for rank in range(self._world_size)}

    def in_words(self, hang: Hang) -> str:
        """Return a hang's description, with the location of its flight records."""
        if not self._left:
            return str(hang)
        folder = next(iter(self._left.values())).rpartition("/")[0]
        missing = self._world_size - len(self._left)
        of_some = f", of all but {missing} of {self._world_size} ranks" if missing else ""
        return f"{hang}; flight records: {folder}{of_some}"
