"""The supervisor on a real socket and with real launchers, with a coordinator that the test plays."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_ulysses.clock import SystemClock
from ray_ulysses.peer_memory.authentication import Gate
from ray_ulysses.supervision import supervisor as module
from ray_ulysses.supervision.order import Job, LauncherProcess, Ready, process_state
from ray_ulysses.supervision.shared_progress import SharedProgress
from ray_ulysses.supervision.supervisor import (
    Announcement,
    Channel,
    Entries,
    Supervisor,
    WatchedChild,
    changed,
    changes,
    encode,
    listen,
)
from tests.polling import wait_until
from tests.unit.supervision.slow_launcher import NOTICED

LAUNCHER = "tests.unit.supervision.slow_launcher"


class Played:
    """The coordinator of one supervisor."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        to = Announcement(host="127.0.0.1", port=self._server.getsockname()[1], token="token", group=1)
        job = Job(
            config={"tracking": {"enabled": False}}, session="session", command_started=None, workers_asked=None,
            node="n0", local_rank=0, device="cpu",
        )  # fmt: skip
        self._supervisor = Supervisor(
            to, worker=0, cluster_node="n0", host="127.0.0.1", job=job, make_streams=None, launcher=LAUNCHER
        )
        self.status: str | None = None
        self.draining: dict[str, float | None] = {}
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self.socket, _ = self._server.accept()
        assert Gate(to.token).admits(self.socket)
        # A supervisor that is silent for so long fails the test.
        self.socket.settimeout(30.0)
        self._lines = self.socket.makefile("rb")
        assert json.loads(self._lines.readline())["worker"] == 0

    def _run(self) -> None:
        self.status = self._supervisor.run()

    def starts(self, generation: int, ahead_s: float = 0.0, end_s: float = 1000.0, **changes: Any) -> dict[str, Any]:
        return {
            "do": "start", "generation": generation, "host": "127.0.0.1", "port": 70, "rank": 0,
            "nodes": [0, [["n0", 1]], 0], "agents": [0, [], 0], "partner": None, "token": None, "is_tested": False,
            "now": SystemClock().now() + ahead_s, "end_s": end_s, **changes,
        }  # fmt: skip

    def starts_again(self, generation: int, **changes: Any) -> None:
        """Stop the generation before this one, and start it."""
        self.says({"do": "stop", "generation": generation - 1}, self.starts(generation, **changes))

    def says(self, *messages: dict[str, Any]) -> None:
        self.socket.sendall(b"".join(encode(message) for message in messages))

    def hears(self, kind: str) -> dict[str, Any]:
        """Return the next message of a kind; beats are answered, and other messages fail the test."""
        while True:
            message: dict[str, Any] = json.loads(self._lines.readline())
            if message["type"] == "beat":
                self.says({"do": "beat", "draining": self.draining})
            if message["type"] == kind:
                return message
            assert message["type"] == "beat", message

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.says({"do": "finish", "status": "finished"})
        self._thread.join(30.0)
        self._lines.close()
        self.socket.close()
        self._server.close()


@pytest.fixture
def freed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file without which a child that was killed stays."""
    path = tmp_path / "freed"
    monkeypatch.setenv("TEST_FREED", str(path))
    return path


@pytest.fixture
def played(request: pytest.FixtureRequest, freed: Path) -> Iterator[Played]:
    one = Played()
    try:
        one.says(one.starts(1, end_s=getattr(request, "param", 1000.0)))
        assert one.hears("ended")["status"] == "generation 1"
        yield one
    finally:
        one.close()
    assert one.status == "finished"


def test_it_beats_while_the_memory_of_the_child_before_is_freed(played: Played, freed: Path) -> None:
    played.starts_again(2)
    for _ in range(4):
        assert "generation" not in played.hears("beat")
    freed.touch()
    assert played.hears("ended")["status"] == "generation 2"


@pytest.mark.parametrize(
    ("ahead_s", "is_tested", "status"),
    [(30.0, True, ", tested"), (-31536000.0, False, ", ahead -3.15e+07")],
)
def test_a_child_knows_its_clocks_error_and_whether_all_ranks_are_tested(
    played: Played, freed: Path, ahead_s: float, is_tested: bool, status: str
) -> None:
    freed.touch()
    played.starts_again(2, ahead_s=ahead_s, is_tested=is_tested)
    assert played.hears("ended")["status"] == f"generation 2{status}"


@pytest.mark.parametrize(("until", "told"), [(70.0, "70.0"), (None, "None")])
def test_a_child_hears_of_the_drained_nodes_of_all_ranks_and_of_no_other(
    played: Played, freed: Path, until: float | None, told: str
) -> None:
    freed.touch()
    played.draining = {"n1": until, "another run's": 7.0}
    played.starts_again(2, host=NOTICED, nodes=[1, [["n1", 1]], 0])
    assert played.hears("ended")["status"] == f"noticed {told}"


@pytest.mark.parametrize("played", [0.5], indirect=True)
def test_a_child_that_does_not_go_in_time_is_left_to_the_end_of_its_launcher(played: Played) -> None:
    played.starts_again(2)
    assert played.hears("ended")["status"] == "generation 2"


def test_a_start_that_waits_for_the_child_before_can_be_taken_back(played: Played, freed: Path) -> None:
    played.says({"do": "stop", "generation": 1}, played.starts(2), {"do": "stop", "generation": 2})
    ended = played.hears("ended")
    assert ended["generation"] == 2 and not ended["stepped"] and "status" not in ended
    freed.touch()
    for _ in range(3):
        played.hears("beat")
    played.says(played.starts(3))
    assert played.hears("ended")["status"] == "generation 3"


def test_a_child_that_the_system_has_nothing_left_for_is_reported_as_that(
    played: Played, freed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    freed.touch()
    played.says({"do": "stop", "generation": 1})
    with monkeypatch.context() as patch:
        patch.setattr(module.os, "memfd_create", Mock(side_effect=OSError(24, "Too many open files")))
        played.says(played.starts(2))
        ended = played.hears("ended")
        while ended["generation"] == 1:
            ended = played.hears("ended")
    assert "Too many open files" in ended["error"]["what"]
    played.says(played.starts(3))
    assert played.hears("ended")["status"] == "generation 3"


def test_a_child_that_crashes_is_reported_with_its_node_and_its_last_words(
    played: Played, freed: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    freed.touch()
    played.starts_again(2)
    assert played.hears("ended")["status"] == "generation 2"
    played.starts_again(3, host="aborts")
    ended = played.hears("ended")
    assert (ended["generation"], ended["error"]["kind"], ended["error"]["node"]) == (3, "lost", "n0")
    assert ended["error"]["what"] == "killed by signal 6; the last lines of its stderr: terminate called | what(): no"
    assert "what(): no" in capfd.readouterr().err, "the worker's log has it too"


def test_the_stacks_of_a_child_that_hangs_come_with_its_last_words(played: Played, freed: Path) -> None:
    freed.touch()
    played.starts_again(2, host="waits")
    # Before that, there is no process that could be asked.
    wait_until(lambda: played.hears("beat").get("progress", {}).get("state"), "the child runs")
    text = ""
    while "NCCL WARN no route" not in text:
        played.says({"do": "stacks"})
        text = played.hears("stacks")["text"]


def test_a_launcher_that_says_much_while_it_is_waited_for_is_not_held_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pipe takes 64 KiB."""
    monkeypatch.setenv("TEST_STDERR_BYTES", "300000")
    launched = LauncherProcess(LAUNCHER)
    try:
        assert isinstance(launched.receive(), Ready)
    finally:
        launched.end(20.0)


