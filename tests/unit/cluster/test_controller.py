"""The watch of a worker group: which workers have ended, which nodes are left, and a stopped process is continued."""

from __future__ import annotations

import os
import signal
import subprocess
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from ray.train.v2._internal.execution.worker_group import WorkerGroupPollStatus
from ray.train.v2._internal.execution.worker_group.poll import WorkerStatus

from ray_ulysses.clock import SystemClock
from ray_ulysses.cluster import controller
from ray_ulysses.cluster.controller import StopWatch, WorkerGroupWatch
from ray_ulysses.elastic import reform
from ray_ulysses.elastic.causes import RankError
from ray_ulysses.elastic.placement import WorkerRange
from ray_ulysses.supervision.order import process_state
from tests.polling import wait_until
from tests.unit.cluster.test_scaling import Members, alive
from tests.unit.peer_memory.test_agent import SetClock


def watch_of(**parts: Any) -> Any:
    """Return a watch of worker groups with these parts instead of Ray's and the coordinator's."""
    watch: Any = WorkerGroupWatch.__new__(WorkerGroupWatch)
    memory = SimpleNamespace(keep=lambda nodes: None, prepare=lambda nodes: None, newest_step=lambda gone: None)
    given: dict[str, Any] = {
        "_addresses": {}, "_gone": frozenset(), "_clock": SystemClock(), "_memory": memory,
        "_judge": SimpleNamespace(judge=lambda cause, noticed: True), "coordinator": Members(),
        "scaling": SimpleNamespace(polled=lambda status: None, leave_out=lambda nodes: None),
    }  # fmt: skip
    for name, part in (given | parts).items():
        setattr(watch, name, part)
    return watch


GONE = RuntimeError("its process is gone")


@pytest.mark.parametrize(
    ("error", "phase", "is_lost", "running"),
    [
        (GONE, "training", False, True), (GONE, "training", True, False), (GONE, "stopping", True, True),
        (GONE, "judging", True, True), (GONE, "ended", False, False), (GONE, "ended", True, False),
        # Ray knows nothing for minutes of one whose supervisor is stopped.
        (None, "training", True, True), (None, "ended", True, False), (None, "ended", False, True),
    ],
)  # fmt: skip
def test_a_worker_that_failed_counts_as_ended_only_once_that_is_decided(
    error: Exception | None, phase: str, is_lost: bool, running: bool
) -> None:
    """A worker that dies after the attempt has ended well must not keep Ray waiting for ever."""
    watch = watch_of()
    workers = {0: SimpleNamespace(is_lost=False), 1: SimpleNamespace(is_lost=is_lost)}
    watch.coordinator.group = SimpleNamespace(phase=phase, gave_up=False, workers=workers)
    status = WorkerStatus(running=True, error=error)
    statuses = {0: WorkerStatus(running=phase != "ended"), 1: status}
    watch.after_worker_group_poll_status(WorkerGroupPollStatus(worker_statuses=statuses))
    assert (status.running, status.error) == (running, None)
    assert bool(watch.coordinator.posted) is (error is not None and not is_lost)
    # If all of Ray's workers are lost, workers that joined later train on, and the run is not finished.
    workers[0].is_lost = True
    polled = WorkerGroupPollStatus(worker_statuses={0: WorkerStatus(running=True, error=GONE)})
    watch.after_worker_group_poll_status(polled)
    assert polled.finished is (phase == "ended") and not polled.errors


QUESTION = reform.Judge(generation=1, errors=(RankError(rank=0, kind="lost", what="x"),), is_final=False)


def answering(monkeypatch: pytest.MonkeyPatch, nodes: list[str], in_reach: set[str]) -> None:
    """Let Ray know these nodes as alive, of which some take connections."""
    entries = [{"NodeID": node, "Alive": True} for node in nodes]
    monkeypatch.setattr(controller, "ray", SimpleNamespace(nodes=lambda: entries))
    for name in ("reachable", "steady_nodes"):
        monkeypatch.setattr(controller, name, lambda *_: dict.fromkeys(in_reach))


def test_slow_nodes_stay_left_and_one_that_was_out_of_reach_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    left_out: list[frozenset[str]] = []
    watch, known, left = watch_of(scaling=SimpleNamespace(leave_out=left_out.append)), ["fast", "slow", "shy"], {"slow"}
    for in_reach in ({"fast", "slow"}, {"fast", "slow", "shy"}):
        answering(monkeypatch, known, in_reach)
        wanted = WorkerRange(least=1, most=3, sp_size=1)
        group = reform.Group(wanted=wanted, workers=alive(*known), unusable=frozenset(left), broken=frozenset({"x"}))
        found, _ = watch._decide(QUESTION, group)
        left = found.nodes
        assert left == {"slow"} | (set(known) - in_reach) and found.draining == {"slow"}
    assert left_out == [{"x"}] * 2, "nor does Ray start workers on a broken one"


def test_the_memory_of_a_node_of_which_every_worker_fell_silent_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its agent takes connections and never answers: each wait for it holds up the recovery by ten seconds."""
    asked: list[Any] = []
    memory = SimpleNamespace(prepare=asked.append, newest_step=asked.append)
    watch = watch_of(_addresses={"well": "h", "stopped": "h"}, _memory=memory)
    answering(monkeypatch, ["well", "stopped"], {"well", "stopped"})
    workers = alive("well", "stopped") | {1: replace(alive("stopped")[0], is_lost=True)}
    group = reform.Group(wanted=WorkerRange(least=1, most=5, sp_size=1), workers=workers, silent=frozenset({"stopped"}))
    found, _ = watch._decide(QUESTION, group)
    assert asked == [{"well": "h"}, {"stopped"}]
    assert not found.nodes, "workers may start there"
    watch._use_nodes({"stopped": "h"})
    assert asked[-1] == {"well": "h", "stopped": "h"}


def test_a_process_that_stays_stopped_is_continued() -> None:
    """A controller that is killed instead costs the start of all workers, who train well meanwhile."""
    process = subprocess.Popen(["sleep", "600"])
    try:
        clock = SetClock()
        watch = StopWatch(process.pid, os.stat("/proc/self/ns/pid").st_ino, clock)
        elsewhere = StopWatch(process.pid, 7, clock)
        watch.look()
        for _ in range(2):
            process.send_signal(signal.SIGSTOP)
            wait_until(lambda: process_state(process.pid) == "T", "it is stopped")
            for one in (watch, elsewhere):
                one.look()
            clock.sleep(2.5)
            watch.look()
            clock.sleep(1.0)
            elsewhere.look()
            assert process_state(process.pid) == "T", "not yet, and not by the watch of another container"
            watch.look()
            wait_until(lambda: process_state(process.pid) == "S", "it goes on")
            watch.look()
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()
