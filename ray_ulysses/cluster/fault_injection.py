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
from ray_ulysses.errors import RunError
from ray_ulysses.rehearsal.recoveries import Strike
from ray_ulysses.rehearsal.schedule import LOSES_A_NODE, Fault, FaultKind

_SIGNALS: Mapping[FaultKind, tuple[signal.Signals, str]] = {
    "kill-worker": (signal.SIGKILL, "killed"),
    "crash-worker": (signal.SIGSEGV, "crashed"),
    "stop-worker": (signal.SIGSTOP, "stopped"),
}
_TARGET_S = 120.0
"""Longest wait for something that a fault can happen to: after the fault before, workers may not have started yet."""
_TASK_S = 60.0
_AGAIN_S = 0.2
_HEAD = "node:__internal_head__"
_CLOCKS_S = 5.0
"""By how much the clocks of two nodes may differ."""


class FaultInjector:
    """Makes faults happen to one run."""

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

    def inflict(self, fault: Fault) -> Strike:
        """Make a fault happen, as soon as there is something that it can happen to.

        Raises:
            RunError: There is nothing for too long.
        """
        began, why = time.monotonic(), "no worker of the run was found"
        while self._command.is_running and time.monotonic() - began < _TARGET_S:
            try:
                strike = self._strike(fault)
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
        found = (worker for job in self._jobs() for worker in workers_of_job(job))
        return sorted(found, key=lambda one: (one["Address"]["IPAddress"], one["Pid"]))

    def _jobs(self) -> list[str]:
        """Return the command's own job; a process of another host or container may have the same number."""
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

    def _strike(self, fault: Fault) -> Strike | None:
        """Make a fault happen; return None if there is nothing now that it could happen to."""
        at: float | None
        at, node, local = SystemClock().now(), None, self._local
        if fault.kind == "kill-driver":
            self._command.kill()
            self._command.start()
            what = "the command is killed, and started again"
        elif fault.kind == "add-node":
            assert local is not None, "refused by the schedule's check on a cluster that others have started"
            what = f"node {local.nodes[local.add_node()]} joins"
        elif fault.kind in LOSES_A_NODE:
            if (found := self._some_node()) is None:
                return None
            node_id, node = found
            if fault.kind == "drain-node":
                drain_node(node_id, "a rehearsal", at + self._drain_s)
                self._doomed[node_id] = time.monotonic() + self._drain_s
                what = f"node {node} is drained, and is to go in {self._drain_s:g} s"
            else:
                what = f"node {node} is lost without notice"
                if local is not None:
                    local.kill_node(node_id)
                else:
                    at = _on_node(node_id, kill_own_node, ends=True)
        elif not (workers := self._workers()):
            return None
        elif fault.kind == "kill-agent":
            nodes = {one["Address"]["NodeID"]: one["Address"]["IPAddress"] for one in workers}
            node_id = self._draw.choice(list(nodes))
            if not kill_agent(self._run_key(), node_id):
                return None
            what = f"the agent of peer memory on node {nodes[node_id]} is killed"
        else:
            worker = self._draw.choice(workers)
            number, word = _SIGNALS[fault.kind]
            if local is not None:
                at = signal_training(worker["Pid"], number)
            else:
                at = _on_node(worker["Address"]["NodeID"], signal_training, worker["Pid"], number)
            if at is None:
                return None
            what = f"a training process on node {worker['Address']['IPAddress']} is {word}"
        return Strike(fault=fault, at=at, what=what, node=node)

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
    """Run a function on a node; of one that ends the node, return when it was called, once that is known to be dead."""
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
    deadline = time.monotonic() + _TASK_S
    while time.monotonic() < deadline:
        if not any(one["NodeID"] == node and one["Alive"] for one in ray.nodes()):
            return True
        time.sleep(_AGAIN_S)
    return False
