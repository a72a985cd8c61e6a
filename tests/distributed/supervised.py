"""Runs supervisors as plain processes beside a coordinator in the test's process: re-forming without Ray."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from ray_ulysses.config import Config
from ray_ulysses.elastic import reform
from ray_ulysses.elastic.placement import WorkerRange
from ray_ulysses.logging import configure_logging
from ray_ulysses.supervision.channel import Announcement
from ray_ulysses.supervision.coordinator import Coordinator
from ray_ulysses.supervision.hang_watch import hang_limits
from ray_ulysses.supervision.order import Job, MemoryOfPeers
from ray_ulysses.supervision.supervisor import Supervisor
from ray_ulysses.tracking.failures import record_hang
from ray_ulysses.vault import VaultAgent, partners
from tests.distributed.run_case import prepare_attempt


@dataclass
class SupervisedRun:
    """A run of supervised workers, each on a node of the given name.

    Attributes:
        config: The run.
        nodes: The workers' nodes.
        folder: Where logs go.
        verdicts: Answers of the judge, in order; it says yes when they are used up.
    """

    config: Config
    nodes: Mapping[int, str]
    folder: Path
    verdicts: list[bool] = field(default_factory=list)
    unusable: frozenset[str] = frozenset()
    agents: dict[str, VaultAgent] = field(default_factory=dict)
    faults: Sequence[Mapping[str, Any]] = ()
    judged: list[reform.Judge] = field(default_factory=list)
    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __enter__(self) -> SupervisedRun:
        prepare_attempt(self.config, "session")
        if self.config.elastic.peer_memory:
            for node in set(self.nodes.values()):
                self.agents[node] = VaultAgent("token", host="127.0.0.1", limit_bytes=1 << 30)
        self._addresses = {node: agent.start() for node, agent in self.agents.items()}
        self.coordinator = Coordinator(
            self._judge, "127.0.0.1", gather_s=120.0, memory=self._memory, limits=hang_limits(self.config),
            record_hang=partial(record_hang, self.config.run_dir, writer="controller"),
        )  # fmt: skip
        limits = self.config.cluster.workers
        wanted = WorkerRange(least=limits.min, most=limits.max, sp_size=self.config.parallel.sp_size)
        announcement = self.coordinator.begin(self.nodes, wanted)
        for worker, node in self.nodes.items():
            order = pickle.dumps((announcement, worker, node, self.config.model_dump(mode="json")))
            log = (self.folder / f"worker-{worker}.log").open("wb")
            self.processes[worker] = subprocess.Popen(
                [sys.executable, "-m", "tests.distributed.supervised", order.hex()],
                stdout=log, stderr=log, start_new_session=True,
                env={**os.environ, "FAULTS": json.dumps(self.faults)},
            )  # fmt: skip
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()
        self.coordinator.close()
        for agent in self.agents.values():
            agent.close()

    def kill_node(self, node: str) -> None:
        """Kill all that runs on a node, its part of the peer memory included."""
        for worker, its_node in self.nodes.items():
            if its_node == node:
                self.processes[worker].kill()
        if node in self.agents:
            self.agents.pop(node).close()

    def _memory(self, nodes: Sequence[str]) -> MemoryOfPeers | None:
        if not self.agents:
            return None
        agents = {node: self._addresses[node] for node in self.agents}
        return MemoryOfPeers(agents=agents, partners=partners(dict.fromkeys(nodes)), token="token")

    def logs(self) -> str:
        """Return what the workers have printed."""
        return "\n".join(f"{path.name}:\n{path.read_text()[-3000:]}" for path in sorted(self.folder.glob("worker-*")))

    def _judge(self, question: reform.Judge, group: reform.Group) -> tuple[frozenset[str], bool]:
        self.judged.append(question)
        may_continue = self.verdicts.pop(0) if self.verdicts else not question.is_final
        return self.unusable, may_continue


def children(process: int) -> list[int]:
    """Return the children of a process."""
    text = Path(f"/proc/{process}/task/{process}/children").read_text()
    return [int(word) for word in text.split()]


def training_child(supervisor: int) -> int | None:
    """Return the process that trains for a supervisor, if there is one."""
    try:
        launcher = children(supervisor)
        found = [child for one in launcher for child in children(one)]
    except (OSError, ValueError):
        return None
    return found[0] if found else None


def main(order: str) -> None:
    """Supervise one worker."""
    configure_logging()
    # A signal to the test ends the supervisors through their pipes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    announcement, worker, node, config = pickle.loads(bytes.fromhex(order))
    assert isinstance(announcement, Announcement)
    job = Job(
        config=config, session="session", command_started=None, workers_asked=None, node=node,
        local_rank=worker, device="cpu",
    )  # fmt: skip
    supervisor = Supervisor(
        announcement,
        worker=worker,
        cluster_node=node,
        host="127.0.0.1",
        job=job,
        make_streams=None,
        launcher="tests.distributed.faulty_launcher",
    )
    status = supervisor.run()
    sys.stdout.write(f"status {status}\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
