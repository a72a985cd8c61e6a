"""Rehearses faults: trains a separately named run, injects faults, and compares the run with its plan.

The run trains until it has recovered from every fault. A run with the same configuration then trains for the same
number of steps without faults, so that the losses can be compared.

A job's workers are looked up in private tables of Ray 2.60 (a canary test covers them).
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import ray
from ray._private import state
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ray_ulysses.clock import SystemClock
from ray_ulysses.cluster.local_cluster import LocalCluster
from ray_ulysses.cluster.node_watch import drain_node
from ray_ulysses.cluster.peer_memory_agents import is_agent, kill_agent
from ray_ulysses.cluster.session import workers_of_job
from ray_ulysses.errors import RunError
from ray_ulysses.rehearsal.recoveries import InjectedFault, Recovery, recoveries
from ray_ulysses.rehearsal.schedule import LOSES_A_NODE, Fault, FaultKind, FaultTargets
from ray_ulysses.report.words import minutes
from ray_ulysses.run.ownership import peer_memory_key
from ray_ulysses.tracking.events import AttemptStarted, Event, StepDone
from ray_ulysses.tracking.history import read_history
from ray_ulysses.tracking.journal_reader import JournalTail
from ray_ulysses.tracking.steps import ungroup_steps

if TYPE_CHECKING:
    from ray_ulysses.config import Config
    from ray_ulysses.run.preflight import PreparedRun

CALM_S = 10.0
"""Seconds of training that must follow the last recovery."""
_LOOK_EVERY_S = 0.5
_REST_S = 5.0
_RECOVERY_S = 300.0
"""Seconds after the last fault within which the run must have recovered."""
_REMIND_EVERY_S = 20.0
_CODE = (
    "import sys; from ray_ulysses.supervision.launcher import die_with_parent; die_with_parent(int(sys.argv[1])); "
    "from ray_ulysses.cli import main; main(sys.argv[2:])"
)
"""Code that the train process runs. It makes the process end when its parent ends; nothing else would."""
_LAST_LINES = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """Parameters of a rehearsal."""

    prepared: PreparedRun
    faults: tuple[Fault, ...]
    for_s: float
    """Shortest training time after the first step, in seconds."""
    drain_s: float
    """Seconds from the start of a drain until the node is killed."""
    targets: FaultTargets
    nodes: int | None
    """Number of nodes to start on this machine, or None to use an existing cluster."""


@dataclass(slots=True)
class _Watch:
    """Follows the run's journal while the run trains."""

    tail: JournalTail
    say: Callable[[str], object]
    most: int
    events: list[Event] = field(default_factory=list)
    injected: list[InjectedFault] = field(default_factory=list)
    began: float | None = None
    said: set[int] = field(default_factory=set)

    def look(self) -> None:
        """Read new journal records, and report each recovery once."""
        self.events += ungroup_steps(self.tail.poll())
        if self.began is None:
            first = next((event for event in self.events if isinstance(event, StepDone)), None)
            if first is not None:
                self.began = first.time
                self.say(f"the run trains on {self.workers} workers; times are relative to its first step")
        for number, one in enumerate(self.found()):
            if one.is_over and number not in self.said:
                self.said.add(number)
                self.say(_recovery_line(one, self.began or 0.0))

    def found(self) -> tuple[Recovery, ...]:
        return recoveries(self.events, self.injected, most=self.most)

    @property
    def workers(self) -> int:
        sizes = [event.world_size for event in self.events if isinstance(event, AttemptStarted)]
        return sizes[-1] if sizes else 0


