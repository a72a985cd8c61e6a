"""Runs supervisors as plain processes beside a coordinator in the test's process: re-forming without Ray."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
from ray.train import ScalingConfig

from ray_ulysses.cluster import scaling
from ray_ulysses.cluster.scaling import WorkerScaling
from ray_ulysses.config import Config
from ray_ulysses.elastic import reform
from ray_ulysses.elastic.placement import WorkerRange
from ray_ulysses.peer_memory import AgentAddresses, partners
from ray_ulysses.run.settings import resolve_run
from ray_ulysses.supervision.coordinator import Coordinator, hang_limits
from ray_ulysses.tracking.failures import record_hang
from tests.distributed.agent_process import AgentProcess
from tests.distributed.run_case import prepare_attempt
from tests.polling import wait_until

_LOOK_EVERY_S = 0.2


@dataclass
class SupervisedRun:
    config: Config
    nodes: Mapping[int, str]
    folder: Path
    verdicts: list[bool] = field(default_factory=list)
    pace_s: float = 0.0
    waits_for_copies: bool = False
    judge: Callable[[reform.Judge, reform.Group], bool] | None = None
    agents: dict[str, AgentProcess] = field(default_factory=dict)
    judged: list[reform.Judge] = field(default_factory=list)
    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    draining: set[str] = field(default_factory=set)
    session: str = "session"

    def __enter__(self) -> SupervisedRun:
        self._groups, self._closed, self._changing = 0, threading.Event(), threading.RLock()
        self._environment = {"FAULTS": str(self.folder), "PACE_S": str(self.pace_s)}
        self._environment |= {"WAITS_FOR_COPIES": "1"} if self.waits_for_copies else {}
        self.begin(self.nodes)
        self._drains = threading.Thread(target=self._follow_drains, daemon=True)
        self._drains.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closed.set()
        self._drains.join()
        self.end_workers()
        self.coordinator.close()
        for agent in self.agents.values():
            agent.kill()

    def begin(self, nodes: Mapping[int, str], session: str = "session") -> None:
        """Start workers, by another driver if it was lost or the session is new; what agents hold stays."""
        with self._changing:
            self._begin(nodes, session)

    def _begin(self, nodes: Mapping[int, str], session: str) -> None:
        self.end_workers()
        self.nodes = dict(nodes)
        limits = self.config.cluster.workers
        wanted = WorkerRange(least=limits.min, most=limits.max, sp_size=self.config.parallel.sp_size)
        if not self._groups or session != self.session:
            self.session = session
            prepare_attempt(self.config, session)
            self.coordinator = Coordinator(
                self._judge, "127.0.0.1", gather_s=120.0, memory=self.memory, limits=hang_limits(self.config),
                record_hang=partial(record_hang, self.config.run_dir, writer="controller"),
            )  # fmt: skip
        self._groups += 1
        announcement = self.coordinator.begin(self.nodes, wanted)
        for worker, node in self.nodes.items():
            order = pickle.dumps((announcement, worker, node, self.config.model_dump(mode="json"), session))
            log = (self.folder / f"worker-{self._groups}-{worker}.log").open("wb")
            self.processes[worker] = subprocess.Popen(
                [sys.executable, "-m", "tests.distributed.supervisor_process", order.hex()],
                stdout=log, stderr=log, start_new_session=True, env=os.environ | self._environment,
            )  # fmt: skip
            log.close()

    def end_workers(self) -> None:
        """Kill the workers, and wait until nothing that they have started is left."""
        for process in self.processes.values():
            process.kill()
            process.wait()
        self.processes.clear()

    def wait_until_ended(self, workers: Collection[int] | None = None, *, well: bool = True, timeout_s: float) -> None:
        """Wait until all workers, or some, have ended."""
        ended = [self.processes[worker] for worker in (self.processes if workers is None else workers)]
        wait_until(
            lambda: all(one.poll() == 0 if well else one.poll() is not None for one in ended), "the end",
            timeout_s=timeout_s, said=self.logs,
        )  # fmt: skip

    def lose_driver(self) -> None:
        """End the coordinator as the death of its process does; the supervisors end by themselves."""
        self.coordinator.end()
        self.coordinator.close()

    def pids(self, node: str) -> list[int]:
        agent = [self.agents[node].process.pid] if node in self.agents else []
        return agent + [self.processes[worker].pid for worker, its_node in self.nodes.items() if its_node == node]

    def kill_node(self, node: str) -> None:
        """Kill all that runs on a node at once, its part of the peer memory included."""
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in self.pids(node):
                os.kill(pid, number)

    def own_processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("FAULTS") == str(self.folder) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def memory(self, nodes: Sequence[str]) -> list[AgentAddresses] | None:
        if not self.config.elastic.peer_memory:
            return None
        for node in dict.fromkeys(nodes):
            if node not in self.agents or not self.agents[node].is_alive:
                self.agents[node] = AgentProcess.start(self._environment)
        agents = {node: agent.address for node, agent in self.agents.items() if agent.is_alive}
        pairs = partners(dict.fromkeys(nodes))
        return [AgentAddresses(agents=agents, node=node, partner=pairs[node], token="token") for node in nodes]

    def logs(self) -> str:
        return "\n".join(f"{path.name}:\n{path.read_text()[-3000:]}" for path in sorted(self.folder.glob("worker-*")))

    def lost_nodes(self) -> frozenset[str]:
        processes = dict(self.processes)
        alive = {
            node for worker, node in self.nodes.items() if worker in processes and processes[worker].poll() is None
        }
        return frozenset(self.nodes.values()) - alive

    def _judge(self, question: reform.Judge, group: reform.Group) -> tuple[reform.NodesUnusable, bool]:
        self.judged.append(question)
        lost = self.lost_nodes()
        unusable = reform.NodesUnusable(nodes=lost | self.draining, draining=self.draining - lost)
        if self.judge is not None:
            return unusable, self.judge(question, group)
        return unusable, self.verdicts.pop(0) if self.verdicts else not question.is_final

    def _follow_drains(self) -> None:
        """Look at the nodes as the cluster's scaling policy does, which has members leave those that are draining."""
        limits = self.config.cluster.workers
        options: Any = ScalingConfig(num_workers=limits.max, resources_per_worker={"CPU": 1.0})
        job = {"session": self.session}
        policy = _Policy(resolve_run(self.config), job, options, self.coordinator, lambda addresses: None)
        while not self._closed.wait(_LOOK_EVERY_S):
            with self._changing:
                steady = frozenset(self.nodes.values()) - self.draining - self.lost_nodes()
                policy.look_at(self.coordinator, steady, dict.fromkeys(self.draining), self.nodes, self.session)


class _Policy(WorkerScaling):
    """The scaling policy on nodes that a test names, which have no room for more workers."""

    def look_at(
        self,
        coordinator: Coordinator,
        steady: Collection[str],
        draining: dict[str, float | None],
        nodes: Mapping[int, str],
        session: str,
    ) -> None:
        """Do what is due about draining nodes."""
        self._placed = {node: [*nodes.values()].count(node) for node in nodes.values()}
        self._session = session
        self._coordinator = coordinator
        cluster = {"steady_nodes": lambda: dict.fromkeys(steady), "draining_nodes": lambda: draining, "reachable": dict}
        with patch.multiple(scaling, **cluster):
            self._look(self._clock.monotonic())

    def _room(self, nodes: Mapping[str, Any], held: Mapping[str, int]) -> dict[str, int]:
        return dict.fromkeys(nodes, 0)


def children(process: int) -> list[int]:
    text = Path(f"/proc/{process}/task/{process}/children").read_text()
    return [int(word) for word in text.split()]


def training_child(supervisor: int) -> int | None:
    try:
        launcher = children(supervisor)
        found = [child for one in launcher for child in children(one)]
    except (OSError, ValueError):
        return None
    return found[0] if found else None
