"""The controller's real parts in a process without Ray: a worker group's watch, its coordinator, the failure policy.

Ray's answers are lists of this process, and each of its nodes answers at this machine's address.
"""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import ray
from ray._private import state
from ray.train.v2._internal.execution.worker_group import WorkerGroupPollStatus
from ray.train.v2._internal.execution.worker_group.poll import WorkerStatus
from ray.train.v2.api.config import ScalingConfig

from ray_ulysses.cluster import peer_memory_agents
from ray_ulysses.cluster.controller import WorkerGroupWatch
from ray_ulysses.cluster.failures import CONTROLLER, FailureJudge, FailureLog
from ray_ulysses.cluster.peer_memory_agents import Contact, NodeMemory
from ray_ulysses.config import Config
from ray_ulysses.config.loading import parse_config
from ray_ulysses.run.settings import resolve_run
from ray_ulysses.tracking.journal import claim_journal

SESSION = "session"
HANG_S = 2.0
"""Seconds without progress after which ranks hang. Steps of half a second allow as many."""


def config_of(storage: Path, workers: int, per_node: int) -> Config:
    """Return the configuration of a run on up to `workers` workers, a sequence-parallel group per node."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "hidden_size": 64, "intermediate_size": 64}
    return parse_config(
        {
            "run": {"name": "run", "storage": str(storage)},
            "model": {
                "init": "random",
                "dtype": "fp32",
                "config": {"model_type": "llama", "vocab_size": 264, "num_hidden_layers": 1, **heads},
            },
            "data": {
                "path": str(storage / "corpus"),
                "context_tokens": 256,
                "rows_per_step": workers,
                "engine": "local",
            },
            "parallel": {"sp_size": per_node},
            "optimizer": {"lr": 3e-4},
            "schedule": {"warmup_steps": 4, "horizon_steps": 60},
            "checkpoint": {"every_steps": 5},
            "tracking": {"enabled": False},
            "cluster": {"workers": {"min": per_node, "max": workers}, "cpus_per_worker": 1.0},
            "elastic": {"hang_timeout_s": HANG_S, "max_failures": 1000},
        }
    )


def node_id(number: int) -> str:
    """Return an id as long as Ray's; workers are placed in the order of the ids."""
    return f"{number:06x}{(number + 1) * 0x9E3779B97F4A7C15F39CC0605CEDC834 % 2**120:050x}"


def host_of_node(number: int) -> str:
    """Return the address that a node would have."""
    return f"10.{number >> 8}.{number & 255}.1"


@dataclass
class Nodes:
    """Ray's view of its nodes."""

    port: int
    """Where every node answers."""
    workers: Counter[str] = field(default_factory=Counter)
    """Workers that each node has room for, all of which are busy."""
    draining: dict[str, int] = field(default_factory=dict)
    dead: set[str] = field(default_factory=set)

    def listed(self) -> list[dict[str, Any]]:
        """Return the nodes as Ray does."""
        return [
            {
                "NodeID": node,
                "Alive": node not in self.dead,
                "NodeManagerAddress": "127.0.0.1",
                "NodeManagerPort": self.port,
                "Resources": {"CPU": float(count)},
                "Labels": {"ray.io/availability-zone": f"zone-{number % 3}"},
            }
            for number, (node, count) in enumerate(self.workers.items())
        ]


def _agents(key: str, nodes: Mapping[str, str], limit: int | None, **_: Any) -> dict[str, Contact]:
    return {
        node: Contact(address=f"{host_of_node(int(node[:6], 16))}:40000", limit_bytes=2**36, token="t" * 32)
        for node in nodes
    }


@contextmanager
def controller_side(folder: Path, workers: int, per_node: int) -> Iterator[tuple[WorkerGroupWatch, Nodes, Path]]:
    """Yield a watch of worker groups, the nodes that it believes in, and the run's directory."""
    config = config_of(folder, workers, per_node)
    assert isinstance(config.run_dir, Path)
    config.run_dir.mkdir(parents=True)
    with ExitStack() as ending, socket.create_server(("127.0.0.1", 0), backlog=1024) as answering:
        nodes = Nodes(port=answering.getsockname()[1])
        for place, name, fake in (
            (ray, "nodes", nodes.listed),
            (ray, "kill", lambda actor: None),
            (ray.util, "get_node_ip_address", lambda: "127.0.0.1"),
            (state.state, "get_draining_nodes", lambda: nodes.draining),
            (state.state, "available_resources_per_node", dict),
            (peer_memory_agents, "ensure_agents", _agents),
            # The listing of agents has a benchmark of its own.
            (NodeMemory, "newest_step", lambda self, gone: None),
        ):
            ending.enter_context(patch.object(place, name, fake))
        log = FailureLog(config=config, session=SESSION, first_attempt=1, writer=CONTROLLER)
        scaling = ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 1.0})
        watch = WorkerGroupWatch(resolve_run(config), log, FailureJudge(log), {"session": SESSION}, scaling)
        watch.scaling._maybe_send_resource_request = lambda: None  # type: ignore[method-assign]
        yield watch, nodes, config.run_dir
        while (present := watch.coordinator._present) is not None and present.connections:
            time.sleep(0.01)
        watch.coordinator.close()


def poll(watch: WorkerGroupWatch, workers: int) -> None:
    """Do what Ray Train's controller does twice per second once it has the workers' answers."""
    watch.after_worker_group_poll_status(
        WorkerGroupPollStatus(worker_statuses={rank: WorkerStatus(running=True) for rank in range(workers)})
    )


class JournalOfRank0:
    """What rank 0 records of an attempt; no other rank has a journal."""

    def __init__(self, run_dir: Path, rank_nodes: list[str]) -> None:
        world = len(rank_nodes)
        self._journal, self.num_steps = claim_journal(run_dir), 0
        self._journal.append(
            {
                "event": "attempt_started", "session": SESSION, "world_size": world, "sp_size": 1, "dp_size": world,
                "nodes": sorted(set(rank_nodes)), "rank_nodes": rank_nodes, "resumed_step": 0, "resumed_from": None,
                "last_step": 100, "plan_ids": ["p"], "versions": {},
            }
        )  # fmt: skip
        self.started_bytes = self.num_bytes

    @property
    def num_bytes(self) -> int:
        """Size of the attempt's file."""
        return Path(self._journal.path).stat().st_size

    def step(self) -> None:
        """Record a step."""
        self.num_steps += 1
        self._journal.append(
            {
                "event": "step", "step": self.num_steps, "loss": 2.5, "tokens": 2**20, "seconds": 0.5,
                "rows": [self.num_steps, self.num_steps + 1], "digest": f"{self.num_steps:016x}",
            }
        )  # fmt: skip

    def close(self) -> None:
        """End the record."""
        self._journal.close()


def train(watch: WorkerGroupWatch, journal: JournalOfRank0, workers: int, seconds: float) -> float:
    """Poll and record steps for some seconds; return the CPU time that this thread needed."""
    began, cpu = time.monotonic(), time.thread_time()
    while time.monotonic() - began < seconds:
        poll(watch, workers)
        journal.step()
        time.sleep(0.5)
    return time.thread_time() - cpu