@pytest.mark.parametrize(("host", "bound"), [("127.0.0.1", "127.0.0.1"), ("203.0.113.77", "0.0.0.0")])
def test_only_the_address_that_others_connect_to_is_listened_at(host: str, bound: str) -> None:
    """An address that is translated on the way to this machine belongs to no interface."""
    with listen(host) as listener:
        assert listener.getsockname()[0] == bound


def test_messages_arrive_complete_however_they_are_split() -> None:
    one, other = socket.socketpair()
    channel, content = Channel(one), encode({"do": "beat"}) + encode({"do": "start", "rank": 3})
    received = []
    for piece in (content[:5], content[5:-1], content[-1:]):
        other.sendall(piece)
        received.append(channel.receive())
    assert received == [[], [{"do": "beat"}], [{"do": "start", "rank": 3}]]
    channel.send({"type": "beat"})
    assert other.recv(100) == b'{"type":"beat"}\n'


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    found = [subprocess.Popen(["sleep", "600"]) for _ in range(2)]
    try:
        yield found
    finally:
        for process in found:
            process.kill()
            process.wait()


@pytest.mark.parametrize("stopped", [module.PROCESS_STOPPED, module.LAUNCHER_STOPPED])
def test_what_is_stopped_for_a_second_is_named(processes: list[subprocess.Popen[bytes]], stopped: str) -> None:
    child, launcher = processes
    order: Any = None
    stacks = os.memfd_create("stacks", os.MFD_CLOEXEC)
    watched = WatchedChild(order=order, progress=SharedProgress.create(), stacks=stacks, started_at=0.0, pid=child.pid)
    one = child if stopped == module.PROCESS_STOPPED else launcher
    assert watched.find_stop(launcher.pid, 10.0) is None
    for begun in (20.0, 40.0):
        one.send_signal(signal.SIGSTOP)
        wait_until(lambda: process_state(one.pid) == "T", "it is stopped")
        assert watched.find_stop(launcher.pid, begun) is None
        assert watched.find_stop(launcher.pid, begun + 0.9) is None
        assert watched.find_stop(launcher.pid, begun + 1.1) == stopped
        # One that goes on within the second was not stopped for long.
        one.send_signal(signal.SIGCONT)
        wait_until(lambda: process_state(one.pid) != "T", "it goes on")
        assert watched.find_stop(launcher.pid, begun + 2.0) is None
    watched.close()


_LISTS = st.lists(st.sampled_from([["a", 1], ["b", 1], ["b", 2], ["c", 8]]), max_size=8)


@given(_LISTS, _LISTS)
def test_changes_restore_the_list(before: Entries, after: Entries) -> None:
    assert changed(before, changes(before, after)) == after


def test_a_lost_node_and_a_new_one_take_as_many_bytes_in_a_large_cluster_as_in_a_small_one() -> None:
    sizes = []
    for num_nodes in (10, 1000):
        nodes: Entries = [[f"{number:056x}", 8] for number in range(num_nodes)]
        news = (changes(nodes, nodes[:5] + nodes[6:]), changes(nodes[1:], [*nodes[1:], ["another", 8]]))
        sizes.append(sum(len(part) for _, part, _ in news))
    assert sizes == [1, 1]
