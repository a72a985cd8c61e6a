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
from typing import Any

import psutil
import ray
from ray._private import state
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ray_ulysses.clock import SystemClock
from ray_ulysses.cluster.local_cluster import LocalCluster
from ray_ulysses.cluster.node_watch import drain_node
from ray_ulysses.cluster.session import workers_of_job
from ray_ulysses.cluster.train_command import TrainCommand
from ray_ulysses.cluster.vault_agents import is_agent, kill_agent
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
_CLOCKS_S = 5.0
"""By how much the clocks of two nodes may differ."""


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
        self._acts: Mapping[FaultKind, Callable[[Fault], Strike | None]] = {
            **dict.fromkeys(_SIGNALS, self._signal_worker),
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
        began, why = time.monotonic(), "no worker of the run was found"
        while self._command.is_running and time.monotonic() - began < _TARGET_S:
            try:
                strike = self._acts[fault.kind](fault)
            except (RayError, OSError, RuntimeError) as error:
                strike, why = None, str(error)
            if strike is not None:
                return strike
            time.sleep(_AGAIN_S)
            self.look()
        after = f"within {time.monotonic() - began:.0f} s" if self._command.is_running else "before the command ended"
        raise RunError(f"{fault}: could not be made to happen {after} ({why})")

    @property
    def awaits_an_end(self) -> bool:
        """Whether a drained node of a cluster of ours has yet to go."""
        return self._local is not None and any(node in self._local.nodes for node in self._doomed)

    def look(self) -> str | None:
        """Take a drained node of a cluster of ours away when its time is up; return what happened."""
        for node, deadline in self._doomed.items():
            if time.monotonic() >= deadline and self._local is not None and node in self._local.nodes:
                address = self._local.nodes[node]
                self._local.kill_node(node)
                return f"node {address}, which was drained, is gone"
        return None

    def _workers(self) -> list[dict[str, Any]]:
        """Return Ray's entries of the command's workers, by node and process."""
        found = (worker for job in self._jobs() for worker in workers_of_job(job))
        return sorted(found, key=lambda one: (one["Address"]["IPAddress"], one["Pid"]))

    def _jobs(self) -> list[str]:
        """Return the command's own job; a process of another host or container may have the same number.

        Raises:
            RunError: Which job it is can't be told.
        """
        here, began = ray.util.get_node_ip_address(), self._command.started_at - _CLOCKS_S
        jobs = [
            one["JobID"]
            for one in state.state.job_table()
            if one["DriverPid"] == self._command.pid
            # The nodes of a cluster of ours have addresses of their own on one machine.
            and (self._local is not None or one["DriverIPAddress"] == here)
            and not one["IsDead"]
            and one["StartTime"] / 1000 >= began
        ]
        if len(jobs) > 1:
            raise RunError(f"the jobs {', '.join(jobs)} of Ray have one process: which one trains can't be told")
        return jobs

    def _signal_worker(self, fault: Fault) -> Strike | None:
        workers = self._workers()
        if not workers:
            return None
        worker = self._draw.choice(workers)
        if self._local is not None:
            at = signal_training(worker["Pid"], _SIGNALS[fault.kind])
        else:
            at = _on_node(worker["Address"]["NodeID"], signal_training, worker["Pid"], _SIGNALS[fault.kind])
        address = worker["Address"]["IPAddress"]
        what = f"a training process on node {address} is {_WORDS[fault.kind]}"
        return None if at is None else Strike(fault=fault, at=at, what=what)

    def _kill_agent(self, fault: Fault) -> Strike | None:
        nodes = {one["Address"]["NodeID"]: one["Address"]["IPAddress"] for one in self._workers()}
        node = self._draw.choice(list(nodes)) if nodes else None
        if node is None or not kill_agent(self._run_key(), node):
            return None
        return Strike(
            fault=fault, at=SystemClock().now(), what=f"the agent of peer memory on node {nodes[node]} is killed"
        )

    def _kill_driver(self, fault: Fault) -> Strike:
        at = SystemClock().now()
        self._command.kill()
        self._command.start()
        return Strike(fault=fault, at=at, what="the command is killed, and started again")

    def _kill_node(self, fault: Fault) -> Strike | None:
        node = self._some_node()
        if node is None:
            return None
        at = SystemClock().now()
        if self._local is not None:
            self._local.kill_node(node[0])
        else:
            at = _on_node(node[0], kill_own_node, ends=True)
        return Strike(fault=fault, at=at, what=f"node {node[1]} is lost without notice", node=node[1])

    def _drain_node(self, fault: Fault) -> Strike | None:
        node = self._some_node()
        if node is None:
            return None
        at = SystemClock().now()
        drain_node(node[0], "a rehearsal", at + self._drain_s)
        self._doomed[node[0]] = time.monotonic() + self._drain_s
        what = f"node {node[1]} is drained, and is to go in {self._drain_s:g} s"
        return Strike(fault=fault, at=at, what=what, node=node[1])

    def _add_node(self, fault: Fault) -> Strike | None:
        if self._local is None:
            return None
        node = self._local.add_node()
        return Strike(fault=fault, at=SystemClock().now(), what=f"node {self._local.nodes[node]} joins")

    def _some_node(self) -> tuple[str, str] | None:
        """Return the id and the address of a node with workers of the run that may be lost."""
        may_go = self._local.nodes if self._local is not None else losable_nodes(self._jobs(), self._run_key())
        nodes = {one["Address"]["NodeID"]: one["Address"]["IPAddress"] for one in self._workers()}
        found = [(node, address) for node, address in nodes.items() if node in may_go and node not in self._doomed]
        return self._draw.choice(found) if found else None


def losable_nodes(jobs: Collection[str] = (), run_key: str = "") -> dict[str, dict[str, Any]]:
    """Return Ray's entries of the nodes of the connected cluster that a rehearsal may take away, by node id.

    These are neither the head's nor the command's, are not drained already, and have neither an actor nor the driver of
    another job. Plain tasks of other jobs are not seen: Ray runs them again elsewhere.

    Args:
        jobs: The rehearsal's own jobs.
        run_key: Names the rehearsal's peer memory, whose agents belong to no job once their driver has ended.
    """
    draining, kept = state.state.get_draining_nodes(), {ray.get_runtime_context().get_node_id()}
    for actor in state.actors().values():
        is_own = actor["JobID"] in jobs or (run_key and is_agent(actor, run_key))
        if actor["State"] != "DEAD" and not is_own:
            kept.add(actor["Address"]["NodeID"])
    drivers = {
        one["DriverIPAddress"] for one in state.state.job_table() if not one["IsDead"] and one["JobID"] not in jobs
    }
    return {
        node["NodeID"]: node
        for node in ray.nodes()
        if node["Alive"]
        and _HEAD not in node["Resources"]
        and node["NodeID"] not in kept | draining.keys()
        and node["NodeManagerAddress"] not in drivers
    }


def signal_training(supervisor: int, number: int) -> float | None:
    """Send a signal to the process that trains under a supervisor on this machine; return when, or None without one."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for launcher in psutil.Process(supervisor).children():
            for child in launcher.children():
                at = SystemClock().now()
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
    """Run a function on a node; of one that ends the node, return when it was called, once that is known to be dead.

    Raises:
        RayError: It could not be run there in time, and is not going to be, or it has failed.
    """
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    task: Any = ray.remote(function)
    at = SystemClock().now()
    asked = task.options(num_cpus=0, max_retries=0, scheduling_strategy=there).remote(*arguments)
    try:
        return ray.get(asked, timeout=_TASK_S)
    except GetTimeoutError:
        # It must not happen later, to whatever trains then.
        ray.cancel(asked, force=True)
        raise
    except RayTaskError:
        raise
    except RayError:
        if ends and _is_gone(node):
            return at
        raise


def _is_gone(node: str) -> bool:
    """Wait until the cluster's head knows that a node is dead; return whether it does."""
    deadline = time.monotonic() + _TASK_S
    while time.monotonic() < deadline:
        if not any(one["NodeID"] == node and one["Alive"] for one in ray.nodes()):
            return True
        time.sleep(_AGAIN_S)
    return False