def rehearse(
    request: Request,
    config: Config,
    folder: Path,
    *,
    local: LocalCluster | None,
    patient: bool,
    seed: int,
    say: Callable[[str], object],
) -> tuple[list[InjectedFault], list[str]]:
    """Train a run while injecting faults; Ray must be connected to the run's cluster.

    Returns the injected faults, and a description of each problem.

    Args:
        request: Faults to inject, and duration of the training.
        config: Configuration of the rehearsal's run, with the cluster's address.
        folder: Directory for the command's configuration file and output.
        local: The local cluster, or None on an existing cluster.
        patient: Whether each fault waits until the run has recovered from the previous fault.
        seed: Seed for choosing nodes and processes.
        say: Prints a line.
    """
    command = _command(config, folder)
    draw, drain_s = random.Random(seed), request.drain_s
    injector = FaultInjector(command, lambda: peer_memory_key(config), local=local, drain_s=drain_s, draw=draw)
    watch, problems = _Watch(JournalTail(config.run_dir), say, config.cluster.workers.max), list[str]()
    command.start()
    try:
        try:
            _run_faults(watch, command, injector, request, patient=patient)
        except RunError as error:
            problems.append(str(error))
        stopped = command.stop(config.checkpoint.save_timeout_s) if command.is_running else command.wait()
        if stopped != 0:
            how = "did not stop in time and was killed" if stopped is None else f"ended with exit code {stopped}"
            problems.append(f"the command {how}; last lines of {command.log}:\n{command.last_lines}")
    finally:
        command.kill()
    return watch.injected, problems


def _run_faults(
    watch: _Watch, command: TrainCommand, injector: FaultInjector, request: Request, *, patient: bool
) -> None:
    """Inject the faults at their scheduled times; return once the run has recovered from all of them or has ended."""
    left, said_at = list(request.faults), time.monotonic()
    over_since: float | None = None
    while command.is_running:
        time.sleep(_LOOK_EVERY_S)
        watch.look()
        gone = injector.look()
        if watch.began is None:
            if time.monotonic() - said_at >= _REMIND_EVERY_S:
                said_at = time.monotonic()
                watch.say("  " + command.last_lines.rpartition("\n")[2])
            continue
        now_s = SystemClock().now() - watch.began
        if gone is not None:
            watch.say(_fault_line(now_s, gone))
        if not all(one.is_over for one in watch.found()):
            over_since = None
        elif over_since is None:
            over_since = now_s
        is_due = bool(left) and now_s >= left[0].at_s
        if is_due and (not patient or (over_since is not None and now_s >= over_since + _REST_S)):
            over_since = None
            injected = injector.inflict(left.pop(0))
            watch.injected.append(injected)
            watch.say(_fault_line(injected.at - watch.began, injected.what))
        elif not left and over_since is not None:
            if now_s >= max(request.for_s, over_since + CALM_S) and not injector.awaits_an_end:
                return
        elif watch.injected and (not left or is_due) and SystemClock().now() - watch.injected[-1].at >= _RECOVERY_S:
            return


def train_unbroken(config: Config, folder: Path, stop_step: int, say: Callable[[str], object]) -> None:
    """Train the same run without faults.

    Raises:
        RunError: The run did not reach `stop_step`.
    """
    command, tail, said_at = _command(config, folder), JournalTail(config.run_dir), time.monotonic()
    command.start()
    try:
        while command.is_running:
            time.sleep(_LOOK_EVERY_S)
            steps = [event.step for event in ungroup_steps(tail.poll()) if isinstance(event, StepDone)]
            if steps and time.monotonic() - said_at >= _REMIND_EVERY_S:
                said_at = time.monotonic()
                say(f"  step {steps[-1]} of {stop_step}")
        code = command.wait()
    finally:
        command.kill()
    reached = read_history(config.run_dir).step
    if code == 0 and reached < stop_step:
        raise RunError(f"the run without faults ended at step {reached} of {stop_step}; see {command.log}")
    if code != 0:
        raise RunError(f"the run without faults ended with exit code {code}; see {command.log}:\n{command.last_lines}")


def _command(config: Config, folder: Path) -> TrainCommand:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{config.run.name}.yaml"
    path.write_text(config.as_written())
    return TrainCommand(path, path.with_suffix(".log"))


def _fault_line(at_s: float, what: str) -> str:
    return f"{minutes(at_s):>6}  {what}"


