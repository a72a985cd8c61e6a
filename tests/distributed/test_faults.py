"""The fault matrix without Ray: each fault in each phase, one after the other in runs that go on.

``make test-faults`` runs it and stores the table.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ray_ulysses.config import Config
from ray_ulysses.run.trackers import tracked
from ray_ulysses.tracking.events import RunHung
from ray_ulysses.tracking.history import RunHistory, read_history
from ray_ulysses.tracking.mlflow_client import open_client
from ray_ulysses.tracking.mlflow_tracker import TrackingIdentity
from tests.apart import losses_apart
from tests.distributed.agent_process import CUT, DAMAGE
from tests.distributed.fault_rows import FaultRows
from tests.distributed.faulty_launcher import PLACES
from tests.distributed.harness import free_port
from tests.distributed.run_case import make_config, make_corpus
from tests.distributed.supervised import SupervisedRun
from tests.polling import wait_until
from tests.result_table import ResultTable
from tests.unit.tracking.journals import read_events
from tests.unit.tracking.test_mlflow_server import Server

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(5400)]
PACE_S = 0.4
"""A step takes so long: longer than to copy a state, so that a fault costs a step at most."""
SAVE_EVERY = 4
PHASES = ("start", "load", "step", "save")
WITHOUT_SAVE = SAVE_EVERY * 4
"""Steps that may lie between a checkpoint and the fault: saves in the background while others are due."""


def make_faulty(folder: Path, nodes: int, start_hang_s: float = 180.0, **overrides: Any) -> SupervisedRun:
    most = 2 * nodes
    config = make_config(
        folder / "runs", make_corpus(folder), run__stop_step=100_000, data__epochs=650,
        cluster__workers={"min": 2, "max": most}, schedule__horizon_steps=4000, optimizer__lr=1e-4,
        checkpoint__every_steps=SAVE_EVERY, checkpoint__save_timeout_s=10.0, memory__gradient_checkpointing=False,
        elastic__hang_timeout_s=10.0, elastic__start_hang_timeout_s=start_hang_s, **overrides,
    )  # fmt: skip
    places = {worker: "abc"[worker // 2] for worker in range(most)}
    return SupervisedRun(config, places, folder, pace_s=PACE_S)


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
    with make_faulty(tmp_path, nodes=2, start_hang_s=60.0) as run:
        rows = FaultRows(run, fault_table)
        for number, (fault, place) in enumerate((fault, place) for fault in CHILD_FAULTS for place in PLACES):
            kind, cause = CHILD_FAULTS[fault]
            rows.strike(fault, place, kind=kind, rank=number % 4, world=4, cause=cause)
        history = rows.finish()
        hangs = [event for event in read_events(run.config.run_dir) if isinstance(event, RunHung)]
        assert sum("in fail" in str(hang.stacks) for hang in hangs) >= len(PLACES), "the stacks show where a rank hangs"
    check_against_unbroken(run.config, history, tmp_path)


def test_a_row_that_comes_late_is_waited_for_longer_than_a_rank_that_hangs(
    tmp_path: Path, fault_table: ResultTable
) -> None:
    with make_faulty(tmp_path, nodes=1) as run:
        rows = FaultRows(run, fault_table)
        # Longer than five times the longest step, on a busy machine too.
        rows.strike("row late by 60 s", "row", kind="late", world=2, cause=None, goes_on=True, seconds=60.0)
        assert not [event for event in read_events(run.config.run_dir) if isinstance(event, RunHung)]


def test_a_torn_state_is_never_loaded(tmp_path: Path, fault_table: ResultTable) -> None:
    with make_faulty(tmp_path, nodes=2) as run:
        rows = FaultRows(run, fault_table)
        for number, (name, signal_, place) in enumerate(
            [("damaged copies", DAMAGE, place) for place in PHASES] + [("cut copies", CUT, "step")]
        ):
            rows.wait_until_steady()
            pids = [agent.process.pid for agent in run.agents.values()]
            rows.strike(
                f"torn snapshot: {name}", place, kind="spoil", rank=number % 4, world=4, cause="killed by signal 9",
                from_storage=True, most_lost=WITHOUT_SAVE, pids=pids, signal=int(signal_),
                every=SAVE_EVERY if place == "step" else 1,
            )  # fmt: skip
        history = rows.finish()
    check_against_unbroken(run.config, history, tmp_path)


def test_lost_agents_and_supervisors_are_survived_in_each_phase(tmp_path: Path, fault_table: ResultTable) -> None:
    with make_faulty(tmp_path, nodes=2) as run:
        rows = FaultRows(run, fault_table)
        for place in PHASES:
            worker, node = rows.last_node()
            agent, supervisor = run.agents[node].process.pid, run.processes[worker].pid
            rows.strike("agent dies", place, kind="kill others", world=4, cause=None, goes_on=True, pids=[agent])
            # Now the state is in one agent's memory alone, on the other node.
            rows.strike(
                "supervisor dies", place, kind="kill others", world=2, cause=rf"lost worker {worker}",
                pids=[supervisor], from_memory=place == "step",
            )  # fmt: skip
            rows.begin(2)
        history = rows.finish()
    check_against_unbroken(run.config, history, tmp_path)


def test_lost_nodes_and_a_lost_driver_are_survived_in_each_phase(tmp_path: Path, fault_table: ResultTable) -> None:
    with make_faulty(tmp_path, nodes=2) as run:
        rows = FaultRows(run, fault_table)
        for place in PHASES:
            _, node = rows.last_node()
            rows.strike(
                "node killed", place, kind="kill others", world=2, cause=r"lost worker", pids=run.pids(node)
            )  # fmt: skip
            rows.begin(2)
        for place in PHASES:
            rows.strike("driver killed", place, kind="wait", world=4, cause=None, do=lambda: rows.begin(2))
        history = rows.finish()
    check_against_unbroken(run.config, history, tmp_path)


def test_a_node_and_its_partner_cost_what_storage_has_not(tmp_path: Path, fault_table: ResultTable) -> None:
    with make_faulty(tmp_path, nodes=3) as run:
        rows = FaultRows(run, fault_table)
        for place in PHASES:
            lost = rows.other_nodes()
            rows.strike(
                "node and its partner", place, kind="kill others", world=2, cause=r"lost worker", from_storage=True,
                most_lost=WITHOUT_SAVE, pids=[pid for node in lost for pid in run.pids(node)],
            )  # fmt: skip
            rows.begin(3)
        history = rows.finish()
    check_against_unbroken(run.config, history, tmp_path)


def test_drained_nodes_are_left_without_a_lost_step(tmp_path: Path, fault_table: ResultTable) -> None:
    with make_faulty(tmp_path, nodes=3) as run:
        rows = FaultRows(run, fault_table)
        for fault, choose in {
            "drain": lambda: rows.other_nodes()[-1:],
            "drain of rank 0's node": lambda: [rows.first_node()],
            "drain of two": rows.other_nodes,
        }.items():
            for place in PHASES:
                nodes = choose()
                generation = rows.generation()
                rows.strike(
                    fault, place, kind="wait", rank=rows.rank_beside(nodes), world=6 - 2 * len(nodes), cause=None,
                    most_lost=0 if place in ("step", "save") else 1, do=partial(run.draining.update, nodes),
                )  # fmt: skip
                # A generation more where one had to be ended for the fault to strike.
                assert rows.generation() == generation + 1 + (place in ("start", "load")), "one re-form per notice"
                rows.begin(3)
        history = rows.finish()
    check_against_unbroken(run.config, history, tmp_path)


def test_storage_that_goes_away_stops_no_training_and_a_start_says_so(tmp_path: Path, fault_table: ResultTable) -> None:
    with make_faulty(tmp_path, nodes=1) as run:
        rows = FaultRows(run, fault_table)
        away = {"kind": "storage away", "run_dir": str(run.config.run_dir), "seconds": 4.0}
        for place in ("step", "save"):
            rows.strike("storage away", place, world=2, cause=None, goes_on=True, **away)
        # Without storage nobody knows whether another attempt has taken the run over.
        rows.strike_to_the_end("storage away", "start", cause=r"repair the storage", **away)
        wait_until((run.config.run_dir / "checkpoints").is_dir, "storage is back", timeout_s=60.0)
        rows.begin(1)
        history = rows.finish()
    check_against_unbroken(run.config, history, tmp_path)


def test_mlflow_that_goes_away_stops_nothing(tmp_path: Path, fault_table: ResultTable) -> None:
    port = free_port()
    (tmp_path / "server").mkdir()
    server = Server(tmp_path / "server", port)
    server.start()
    tracking = {"tracking__enabled": True, "tracking__uri": server.uri}
    try:
        with make_faulty(tmp_path, nodes=1, **tracking) as run, tracked(run.config, drain_s=120.0):
            rows = FaultRows(run, fault_table)
            for place in PHASES:
                rows.strike("MLflow away", place, kind="wait", world=2, cause=None, goes_on=True, do=server.stop)
                rows.wait_until_steady()
                server.start()
            history = rows.finish()
        identity = TrackingIdentity.load(run.config.run_dir)
        assert identity is not None and identity.run_id is not None
        told = open_client(server.uri).get_metric_history(identity.run_id, "loss")
        assert {metric.step for metric in told} == set(range(1, history.step + 1)), "what was not told at once was kept"
    finally:
        server.stop()
    check_against_unbroken(run.config, history, tmp_path)


def check_against_unbroken(config: Config, history: RunHistory, folder: Path) -> None:
    """Check that rows, their order and losses are those of a run that nothing has happened to."""
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
        processes = run.processes.values()
        wait_until(lambda: all(one.poll() is not None for one in processes), "the end", timeout_s=1800.0, said=run.logs)
    reference = read_history(unbroken.run_dir)
    assert reference.status == "finished" and history.data_digest == reference.data_digest
    apart = losses_apart(history, reference)
    print(f"{history.step} steps beside an unbroken run: losses at most {apart:.1e} apart", flush=True)
    assert apart <= 1e-5
