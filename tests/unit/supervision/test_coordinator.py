"""The coordinator on real sockets, with supervisors that the test plays."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ray_ulysses.clock import SystemClock
from ray_ulysses.elastic import reform
from ray_ulysses.elastic.hang import HangLimits, RankProgress
from ray_ulysses.elastic.placement import WorkerRange
from ray_ulysses.peer_memory import AgentAddresses, authentication
from ray_ulysses.peer_memory.authentication import NONCE_BYTES, PROOF_BYTES, authenticate, unseal
from ray_ulysses.supervision import coordinator as module
from ray_ulysses.supervision.coordinator import Coordinator, HangWatch
from ray_ulysses.supervision.supervisor import Announcement, encode
from tests.polling import wait_until
from tests.wire_recorder import Recorder, replay

ONE, WANTED = WorkerRange(least=1, most=1, sp_size=1), WorkerRange(least=1, most=2, sp_size=1)
LIMITS = HangLimits(floor_s=30.0, start_s=60.0, evaluation_s=60.0, save_s=60.0, row_s=60.0)


class Played:
    """A supervisor's connection."""

    def __init__(self, to: Announcement, number: int, **changes: Any) -> None:
        self.number, self.socket = number, socket.create_connection((to.host, to.port), timeout=10.0)
        authenticate(self.socket, to.token)
        self.socket.settimeout(10.0)
        first = {"group": to.group, "worker": number, "node": f"n{number}", "host": "h", "port": 70}
        self.socket.sendall(encode({**first, **changes}))
        self.lines = self.socket.makefile("rb")

    def ends(self, generation: int = 1, **fields: Any) -> None:
        message = {"type": "ended", "generation": generation, "port": 71, "step": 2, "stepped": True, **fields}
        self.socket.sendall(encode(message))

    def beats(self, step: int, idle_s: float = 0.0, generation: int = 1, **fields: Any) -> None:
        progress = {
            "rank": self.number, "phase": "step", "step": step, "micro_batch": 0, "idle_s": idle_s, "state": "S",
            "steps": step - 1, "step_s": 1.0, "waits_for_row": False, **fields,
        }  # fmt: skip
        self.socket.sendall(encode({"type": "beat", "generation": generation, "progress": progress}))

    def shows(self, text: str, generation: int = 1, left: str = "") -> None:
        """Answer the question for stacks."""
        self.hears("stacks")
        self.socket.sendall(encode({"type": "stacks", "generation": generation, "text": text, "left": left}))

    def hears(self, do: str) -> dict[str, Any]:
        while line := self.lines.readline():
            message: dict[str, Any] = json.loads(line)
            if message["do"] == do:
                return message
        raise AssertionError(f"the connection ended before {do!r}")

    def close(self) -> None:
        self.lines.close()
        self.socket.close()


class Judged:
    """A judge with a prepared answer."""

    def __init__(self) -> None:
        self.asked: list[reform.Judge] = []
        self.hangs: list[tuple[Any, ...]] = []
        self.answer: bool | Exception = True

    def __call__(self, question: reform.Judge, group: reform.Group) -> tuple[reform.NodesUnusable, bool]:
        self.asked.append(question)
        if isinstance(self.answer, Exception):
            raise self.answer
        return reform.NodesUnusable(nodes=frozenset()), self.answer


@pytest.fixture
def judge() -> Judged:
    return Judged()


def coordinate(judge: Judged, *, gather_s: float = 60.0, memory: Any = None) -> Coordinator:
    return Coordinator(
        judge, "127.0.0.1", gather_s=gather_s, memory=memory or (lambda nodes: None), limits=LIMITS,
        record_hang=lambda *hang: judge.hangs.append(hang), end_s=25.0,
    )  # fmt: skip


@pytest.fixture
def coordinator(judge: Judged) -> Iterator[Coordinator]:
    with contextlib.closing(coordinate(judge)) as one:
        yield one


def _both(coordinator: Coordinator) -> tuple[Played, Played]:
    to = coordinator.begin({0: "n0", 1: "n1"}, WANTED)
    one, two = Played(to, 0), Played(to, 1)
    for rank, played in enumerate((one, two)):
        start = played.hears("start")
        assert abs(start.pop("now") - SystemClock().now()) < 60
        assert start == {
            "do": "start", "generation": 1, "host": "h", "port": 70, "rank": rank, "partner": None,
            "nodes": [0, [["n0", 1], ["n1", 1]], 0], "agents": [0, [], 0], "token": None, "is_tested": False,
            "end_s": 25.0,
        }  # fmt: skip
    return one, two