def _recovery_line(one: Recovery, began: float) -> str:
    """Return the line that reports the first step after a fault; ``began`` is the end of the run's first step."""
    assert one.first_step_s is not None
    at_s = one.injected.at + one.first_step_s - began
    if one.attempt is None:
        return f"{minutes(at_s):>6}    training continues"
    parts = [("noticed", one.detected_s), ("formed", one.formed_s), ("loaded", one.loaded_s)]
    times = ", ".join(f"{name} after {seconds:.1f} s" for name, seconds in parts if seconds is not None)
    lost = "no step lost" if not one.lost_steps else f"{one.lost_steps} step{'s' * (one.lost_steps != 1)} lost"
    paused = "" if one.pause_s is None else f"; training paused for {one.pause_s:.1f} s"
    again = f"training resumed on {one.workers[1]} workers after {one.first_step_s:.1f} s"
    return f"{minutes(at_s):>6}    {again} ({times}); {lost}{paused}"


class TrainCommand:
    """A ``train`` command that runs in its own process and appends its output to the file ``log``."""

    def __init__(self, config: Path, log: Path) -> None:
        self.config, self.log = config, log
        self._process: subprocess.Popen[bytes] | None = None
        self.started_at = 0.0

    @property
    def pid(self) -> int:
        """Process ID of the command."""
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the command has been started and has not ended."""
        return self._process is not None and self._process.poll() is None

    @property
    def last_lines(self) -> str:
        """Last lines of the command's output."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return "\n".join(lines[-_LAST_LINES:])

    def start(self) -> None:
        """Start the command."""
        self.started_at = time.time()
        with self.log.open("ab") as log:
            # Only the process that started the command may receive signals from the terminal.
            self._process = subprocess.Popen(
                [sys.executable, "-c", _CODE, str(os.getpid()), "train", str(self.config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def stop(self, timeout_s: float) -> int | None:
        """Request that the command save and end; return its exit code, or None if it had to be killed."""
        if self.is_running:
            os.kill(self.pid, signal.SIGTERM)
        return self.wait(timeout_s)

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Return the command's exit code, or None if it had to be killed after the timeout."""
        assert self._process is not None
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            return None

    def kill(self) -> None:
        """Kill the command if it is running."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


_SIGNALS: Mapping[FaultKind, tuple[signal.Signals, str]] = {
    "kill-worker": (signal.SIGKILL, "killed"),
    "crash-worker": (signal.SIGSEGV, "crashed"),
    "stop-worker": (signal.SIGSTOP, "stopped"),
}
_TARGET_S = 120.0
"""Longest wait for a fault's target: workers may still be restarting after the previous fault."""
_TASK_S = 60.0
_AGAIN_S = 0.2
_HEAD = "node:__internal_head__"
_CLOCKS_S = 5.0
"""Largest assumed difference between two nodes' clocks, in seconds."""


class FaultInjector:
    """Injects faults into one run."""

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

    def inflict(self, fault: Fault) -> InjectedFault:
        """Inject a fault as soon as it has a target.

        Raises:
            RunError: No target appeared in time.
        """
        began, why = time.monotonic(), "no worker of the run is running"
        while self._command.is_running and time.monotonic() - began < _TARGET_S:
            try:
                injected = self._inject(fault)
            except (RayError, OSError, RuntimeError) as error:
                injected, why = None, str(error)
            if injected is not None:
                return injected
            time.sleep(_AGAIN_S)
            self.look()
        after = f"within {time.monotonic() - began:.0f} s" if self._command.is_running else "before the command ended"
        raise RunError(f"{fault}: could not be injected {after} ({why})")

    @property
    def awaits_an_end(self) -> bool:
        """Whether a drained node of the local cluster is still running."""
        return self._local is not None and any(node in self._local.nodes for node in self._doomed)

    def look(self) -> str | None:
        """Kill a local cluster's drained node at its deadline; return a message if one was killed."""
        for node, deadline in self._doomed.items():
            if time.monotonic() >= deadline and self._local is not None and node in self._local.nodes:
                address = self._local.nodes[node]
                self._local.kill_node(node)
                return f"drained node {address} is gone"
        return None

    def _workers(self) -> list[dict[str, Any]]:
        found = (worker for job in self._jobs() for worker in workers_of_job(job))
        return sorted(found, key=lambda one: (one["Address"]["IPAddress"], one["Pid"]))

    def _jobs(self) -> list[str]:
        """Return the IDs of the command's jobs. Processes on other hosts or in containers may have the same PID."""
        here, began = ray.util.get_node_ip_address(), self._command.started_at - _CLOCKS_S
        jobs = [
            one["JobID"]
            for one in state.state.job_table()
            if one["DriverPid"] == self._command.pid
            # All nodes of the local cluster run on this machine, but have different addresses.
            and (self._local is not None or one["DriverIPAddress"] == here)
            and not one["IsDead"]
            and one["StartTime"] / 1000 >= began
        ]
        if len(jobs) > 1:
            raise RunError(f"Ray jobs {', '.join(jobs)} share a process ID, so the training job can't be identified")
        return jobs

    def _inject(self, fault: Fault) -> InjectedFault | None:
        """Inject a fault, or return None if the fault has no target at the moment."""
        at: float | None
        at, node, local = SystemClock().now(), None, self._local
        if fault.kind == "kill-driver":
            self._command.kill()
            self._command.start()
            what = "the command is killed and restarted"
        elif fault.kind == "add-node":
            assert local is not None, "the schedule rejects this fault on an existing cluster"
            node_id = local.add_node()
            at = SystemClock().now()
            what = f"node {local.nodes[node_id]} joins"
        elif fault.kind in LOSES_A_NODE:
            if (found := self._some_node()) is None:
                return None
            node_id, node = found
            if fault.kind == "drain-node":
                drain_node(node_id, "a rehearsal", at + self._drain_s)
                self._doomed[node_id] = time.monotonic() + self._drain_s
                what = f"node {node} is drained, and will be killed in {self._drain_s:g} s"
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
            at = SystemClock().now()
            what = f"the peer memory agent on node {nodes[node_id]} is killed"
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
        return InjectedFault(fault=fault, at=at, what=what, node=node)

    def _some_node(self) -> tuple[str, str] | None:
        """Return the ID and address of a losable node that runs workers, or None."""
        may_go = self._local.nodes if self._local is not None else losable_nodes(self._jobs(), self._run_key())
        nodes = {one["Address"]["NodeID"]: one["Address"]["IPAddress"] for one in self._workers()}
        found = [(node, address) for node, address in nodes.items() if node in may_go and node not in self._doomed]
        return self._draw.choice(found) if found else None


def losable_nodes(jobs: Collection[str] = (), run_key: str = "") -> dict[str, dict[str, Any]]:
    """Return Ray's entries for the nodes that a rehearsal may drain or kill, by node ID.

    The head's node, the command's node, draining nodes, and nodes with an actor or the driver of another job are
    excluded. Other jobs' plain tasks do not protect a node, because Ray reruns them elsewhere.

    Args:
        jobs: IDs of the rehearsal's own jobs.
        run_key: Key of the rehearsal's peer memory, whose agents belong to no live job after their driver has ended.
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
    """Signal the process that trains under a local supervisor; return the time, or None if there is no such process."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for launcher in psutil.Process(supervisor).children():
            for child in launcher.children():
                at = SystemClock().now()
                child.send_signal(number)
                return at
    return None


def kill_own_node() -> None:
    """Kill Ray on this node and all processes that it started, including this one."""
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
    """Run a function on a node and return its result; if the node ends, return the time of the call."""
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    task: Any = ray.remote(function)
    at = SystemClock().now()
    asked = task.options(num_cpus=0, max_retries=0, scheduling_strategy=there).remote(*arguments)
    try:
        return ray.get(asked, timeout=_TASK_S)
    except GetTimeoutError:
        # The fault must not happen later, to another attempt.
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
