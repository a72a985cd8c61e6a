"""Histories that the simulator of the reducer draws, on real processes: the same workers train after each event."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from ray_ulysses.elastic.placement import WorkerRange, place_workers
from ray_ulysses.elastic.reform import NoReplacement
from tests.distributed.fault_rows import TIMEOUT_S, FaultRows
from tests.distributed.faulty_launcher import plant
from tests.distributed.run_case import make_config, make_corpus
from tests.distributed.supervised import SupervisedRun, training_child
from tests.polling import wait_until
from tests.result_table import ResultTable
from tests.unit.elastic.simulation import REPLAYED, Happened, Simulation

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(2400)]


class Replay:
    """A run in which the events of a simulated one happen."""

    def __init__(self, run: SupervisedRun, names: list[str]) -> None:
        self.run, self.names, self.groups = run, names, 1
        self.gone: set[str] = set()
        self.stopped: dict[str, list[psutil.Process]] = {}
        self.reader = FaultRows(run, ResultTable())
        run.judge = None
        self.happened_at = 0.0

    def tend(self) -> None:
        """Start workers again where the coordinator has left the failure to that, as Ray Train does."""
        run, group = self.run, self.run.coordinator.group
        if group is not None and group.phase == "short":
            run.coordinator.post(NoReplacement())
        if group is None or group.phase != "ended":
            return
        limits = run.config.cluster.workers
        wanted = WorkerRange(least=limits.min, most=limits.max, sp_size=run.config.parallel.sp_size)
        away = self.gone | run.draining | self.stopped.keys()
        per_node = limits.max // len(self.names)
        placed = place_workers({name: per_node for name in self.names if name not in away}, wanted)
        if placed is not None:
            self.groups += 1
            run.begin(dict(enumerate(node for node, count in placed.items() for _ in range(count))), run.session)

    def wait_for(self, trains: tuple[tuple[int, int], tuple[str, ...]]) -> None:
        """Wait until this generation of this group has trained on these nodes since the last event."""
        run = self.run

        def holds() -> bool:
            self.tend()
            seen, group = self.reader.newest(), run.coordinator.group
            if group is None or group.phase != "training" or (self.groups, group.generation) != trains[0]:
                return False
            nodes = tuple(run.nodes[worker] for worker in group.members)
            return nodes == trains[1] == tuple(seen.started.get("rank_nodes", ())) and (
                sum(at > max(self.happened_at, seen.started["time"]) for at in seen.steps.values()) >= 3
            )

        wait_until(
            holds, f"{trains}", timeout_s=TIMEOUT_S, every_s=0.1,
            said=lambda: f"{self.groups} {run.coordinator.group}\n{run.judged}\n{run.logs()}",
        )  # fmt: skip

    def happen(self, one: Happened) -> None:
        """Have an event happen."""
        run = self.run
        print(f"{one}", flush=True)
        if one.worker is not None:
            self._fail(one.what, one.worker)
        elif one.what == "node":
            self.gone.add(one.node)
            run.draining.discard(one.node)
            run.kill_node(one.node)
        elif one.what == "back":
            self.gone.discard(one.node)
        elif one.what == "drain":
            run.draining.add(one.node)
        elif one.what == "cut":
            found = [psutil.Process(pid) for pid in run.pids(one.node)]
            self.stopped[one.node] = [
                each for process in found for each in (process, *process.children(recursive=True))
            ]
            for process in self.stopped[one.node]:
                process.suspend()
        elif one.what == "heals":
            for process in self.stopped.pop(one.node):
                if process.is_running():
                    process.resume()
        self.happened_at = time.time()

    def _fail(self, what: str, worker: int) -> None:
        run, group = self.run, self.run.coordinator.group
        assert group is not None
        supervisor = run.processes[worker].pid
        if what == "worker":
            os.kill(supervisor, signal.SIGKILL)
        elif what == "child":
            child = training_child(supervisor)
            assert child is not None
            os.kill(child, signal.SIGKILL)
        else:
            self.reader.number += 1
            kind = {"bug": "raise", "hang": "hang"}[what]
            rank = group.members.index(worker)
            plant(run.folder, {"number": self.reader.number, "where": "step", "kind": kind, "rank": rank})


@pytest.mark.parametrize(("seed", "nodes", "per_node", "sp_size"), REPLAYED)
def test_a_simulated_history_is_the_same_on_real_processes(
    tmp_path: Path, seed: int, nodes: int, per_node: int, sp_size: int
) -> None:
    simulated = Simulation(seed, nodes=nodes, per_node=per_node, sp_size=sp_size, faults=4)
    simulated.run()
    names = [node.name for node in simulated.nodes]
    config = make_config(
        tmp_path / "runs", make_corpus(tmp_path), run__stop_step=100_000, data__epochs=650, parallel__sp_size=sp_size,
        cluster__workers={"min": sp_size, "max": nodes * per_node}, checkpoint__every_steps=4,
        memory__gradient_checkpointing=False, elastic__hang_timeout_s=20.0, elastic__start_hang_timeout_s=180.0,
    )  # fmt: skip
    places = {worker: names[worker // per_node] for worker in range(nodes * per_node)}
    with SupervisedRun(config, places, tmp_path, pace_s=0.2) as run:
        replay = Replay(run, names)
        for one in simulated.happened:
            assert one.before is not None, "a history in which events wait for one another"
            replay.wait_for(one.before)
            if one.what != "end":
                replay.happen(one)
        history = replay.reader.finish()
    assert [step.step for step in history.steps] == list(range(1, history.step + 1))
    assert history.rows_consumed == history.step * config.data.rows_per_step and history.missing_steps == ()