def test_a_fault_is_judged_and_the_workers_that_are_left_start_again(coordinator: Coordinator, judge: Judged) -> None:
    one, two = _both(coordinator)
    two.close()
    assert one.hears("stop")["generation"] == 1
    one.ends()
    start = one.hears("start")
    assert (start["generation"], start["nodes"], start["port"]) == (2, [1, [], 0], 71)
    (question,) = judge.asked
    assert [(error.rank, error.kind) for error in question.errors] == [(1, "lost")]
    one.ends(generation=2, status="finished")
    assert one.hears("finish")["status"] == "finished"


def test_an_order_names_what_has_changed_since_the_last_one_to_the_same_worker(judge: Judged) -> None:
    def memory(nodes: Sequence[str]) -> list[AgentAddresses]:
        agents = {node: f"{node}:1" for node in nodes}
        return [AgentAddresses(agents=agents, node=node, partner=None, token="t") for node in nodes]

    with contextlib.closing(coordinate(judge, memory=memory)) as coordinator:
        to = coordinator.begin({0: "n0", 1: "n1"}, WANTED)
        one, two = Played(to, 0), Played(to, 1)
        for played in (one, two):
            assert played.hears("start")["agents"] == [0, [["n0", "n0:1"], ["n1", "n1:1"]], 0]
        late = Played(to, 2)
        wait_until(lambda: coordinator.group is not None and 2 in coordinator.group.workers, "the late worker")
        two.close()
        one.hears("stop")
        one.ends()
        start = one.hears("start")
        assert (start["nodes"], start["agents"]) == ([1, [["n2", 1]], 0], [1, [["n2", "n2:1"]], 0])
        start = late.hears("start")
        assert (start["rank"], start["nodes"]) == (1, [0, [["n0", 1], ["n2", 1]], 0])
        assert start["agents"] == [0, [["n0", "n0:1"], ["n2", "n2:1"]], 0]


def test_what_a_child_raised_reaches_the_judge_and_a_no_reaches_all(coordinator: Coordinator, judge: Judged) -> None:
    judge.answer = False
    one, two = _both(coordinator)
    two.ends(error={"kind": "raised", "what": "ValueError: boom", "node": "b/10.0.0.2"}, is_final=True)
    one.hears("stop")
    one.ends()
    for played in (one, two):
        assert "ends the run" in played.hears("give up")["reason"]
    (error,) = judge.asked[0].errors
    assert judge.asked[0].is_final and (error.what, error.node) == ("ValueError: boom", "b/10.0.0.2")
    assert coordinator.group is not None and coordinator.group.gave_up


