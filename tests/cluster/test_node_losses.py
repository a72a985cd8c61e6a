"""Nodes that stop, drain or lose a worker: most workers stay as they are, and each row is trained once.

To start all workers again, as Ray Train does, takes most of a minute.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray._private import state
from ray._raylet import GcsClient
from ray.core.generated.autoscaler_pb2 import DrainNodeReason

from ray_ulysses.cluster.local_cluster import LocalCluster
from ray_ulysses.cluster.rehearsal import TrainCommand
from ray_ulysses.cluster.session import ray_session
from ray_ulysses.supervision.order import process_state
from ray_ulysses.tracking.events import AttemptStarted, CheckpointCommitted, StepDone
from ray_ulysses.tracking.history import read_history
from tests.cluster.commands import command_of, started_below
from tests.distributed.run_case import make_config
from tests.polling import wait_until
from tests.unit.cluster.metadata_fakes import fake_metadata
from tests.unit.tracking.journals import read_events

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(900)]
TIMEOUT_S = 400.0
WORKERS = ("RayTrainWorker", "JoinedWorker")


class Run:
    """A run on three nodes of two workers each, and what happens to it."""

    def __init__(self, cluster: LocalCluster, folder: Path, corpus: Path, workers: Any, **changes: Any) -> None:
        self.cluster = cluster
        self.config = make_config(
            folder / "runs", corpus, run__stop_step=100_000, data__epochs=650, cluster__workers=workers,
            cluster__cpus_per_worker=0.9, cluster__data_cpus=0.1, cluster__address=cluster.address,
            checkpoint__every_steps=100_000, elastic__grow_interval_s=1.0, **changes,
        )  # fmt: skip
        path = folder / "config.yaml"
        path.write_text(self.config.to_yaml())
        self.command = TrainCommand(path, folder / "log.txt")
        self.command.start()

    def events(self) -> list[Any]:
        return list(read_events(self.config.run_dir)) if self.config.run_dir.is_dir() else []

    def starts(self) -> list[AttemptStarted]:
        return self.of(AttemptStarted)

    def of(self, kind: type[Any]) -> list[Any]:
        return [one for one in self.events() if isinstance(one, kind)]

    def wait(self, holds: Callable[[], object], what: str) -> None:
        def is_so() -> object:
            assert self.command.is_running, self.command.last_lines
            return holds()

        wait_until(is_so, what, timeout_s=TIMEOUT_S, every_s=0.1, said=lambda: f"{self.command.last_lines}")

    def wait_for_steps(self, steps: int, *, world: int | None = None, since: int = 0) -> int:
        """Wait until the newest attempt, one after ``since`` and of this world size, has trained; return its number."""

        def have_trained() -> bool:
            events = self.events()
            starts = [one for one in events if isinstance(one, AttemptStarted)]
            if not starts or starts[-1].attempt <= since or world not in (None, starts[-1].world_size):
                return False
            number = starts[-1].attempt
            return sum(isinstance(one, StepDone) and one.attempt == number for one in events) >= steps

        self.wait(have_trained, f"{steps} steps on {world} workers, after attempt {since}")
        return self.starts()[-1].attempt

    def members(self) -> list[str]:
        ids = {address: node for node, address in self.cluster.nodes.items()}
        return list(dict.fromkeys(ids[one.rpartition("/")[2]] for one in self.starts()[-1].rank_nodes))

    def supervisors(self, node: str) -> list[psutil.Process]:
        return self._processes(node, WORKERS)

    def trainers(self, node: str) -> list[psutil.Process]:
        launchers = {one.pid for one in self._processes(node, ("ray_ulysses.supervision.launcher",))}
        return [one for one in self.cluster.processes(node) if one.is_running() and one.ppid() in launchers]

    def _processes(self, node: str, marks: tuple[str, ...]) -> list[psutil.Process]:
        return [one for one in self.cluster.processes(node) if any(mark in command_of(one) for mark in marks)]

    def drain(self, node: str, seconds: float) -> None:
        reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        deadline_ms = int((time.time() + seconds) * 1000)
        accepted, text = GcsClient(address=self.cluster.address).drain_node(node, reason, "spot", deadline_ms)
        assert accepted, text

    def end(self) -> None:
        """End the run, and hold what must hold whatever has happened: one attempt trains at a time, each row once."""
        assert self.command.stop(TIMEOUT_S) == 0, self.command.last_lines
        started = {one.attempt: one.time for one in self.starts()}
        for one in self.events():
            if isinstance(one, StepDone | CheckpointCommitted) and one.attempt + 1 in started:
                assert one.time <= started[one.attempt + 1], f"attempt {one.attempt} goes on after it was overtaken"
        history = read_history(self.config.run_dir)
        assert history.status == "stopped" and history.missing_steps == ()
        assert [step.step for step in history.steps] == list(range(1, history.step + 1))
        assert history.rows_consumed == history.step * self.config.data.rows_per_step


@pytest.fixture
def cluster(ray_folder: Path) -> Iterator[LocalCluster]:
    cluster = LocalCluster(cpus_per_node=2)
    try:
        for _ in range(3):
            cluster.add_node()
        yield cluster
    finally:
        cluster.shutdown()


@pytest.fixture
def begin(cluster: LocalCluster, tmp_path: Path, corpus: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def begin(workers: Any, **changes: Any) -> Run:
        runs.append(Run(cluster, tmp_path, corpus, workers, **changes))
        # Many more steps than the first copies in peer memory take, on a busy machine too.
        runs[0].wait_for_steps(30)
        return runs[0]

    try:
        yield begin
    finally:
        for run in runs:
            run.command.kill()


def test_a_killed_ray_worker_is_replaced_and_the_others_stay(begin: Callable[..., Run]) -> None:
    run = begin({"min": 2, "max": 6})
    others, node = run.members()[:2], run.members()[2]
    before = [one.pid for other in others for one in run.supervisors(other)]
    run.supervisors(node)[0].kill()
    first = run.wait_for_steps(3, since=1)
    # It trains on without it, and grows again.
    run.wait_for_steps(3, world=6, since=first - 1)
    assert [one.pid for other in others for one in run.supervisors(other)] == before
    run.end()


def test_a_stopped_controller_and_supervisor_are_continued_and_no_step_is_repeated(begin: Callable[..., Run]) -> None:
    run = begin(6)
    supervisor = run.supervisors(run.members()[-1])[0]
    (controller,) = started_below(None, "SupervisedController")
    for process in (controller, supervisor):
        process.suspend()
        run.wait(lambda process=process: process_state(process.pid) != "T", "it goes on")
        steps = read_history(run.config.run_dir).step
        run.wait(lambda steps=steps: read_history(run.config.run_dir).step >= steps + 5, "the run goes on")
    assert len(run.starts()) == 1
    run.end()


def test_a_stopped_node_is_left_and_its_processes_are_fenced_when_they_go_on(begin: Callable[..., Run]) -> None:
    run = begin({"min": 2, "max": 6})
    node, others = run.members()[-1], run.members()[:-1]
    before = [one.pid for other in others for one in run.supervisors(other)]
    raylet = psutil.Process(run.cluster.processes(node)[0].ppid())
    trainers, stopped = run.trainers(node), [raylet, *run.cluster.processes(node)]
    for process in stopped:
        process.suspend()
    at = time.time()
    left = run.wait_for_steps(3, world=4, since=1)
    # Neither the silence nor the memory of the node is waited for again.
    start = next(one.time for one in run.starts() if one.attempt == left)
    assert start - at < 30.0 and "peer memory" in str(run.starts()[-1].resumed_from)
    for process in stopped:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()
    _, alive = psutil.wait_procs(trainers, timeout=60)
    assert not alive, "what trained there trains on"
    run.wait_for_steps(10, since=left - 1)
    assert [one.pid for other in others for one in run.supervisors(other)] == before
    run.end()


def test_a_node_that_drains_serves_on_when_another_dies_until_a_spare_one_is_ready(begin: Callable[..., Run]) -> None:
    run = begin({"min": 2, "max": 4})
    leaving, dying = run.members()
    supervisors = [one.pid for one in run.supervisors(leaving)]
    run.drain(leaving, 300.0)
    time.sleep(0.5)
    run.cluster.kill_node(dying)
    second = run.wait_for_steps(3, world=2, since=1)
    assert run.members() == [leaving] and [one.pid for one in run.supervisors(leaving)] == supervisors
    run.wait(lambda: leaving not in run.members(), "the spare node trains")
    run.wait_for_steps(3, since=second)
    run.end()


def test_a_notice_of_the_cloud_drains_the_node_and_the_run_saves_before_its_time_is_up(
    begin: Callable[..., Run],
) -> None:
    with fake_metadata() as fake:
        cloud = {"elastic__cloud_notices": "aws", "elastic__cloud_metadata_url": fake.url}
        run = begin(1, parallel__sp_size=1, **cloud)
        run.wait(lambda: fake.asked, "a question")
        with ray_session(run.cluster.address, cpus=0):
            assert state.state.get_draining_nodes() == {}
            deadline = time.time() + 90.0
            fake.aws_interrupts(in_s=90.0)
            run.wait(state.state.get_draining_nodes, "a drained node")
            ((node, until_ms),) = state.state.get_draining_nodes().items()
            address = next(one["NodeManagerAddress"] for one in ray.nodes() if one["NodeID"] == node)
        assert until_ms / 1000 == pytest.approx(deadline, abs=5.0)
        run.wait(lambda: run.of(CheckpointCommitted), "a checkpoint")
        run.end()
    saved = run.of(CheckpointCommitted)[0]
    assert saved.reason == "preemption" and saved.time < deadline
    assert any(one.event == "preemption_notice" for one in run.events())
    assert run.starts()[0].nodes[0].endswith(address)
    assert f"node {address} will be taken away at " in run.command.log.read_text()
