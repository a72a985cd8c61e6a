"""Faults on real processes without Ray: each in each phase, and histories that the reducer's simulator draws."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import psutil
import pytest

from ray_ulysses.config import Config
from ray_ulysses.elastic.placement import WorkerRange, place_workers
from ray_ulysses.elastic.reform import NoReplacement
from ray_ulysses.run.trackers import tracked
from ray_ulysses.tracking.events import RunHung
from ray_ulysses.tracking.history import read_history
from ray_ulysses.tracking.mlflow_client import open_client
from ray_ulysses.tracking.mlflow_tracker import TrackingIdentity
from tests.apart import losses_apart
from tests.distributed.agent_process import CUT, DAMAGE
from tests.distributed.fault_rows import TIMEOUT_S, FaultRows
from tests.distributed.faulty_launcher import PLACES, plant
from tests.distributed.harness import free_port
from tests.distributed.run_case import make_config, make_corpus
from tests.distributed.supervised import SupervisedRun, training_child
from tests.polling import wait_until
from tests.result_table import ResultTable
from tests.unit.elastic.simulation import REPLAYED, Happened, Simulation
from tests.unit.tracking.journals import read_events
from tests.unit.tracking.test_mlflow_server import Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(5400)]
PACE_S = 0.4
"""A step takes so long: longer than to copy a state, so that a fault costs a step at most."""
SAVE_EVERY = 4
PHASES = ("start", "load", "step", "save")
WITHOUT_SAVE = SAVE_EVERY * 4
"""Steps that may lie between a checkpoint and the fault: saves in the background while others are due."""


@contextmanager
def faulty(
    folder: Path, table: ResultTable, nodes: int, start_hang_s: float = 180.0, **overrides: Any
) -> Iterator[FaultRows]:
    """A run that faults strike; at its end rows, their order and losses are those of a run without."""
    most = 2 * nodes
    config = make_config(
        folder / "runs", make_corpus(folder), run__stop_step=100_000, data__epochs=650,
        cluster__workers={"min": 2, "max": most}, schedule__horizon_steps=4000, optimizer__lr=1e-4,
        checkpoint__every_steps=SAVE_EVERY, checkpoint__save_timeout_s=10.0, memory__gradient_checkpointing=False,
        elastic__hang_timeout_s=10.0, elastic__start_hang_timeout_s=start_hang_s, **overrides,
    )  # fmt: skip
    places = {worker: "abc"[worker // 2] for worker in range(most)}
    with SupervisedRun(config, places, folder, pace_s=PACE_S) as run, tracked(config, drain_s=120.0):
        rows = FaultRows(run, table)
        yield rows
        history = rows.finish()
    assert history.missing_steps == () and history.damaged_records == ()
    assert [step.step for step in history.steps] == list(range(1, history.step + 1))
    assert history.rows_consumed == history.step * config.data.rows_per_step
    tree = config.model_dump(mode="json", exclude_unset=True)
    tree["run"] |= {"name": "unbroken", "stop_step": history.step}
    tree["cluster"] |= {"workers": 2}
    tree["elastic"], tree["tracking"] = {}, {"enabled": False}
    tree["checkpoint"] |= {"every_steps": history.step}
    (folder / "unbroken").mkdir()
    unbroken = Config.model_validate(tree)
    with SupervisedRun(unbroken, {0: "a", 1: "a"}, folder / "unbroken") as run:
        run.wait_until_ended(timeout_s=1800.0)
    reference = read_history(unbroken.run_dir)
    assert reference.status == "finished" and history.data_digest == reference.data_digest
    apart = losses_apart(history, reference)
    print(f"{history.step} steps beside an unbroken run: losses at most {apart:.1e} apart", flush=True)
    assert apart <= 1e-5


CHILD_FAULTS = {
    "exception": ("raise", r"raised ValueError: planted"),
    "SIGKILL": ("kill", r"killed by signal 9"),
    "SIGSEGV": ("crash", r"killed by signal 11"),
    "SIGSTOP": ("stop", r"stopped"),
    "exit": ("exit", r"exit code 3"),
    "hang": ("hang", r"(has not|no rank has) moved"),
    "skipped collective": ("skip", r"(has|have) not moved|no rank has moved|lost contact|raised"),
}


def test_each_fault_of_a_child_is_survived_in_each_phase(tmp_path: Path, fault_table: ResultTable) -> None:
    with faulty(tmp_path, fault_table, nodes=2, start_hang_s=60.0) as rows:
        for number, (fault, place) in enumerate((fault, place) for fault in CHILD_FAULTS for place in PLACES):
            kind, cause = CHILD_FAULTS[fault]
            rows.strike(fault, place, kind=kind, rank=number % 4, world=4, cause=cause)
    hangs = [event for event in read_events(rows.run.config.run_dir) if isinstance(event, RunHung)]
    assert sum("in fail" in str(hang.stacks) for hang in hangs) >= len(PLACES), "the stacks show where a rank hangs"


def test_a_row_that_comes_late_is_waited_for_longer_than_a_rank_that_hangs(
    tmp_path: Path, fault_table: ResultTable
) -> None:
    with faulty(tmp_path, fault_table, nodes=1) as rows:
        # Longer than five times the longest step, on a busy machine too.
        rows.strike("row late by 60 s", "row", kind="late", world=2, cause=None, goes_on=True, seconds=60.0)
    assert not [event for event in read_events(rows.run.config.run_dir) if isinstance(event, RunHung)]


def test_a_torn_state_is_never_loaded(tmp_path: Path, fault_table: ResultTable) -> None:
    with faulty(tmp_path, fault_table, nodes=2) as rows:
        for number, (name, signal_, place) in enumerate(
            [("damaged copies", DAMAGE, place) for place in PHASES] + [("cut copies", CUT, "step")]
        ):
            rows.wait_until_steady()
            pids = [agent.process.pid for agent in rows.run.agents.values()]
            rows.strike(
                f"torn snapshot: {name}", place, kind="spoil", rank=number % 4, world=4, cause="killed by signal 9",
                from_storage=True, most_lost=WITHOUT_SAVE, pids=pids, signal=int(signal_),
                every=SAVE_EVERY if place == "step" else 1,
            )  # fmt: skip


def test_lost_agents_and_supervisors_are_survived_in_each_phase(tmp_path: Path, fault_table: ResultTable) -> None:
    with faulty(tmp_path, fault_table, nodes=2) as rows:
        for place in PHASES:
            worker, node = rows.members()[-1]
            agent, supervisor = rows.run.agents[node].process.pid, rows.run.processes[worker].pid
            rows.strike("agent dies", place, kind="kill others", world=4, cause=None, goes_on=True, pids=[agent])
            # Now the state is in one agent's memory alone, on the other node.
            rows.strike(
                "supervisor dies", place, kind="kill others", world=2, cause=rf"lost worker {worker}",
                pids=[supervisor], from_memory=place == "step",
            )  # fmt: skip
            rows.begin(2)


def test_lost_nodes_and_a_lost_driver_are_survived_in_each_phase(tmp_path: Path, fault_table: ResultTable) -> None:
    with faulty(tmp_path, fault_table, nodes=2) as rows:
        for place in PHASES:
            pids = rows.run.pids(rows.nodes()[-1])
            rows.strike("node killed", place, kind="kill others", world=2, cause=r"lost worker", pids=pids)
            rows.begin(2)
        for place in PHASES:
            rows.strike("driver killed", place, kind="wait", world=4, cause=None, do=lambda: rows.begin(2))


def test_a_node_and_its_partner_cost_what_storage_has_not(tmp_path: Path, fault_table: ResultTable) -> None:
    with faulty(tmp_path, fault_table, nodes=3) as rows:
        for place in PHASES:
            pids = [pid for node in rows.nodes()[1:] for pid in rows.run.pids(node)]
            rows.strike(
                "node and its partner", place, kind="kill others", world=2, cause=r"lost worker", from_storage=True,
                most_lost=WITHOUT_SAVE, pids=pids,
            )  # fmt: skip
            rows.begin(3)


def test_drained_nodes_are_left_without_a_lost_step(tmp_path: Path, fault_table: ResultTable) -> None:
    drained = {"drain": slice(2, 3), "drain of rank 0's node": slice(0, 1), "drain of two": slice(1, 3)}
    with faulty(tmp_path, fault_table, nodes=3) as rows:
        for (fault, part), place in product(drained.items(), PHASES):
            nodes, generation = rows.nodes()[part], rows.group().generation
            beside = next(rank for rank, (_, node) in enumerate(rows.members()) if node not in nodes)
            rows.strike(
                fault, place, kind="wait", rank=beside, world=6 - 2 * len(nodes), cause=None,
                most_lost=0 if place in ("step", "save") else 1, do=partial(rows.run.draining.update, nodes),
            )  # fmt: skip
            # A generation more where one had to be ended for the fault to strike.
            assert rows.group().generation == generation + 1 + (place in ("start", "load")), "one re-form per notice"
            rows.begin(3)


def test_storage_that_goes_away_stops_no_training_and_a_start_says_so(tmp_path: Path, fault_table: ResultTable) -> None:
    with faulty(tmp_path, fault_table, nodes=1) as rows:
        run_dir = rows.run.config.run_dir
        away = {"kind": "storage away", "run_dir": str(run_dir), "seconds": 4.0}
        for place in ("step", "save"):
            rows.strike("storage away", place, world=2, cause=None, goes_on=True, **away)
        # Without storage nobody knows whether another attempt has taken the run over.
        rows.strike_to_the_end("storage away", "start", cause=r"repair the storage", **away)
        wait_until((run_dir / "checkpoints").is_dir, "storage is back", timeout_s=60.0)
        rows.begin(1)


def test_mlflow_that_goes_away_stops_nothing(tmp_path: Path, fault_table: ResultTable) -> None:
    (tmp_path / "server").mkdir()
    server = Server(tmp_path / "server", free_port())
    server.start()
    tracking = {"tracking__enabled": True, "tracking__uri": server.uri}
    try:
        with faulty(tmp_path, fault_table, nodes=1, **tracking) as rows:
            for place in PHASES:
                rows.strike("MLflow away", place, kind="wait", world=2, cause=None, goes_on=True, do=server.stop)
                rows.wait_until_steady()
                server.start()
        run_dir = rows.run.config.run_dir
        identity: Any = TrackingIdentity.load(run_dir)
        logged = {one.step for one in open_client(server.uri).get_metric_history(identity.run_id, "train/loss")}
        assert logged == set(range(1, read_history(run_dir).step + 1)), "what was not logged at once was kept"
    finally:
        server.stop()


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