@pytest.mark.parametrize("how", ["raises", "hangs"])
def test_a_judge_that_fails_leaves_the_failure_to_ray(
    coordinator: Coordinator, judge: Judged, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    judge.answer, released = OSError("the storage is away"), threading.Event()
    if how == "hangs":
        monkeypatch.setattr(module, "_JUDGE_S", 0.5)
        monkeypatch.setattr(Judged, "__call__", lambda *_: released.wait(30.0))
    one, two = _both(coordinator)
    two.close()
    one.hears("stop")
    one.ends()
    assert "ends the run" in one.hears("give up")["reason"]
    released.set()


def test_a_supervisor_that_falls_silent_is_lost(
    coordinator: Coordinator, judge: Judged, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SILENCE_S", 0.5)
    silent = Played(coordinator.begin({0: "n0"}, ONE), 0)
    silent.hears("start")
    wait_until(lambda: bool(judge.asked), "the silence is noticed", timeout_s=20.0)
    assert judge.asked[0].errors[0].kind == "lost"
    silent.close()


def test_every_worker_hears_of_the_nodes_that_are_drained(coordinator: Coordinator) -> None:
    one, two = _both(coordinator)
    assert one.hears("beat")["draining"] == {}
    coordinator.announce({"n1": 70.0, "n2": None})
    for worker in (one, two):
        wait_until(lambda worker=worker: worker.hears("beat")["draining"] == {"n1": 70.0, "n2": None}, "a beat")


def test_a_rank_that_hangs_is_named_with_every_stack_and_all_are_ended(
    coordinator: Coordinator, judge: Judged, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_STACKS_S", 60.0)
    one, two = _both(coordinator)
    one.beats(4, idle_s=20.0)
    two.beats(3, idle_s=20.0)
    one.hears("beat")
    assert not judge.hangs, "20 s are allowed"
    one.beats(4, idle_s=31.0)
    two.beats(3, idle_s=31.0)
    one.shows("in all_reduce", left="diagnostics/a/r/rank-0")
    two.shows("in sleep")
    assert one.hears("stop")["generation"] == 1
    one.ends()
    two.ends()
    assert one.hears("start")["generation"] == 2 and two.hears("start")["rank"] == 1
    ((text, stacks),) = judge.hangs
    assert text.startswith("rank 1 ") and "in step 3" in text and "diagnostics/a/r" in text
    assert stacks == {0: "in all_reduce", 1: "in sleep"}
    (question,) = judge.asked
    assert [(error.rank, error.kind) for error in question.errors] == [(1, "lost")]
    assert question.errors[0].what == text, "the run's failure says it too"


def test_workers_that_join_after_the_end_hear_of_it(coordinator: Coordinator, judge: Judged) -> None:
    """All of them may be late, where their storage hung; nobody else would tell them."""
    with contextlib.closing(coordinate(judge, gather_s=0.2)) as late:
        to = late.begin({0: "n0", 1: "n1"}, WANTED)
        wait_until(lambda: late.group is not None and late.group.gave_up, "nobody has joined")
        for number in (0, 1):
            played = Played(to, number)
            assert "too late" in played.hears("give up")["reason"]
            played.close()
    to = coordinator.begin({0: "n0"}, WANTED)
    first = Played(to, 0)
    first.hears("start")
    first.ends(status="finished")
    for played in (first, Played(to, 1)):
        assert played.hears("finish")["status"] == "finished"
        played.close()


def test_strangers_and_workers_of_another_group_are_not_let_in(coordinator: Coordinator) -> None:
    to = coordinator.begin({0: "n0", 1: "n1"}, WANTED)
    with pytest.raises(PermissionError):
        Played(dataclasses.replace(to, token="guess"), 0)
    first = {"token": to.token, "group": to.group, "worker": 0, "node": "n0", "host": "h", "port": 70}
    for content in (b"GET / HTTP/1.1\r\n\r\n", b"[" * 10_000 + b"\n", b'{"token": "\\ud800"}\n', encode(first), b""):
        with socket.create_connection((to.host, to.port), timeout=10.0) as connection:
            connection.sendall(content)
            connection.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionError):
                answer = b"".join(iter(lambda one=connection: one.recv(100), b""))
                assert len(answer) in (0, NONCE_BYTES + PROOF_BYTES)
    for changes in ({"group": 7}, {"worker": 9}):
        other = Played(to, 0, **changes)
        assert other.socket.recv(100) == b""
        other.close()
    group = coordinator.group
    assert group is not None and not any(worker.is_there for worker in group.workers.values())
    assert Played(to, 0).socket.fileno() > 0


@pytest.mark.parametrize(
    "patched", [{"HANDSHAKE_S": 0.2}, {"MOST_PENDING": 2, "HANDSHAKE_S": 60.0}], ids=["slow", "many"]
)
def test_silent_strangers_are_given_up_and_supervisors_join(
    patched: dict[str, float], judge: Judged, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in patched.items():
        monkeypatch.setattr(authentication, name, value)
    with contextlib.closing(coordinate(judge)) as coordinator, contextlib.ExitStack() as stack:
        to = coordinator.begin({0: "n0"}, ONE)
        silent = [stack.enter_context(socket.create_connection((to.host, to.port), 20.0)) for _ in range(4)]
        for stranger in silent[:2]:
            assert stranger.recv(1) == b""
        monkeypatch.undo()
        played = Played(to, 0)
        played.hears("start")
        played.close()


def test_the_group_before_is_forgotten_when_another_begins(coordinator: Coordinator, judge: Judged) -> None:
    one, two = _both(coordinator)
    present = _both(coordinator)
    one.ends(error={"kind": "raised", "what": "late"})
    two.close()
    present[0].hears("beat")
    group = coordinator.group
    assert group is not None and group.phase == "training" and not judge.asked
    coordinator.end()
    assert coordinator.group is None
    assert present[1].lines.read().endswith(b"\n"), "the connections are closed"


def test_a_rank_that_has_ended_is_not_the_one_that_the_others_wait_for(coordinator: Coordinator, judge: Judged) -> None:
    one, two = _both(coordinator)
    one.beats(4, idle_s=40.0, phase="save")
    two.beats(3, idle_s=29.0)
    two.ends(status="finished")
    for _ in range(3):
        one.hears("beat")
    assert not judge.hangs and not judge.asked


def test_the_end_of_a_generation_that_is_over_says_nothing_of_the_next(
    coordinator: Coordinator, judge: Judged, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_STACKS_S", 60.0)
    one, two = _both(coordinator)
    one.ends(error={"kind": "raised", "what": "a fault"})
    assert two.hears("stop")["generation"] == 1
    two.ends()
    assert one.hears("start")["generation"] == two.hears("start")["generation"] == 2
    # As a worker answers that joined late, and was told to stop what it never had.
    two.ends()
    one.beats(4, idle_s=31.0, generation=2)
    two.beats(3, idle_s=31.0, generation=2)
    for played in (one, two):
        played.shows("in sleep", generation=2)
    assert one.hears("stop")["generation"] == 2
    one.ends(generation=2)
    two.ends(generation=2)
    one.hears("start")
    ((text, _),) = judge.hangs
    assert text.startswith("rank 1 "), "it is watched"


def test_neither_token_is_sent_and_a_recorded_connection_admits_nobody(judge: Judged) -> None:
    secret = "the token of peer memory"
    memory = [AgentAddresses(agents={"n0": "127.0.0.1:1"}, node="n0", partner=None, token=secret)]
    with contextlib.closing(coordinate(judge, memory=lambda nodes: memory)) as one:
        to = one.begin({0: "n0"}, ONE)
        recorder = Recorder((to.host, to.port))
        played = Played(dataclasses.replace(to, port=recorder.address[1]), 0)
        start = played.hears("start")
        assert unseal(to.token, start["token"]) == secret
        played.ends(status="finished")
        played.hears("finish")
        for token in (to.token, secret):
            assert token.encode() not in recorder.sent + recorder.answered
            assert token.encode().hex().encode() not in recorder.answered
        assert len(replay((to.host, to.port), bytes(recorder.sent))) in (0, NONCE_BYTES + PROOF_BYTES)


def test_stacks_of_a_false_alarm_are_not_those_of_the_next() -> None:
    watch = HangWatch(LIMITS, 1, 2)

    def both_beat(now: float, idle_s: float) -> None:
        fields: Any = {"phase": "step", "step": int(now), "micro_batch": 0, "state": "S", "steps": 9, "step_s": 1.0}
        for rank in (0, 1):
            watch.hear(RankProgress(rank=rank, idle_s=idle_s, **fields), now)

    for alarm, now in (("first", 100.0), ("second", 200.0)):
        both_beat(now, idle_s=40.0)
        assert watch.find(now) is not None
        assert watch.asks_for_stacks(now) and not watch.asks_for_stacks(now)
        assert watch.stacks(now) is None
        stacks = {rank: f"{alarm} of rank {rank}" for rank in (0, 1)}
        for rank, text in stacks.items():
            watch.hear_stacks(rank, text)
        assert watch.stacks(now) == stacks
        both_beat(now + 1, idle_s=0.0)
        assert watch.find(now + 1) is None


def test_all_supervisors_of_a_large_group_may_connect_at_once(coordinator: Coordinator) -> None:
    """Those that find no room wait for a second and more until the kernel tries again."""
    port = coordinator.begin({0: "n0"}, WANTED).port
    rooms = []
    for link in Path("/proc/self/fd").iterdir():
        if not link.is_socket():
            continue
        with socket.socket(fileno=os.dup(int(link.name))) as one:
            listens = one.family == socket.AF_INET and one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if listens and one.getsockname()[1] == port:
                # Linux gives the length of the listener's queue as `tcpi_sacked`.
                rooms.append(struct.unpack_from("I", one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104), 28)[0])
    assert rooms == [min(1024, int(Path("/proc/sys/net/core/somaxconn").read_text()))]


def test_ranks_that_move_on_while_they_are_asked_for_stacks_are_left_alone(
    coordinator: Coordinator, judge: Judged, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard, hear = list[int](), HangWatch.hear

    def hear_and_note(watch: HangWatch, progress: RankProgress, now: float) -> None:
        hear(watch, progress, now)
        heard.append(progress.step)

    monkeypatch.setattr(HangWatch, "hear", hear_and_note)
    monkeypatch.setattr(module, "_STACKS_S", 60.0)
    one, two = _both(coordinator)
    for played in (one, two):
        played.beats(4, idle_s=31.0)
    one.hears("stacks")
    for played in (one, two):
        played.beats(5)
    wait_until(lambda: heard.count(5) == 2, "the step after")
    # No stacks have come, and none are waited for any longer.
    monkeypatch.setattr(module, "_STACKS_S", 0.0)
    for _ in range(3):
        one.hears("beat")
    assert not judge.hangs and not judge.asked
