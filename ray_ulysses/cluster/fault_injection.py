"""Makes faults happen to a run that trains on a cluster: to its processes, its nodes, its peer memory, its command.

Ray 2.60 tells in its tables, which are private, where the workers of a job are (a canary test covers them).
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, NamedTuple

import psutil
import ray
from ray._private import state
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ray_ulysses.cluster.local_cluster import LocalCluster
from ray_ulysses.cluster.node_watch import drain_node
from ray_ulysses.cluster.session import workers_of_job
from ray_ulysses.cluster.train_command import TrainCommand
from ray_ulysses.cluster.vault_agents import kill_agent
from ray_ulysses.elastic.schedule import Fault, FaultKind
from ray_ulysses.errors import RunError
from ray_ulysses.forensics.recoveries import Strike

_SIGNALS: Mapping[FaultKind, signal.Signals] = {
    "kill-worker": signal.SIGKILL,
    "crash-worker": signal.SIGSEGV,
    "stop-worker": signal.SIGSTOP,
}
_WORDS: Mapping[FaultKind, str] = {"kill-worker": "killed", "crash-worker": "crashed", "stop-worker": "stopped"}
_TARGET_S = 120.0
"""Longest wait for something that a fault can happen to: after the fault before, workers may not have started yet."""
_TASK_S = 60.0
_AGAIN_S = 0.2
_HEAD = "node:__internal_head__"
_AGENT_CLASS = "_Agent"


class Done(NamedTuple):
    """Something that has happened: when, in seconds since the epoch, to what, and the node that is lost by it."""

    at: float
    what: str
    node: str | None = None


class FaultInjector:
    """Makes faults happen to one run.

    Args:
        command: The command that trains it.
        run_key: Returns the name of its peer memory.
        local: The cluster, if it was started for the rehearsal.
        drain_s: Seconds from a drain to the node's end.
        draw: Chooses among nodes and workers.
    """

    def __init__(
        self,
        command: TrainCommand,
        run_key: Callable[[], str],
        *,
        local: LocalCluster | None,
        drain_s: float,
        draw: random.Random,
    ) -> None:
        self._command, self._run_key, self._local = command, run_key, local
        self._drain_s, self._draw = drain_s, draw
        self._doomed: dict[str, float] = {}
        self._acts: Mapping[FaultKind, Callable[[], Done | None]] = {
            **{kind: partial(self._signal_worker, kind) for kind in _SIGNALS},
            "kill-agent": self._kill_agent,
            "kill-driver": self._kill_driver,
            "kill-node": self._kill_node,
            "drain-node": self._drain_node,
            "add-node": self._add_node,
        }

    def inflict(self, fault: Fault) -> Strike:
        """Make a fault happen, as soon as there is something that it can happen to.

        Raises:
            RunError: There is nothing for too long.
        """
        deadline, why = time.monotonic() + _TARGET_S, "no worker of the run was found"
        while self._command.is_running and time.monotonic() < deadline:
            try:
                done = self._acts[fault.kind]()
            except (RayError, OSError, RuntimeError) as error:
                done, why = None, str(error)
            if done is not None:
                return Strike(fault=fault, at=done.at, what=done.what, node=done.node)
            time.sleep(_AGAIN_S)
        raise RunError(f"{fault}: could not be made to happen within {_TARGET_S:g} s ({why})")

    def look(self) -> str | None:
        """Take a drained node of a cluster of ours away when its time is up; return what happened."""
        for node, deadline in self._doomed.items():
            if time.time() >= deadline and self._local is not None and node in self._local.nodes:
                address = self._local.nodes[node]
                self._local.kill_node(node)
                return f"node {address}, which was drained, is gone"
        return None

    def _workers(self) -> list[dict[str, Any]]:
        """Return Ray's entries of the command's workers, by node and process."""
        found = (worker for job in self._jobs() for worker in workers_of_job(job))
        return sorted(found, key=lambda one: (one["Address"]["IPAddress"], one["Pid"]))

    def _jobs(self) -> list[str]:
        pid = self._command.pid
        return [one["JobID"] for one in state.state.job_table() if one["DriverPid"] == pid and not one["IsDead"]]

    def _signal_worker(self, kind: FaultKind) -> Done | None:
        workers = self._workers()
        if not workers:
            return None
        worker = self._draw.choice(workers)
        if self._local is not None:
            at = signal_training(worker["Pid"], _SIGNALS[kind])
        else:
            at = _on_node(worker["Address"]["NodeID"], signal_training, worker["Pid"], _SIGNALS[kind])
        address = worker["Address"]["IPAddress"]
        return None if at is None else Done(at, f"a training process on node {address} is {_WORDS[kind]}")

    def _kill_agent(self) -> Done | None:
        node = self._some_node()
        if node is None or not kill_agent(self._run_key(), node[0]):
            return None
        return Done(time.time(), f"the agent of peer memory on node {node[1]} is killed")

    def _kill_driver(self) -> Done:
        at = time.time()
        self._command.kill()
        self._command.start()
        return Done(at, "the command is killed, and started again")

    def _kill_node(self) -> Done | None:
        node = self._some_node()
        if node is None:
            return None
        at = time.time()
        if self._local is not None:
            self._local.kill_node(node[0])
        else:
            at = _on_node(node[0], kill_own_node, ends=True)
        return Done(at, f"node {node[1]} is lost without notice", node[1])

    def _drain_node(self) -> Done | None:
        node = self._some_node()
        if node is None:
            return None
        at = time.time()
        drain_node(node[0], "a rehearsal", at + self._drain_s)
        self._doomed[node[0]] = at + self._drain_s
        return Done(at, f"node {node[1]} is drained, and is to go in {self._drain_s:g} s", node[1])

    def _add_node(self) -> Done | None:
        if self._local is None:
            return None
        node = self._local.add_node()
        return Done(time.time(), f"node {self._local.nodes[node]} joins")

    def _some_node(self) -> tuple[str, str] | None:
        """Return the id and the address of a node with workers of the run that may be lost."""
        may_go = self._local.nodes if self._local is not None else losable_nodes(self._jobs())
        nodes = {one["Address"]["NodeID"]: one["Address"]["IPAddress"] for one in self._workers()}
        found = [(node, address) for node, address in nodes.items() if node in may_go and node not in self._doomed]
        return self._draw.choice(found) if found else None


def losable_nodes(jobs: Collection[str] = ()) -> dict[str, dict[str, Any]]:
    """Return Ray's entries of the nodes of the connected cluster that a rehearsal may take away, by node id.

    These are neither the head's nor the command's, are not drained already, and no other job has an actor there.

    Args:
        jobs: The rehearsal's own jobs.
    """
    draining, kept = state.state.get_draining_nodes(), {ray.get_runtime_context().get_node_id()}
    for actor in state.actors(actor_state_name="ALIVE").values():
        # Agents of peer memory outlive their job, and hold nothing that its own nodes do not hold.
        if actor["JobID"] not in jobs and not str(actor["ActorClassName"]).endswith(_AGENT_CLASS):
            kept.add(actor["Address"]["NodeID"])
    return {
        node["NodeID"]: node
        for node in ray.nodes()
        if node["Alive"] and _HEAD not in node["Resources"] and node["NodeID"] not in kept | draining.keys()
    }


def signal_training(supervisor: int, number: int) -> float | None:
    """Send a signal to the process that trains under a supervisor on this machine; return when, or None without one."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for launcher in psutil.Process(supervisor).children():
            for child in launcher.children():
                at = time.time()
                child.send_signal(number)
                return at
    return None


def kill_own_node() -> None:
    """Kill Ray on this node, and everything that it has started, this process included."""
    raylet = psutil.Process(os.getppid())
    assert raylet.name() == "raylet", f"the parent of a Ray worker is {raylet.name()}"
    everything = raylet.children(recursive=True)
    raylet.kill()
    for process in everything:
        if process.pid != os.getpid():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    os._exit(1)


def _on_node(node: str, function: Callable[..., float | None], *arguments: Any, ends: bool = False) -> Any:
    """Run a function on a node; of one that ends the node, return when it was called."""
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    task: Any = ray.remote(function)
    at = time.time()
    asked = task.options(num_cpus=0, max_retries=0, scheduling_strategy=there).remote(*arguments)
    try:
        return ray.get(asked, timeout=_TASK_S)
    except RayError:
        if ends:
            return at
        raise
