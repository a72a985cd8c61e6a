"""Connects to a Ray cluster, or starts an embedded Ray on this machine that ends with this process."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import ray
import ray._private.worker
from ray._common.utils import get_system_memory
from ray._private import state
from ray._private.utils import get_used_memory
from ray.exceptions import RayError

from ray_ulysses.clock import SystemClock
from ray_ulysses.cluster.address import cluster_address
from ray_ulysses.cluster.capacity import ClusterView, Node, node_of
from ray_ulysses.cluster.ray_access import MODE, check_address, cluster_token, private_session
from ray_ulysses.errors import RunError, UserError
from ray_ulysses.logging import get_logger

_SLACK_CPUS = 1.0
_WORKER_CLASSES = ("RayTrainWorker", "JoinedWorker")
"""Actor classes of Ray Train's workers, and of workers that join later (`ray_ulysses.cluster.scaling`)."""
_MEMORY_THRESHOLD = 0.95
"""Fraction of memory in use above which Ray 2.60 kills workers."""
_EMBEDDED_HOST = "RAY_ULYSSES_EMBEDDED_HOST"
"""Environment variable that is set in all processes of an embedded Ray."""
_log = get_logger(__name__)


@contextmanager
def ray_session(address: str | None, *, cpus: float, environment: dict[str, str] | None = None) -> Iterator[bool]:
    """Connect to Ray inside the block, where SIGTERM and SIGHUP raise KeyboardInterrupt unless they have handlers.

    Args:
        address: Cluster address. If None, ``RAY_ADDRESS`` is used; if that is unset, an embedded Ray is started.
        cpus: Logical CPUs that an embedded Ray must offer; several may share a core.
        environment: Environment variables for every process that Ray starts for this job.

    Yields:
        Whether Ray is embedded.

    Raises:
        UserError: The address is not valid, or this process is already connected to Ray.
        RunError: The cluster is unreachable, which is detected within seconds.
    """
    if ray.is_initialized():
        raise UserError(
            "this process is already connected to Ray, but a run connects with its own settings; call ray.shutdown() "
            "first, and set RAY_ADDRESS to train on that cluster"
        )
    target = cluster_address(address)
    asks = target is None or check_address(target)
    if not asks and os.environ.get(MODE) == "token":
        _log.warning("%s=token, but the Ray cluster at %s accepts jobs from anyone on its network", MODE, target)
    with (
        private_session() if target is None else cluster_token(target, asks=asks),
        _connected(target, cpus, environment),
    ):
        yield target is None


@contextmanager
def _connected(target: str | None, cpus: float, environment: dict[str, str] | None) -> Iterator[None]:
    os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # A submitted job and its workers may both set a variable such as HF_HOME, which Ray would reject as a conflict.
    os.environ.setdefault("RAY_OVERRIDE_JOB_RUNTIME_ENV", "1")
    options: dict[str, Any] = {
        "log_to_driver": False,
        "logging_level": logging.ERROR,
        "runtime_env": {"env_vars": environment or {}},
    }
    before = {number: signal.getsignal(number) or signal.SIG_DFL for number in (signal.SIGTERM, signal.SIGHUP)}
    clock = SystemClock()
    started = clock.monotonic()
    try:
        if target is not None:
            ray.init(address=target, **options)
        else:
            _start_embedded(cpus, options)
    except SystemExit as error:
        # While connecting, Ray turns a SIGTERM into SystemExit; treat it like any other stop. Shutting down the
        # incomplete connection would crash, so the connection ends with this process.
        raise KeyboardInterrupt from error
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise RunError(
            f"the Ray cluster at {target} can't be reached ({error}); start it with `ray start --head`, correct "
            "cluster.address or RAY_ADDRESS, or unset both to run on this machine alone"
            if target is not None
            else f"this machine's local Ray did not start within {math.ceil(clock.monotonic() - started)} s ({error}): "
            "the machine may be busy or have too little memory; try again, or start Ray yourself with "
            "`ray start --head` and set RAY_ADDRESS to its address"
        ) from error
    # On SIGTERM, Ray 2.60 exits with code 15, without a message and without saving (a canary test covers it).
    _handle({number: signal.default_int_handler if one == signal.SIG_DFL else one for number, one in before.items()})
    try:
        with quiet_errors():
            yield
    finally:
        ray.shutdown()
        os.environ.pop(_EMBEDDED_HOST, None)
        _handle(before)


@contextmanager
def quiet_errors() -> Iterator[None]:
    """Keep error reports of Ray's nodes out of this process's output; the session's log directory contains them.

    Ray 2.60 prints these reports regardless of ``log_to_driver``, unless a private switch of its debugger is set (a
    canary test covers the switch).
    """
    before = ray._private.worker._worker_logs_enabled
    ray._private.worker._worker_logs_enabled = False
    try:
        yield
    finally:
        ray._private.worker._worker_logs_enabled = before


def _handle(handlers: Mapping[signal.Signals, Any]) -> None:
    # Only the main thread can set signal handlers, and Ray sets its own only there.
    if threading.current_thread() is threading.main_thread():
        for number, handler in handlers.items():
            signal.signal(number, handler)


def host_of(address: str) -> str:
    """Return the address at which a run's processes reach a node: the loopback address for an embedded Ray.

    Ray replaces a loopback address with one that other machines can reach.
    """
    return os.environ.get(_EMBEDDED_HOST, address)


def is_embedded() -> bool:
    """Return whether this process belongs to an embedded Ray, which has no autoscaler."""
    return _EMBEDDED_HOST in os.environ


def free_memory() -> int:
    """Return the number of bytes that this machine, or its container, can still use before Ray kills workers."""
    return int(_MEMORY_THRESHOLD * get_system_memory() - get_used_memory())


def _start_embedded(cpus: float, options: dict[str, Any]) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ[_EMBEDDED_HOST] = "127.0.0.1"
    offered = max(os.cpu_count() or 1, math.ceil(cpus + _SLACK_CPUS))
    # With more workers than cores, Ray would warn, end idle workers and start new ones.
    os.environ.setdefault("RAY_worker_maximum_startup_concurrency", "16")
    os.environ.setdefault("RAY_num_workers_soft_limit", "16")
    os.environ.setdefault("RAY_idle_worker_killing_time_threshold_ms", "600000")
    # Every process of ours has its own environment, so workers started in advance would stay idle.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    os.environ.setdefault("RAY_enable_worker_prestart", "0")
    for is_last in (False, True):
        try:
            with _children_apart():
                ray.init(address="local", num_cpus=offered, include_dashboard=False, **options)
            return
        except Exception as error:
            # Ray raises a plain Exception if one of its processes dies or does not respond during the start.
            if type(error) is not Exception:
                raise
            ray.shutdown()
            reason = str(error).partition(". ")[0]
            if is_last:
                raise RuntimeError(reason) from error
            _log.warning("this machine's local Ray did not start (%s); trying again", reason)


@contextmanager
def _children_apart() -> Iterator[None]:
    """Start child processes out of reach of SIGHUP and of signals to our process group.

    Otherwise a SIGTERM to our group, as sent by ``timeout`` and schedulers, or a closed terminal would end Ray's
    processes while the run saves. They still end with this process, because Ray ties their lifetime to it.
    """
    own, group = os.getpid(), os.getpgrp()
    # A group leader can't leave its group and return, so its children stay in the group.
    is_leader = own in (group, os.getsid(0))
    # Children inherit the mask; for this process it only delays the signal.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])
    if not is_leader:
        os.setpgid(0, 0)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if not is_leader:
            # If this process was its last member, the old group is gone, and the new group serves as well.
            with contextlib.suppress(PermissionError, ProcessLookupError):
                os.setpgid(0, group)


def steady_nodes() -> dict[str, Any]:
    """Return Ray's entries for the nodes that are alive and not draining, by node ID."""
    draining = draining_nodes()
    return {one["NodeID"]: one for one in ray.nodes() if one["Alive"] and one["NodeID"] not in draining}


def draining_nodes() -> dict[str, float | None]:
    """Return the deadlines of the draining nodes, in seconds since the epoch, by node ID.

    A deadline is None if none was given.
    """
    return {node: until_ms / 1000 if until_ms else None for node, until_ms in state.state.get_draining_nodes().items()}


def own_node() -> str:
    """Return the Ray ID of this process's node."""
    return str(ray.get_runtime_context().get_node_id())


def cluster_size() -> tuple[int, float, float]:
    """Return the connected cluster's number of live nodes, CPUs and GPUs."""
    total = ray.cluster_resources()
    return sum(node["Alive"] for node in ray.nodes()), total.get("CPU", 0.0), total.get("GPU", 0.0)


def cluster_nodes() -> tuple[Node, ...]:
    """Return the connected cluster's live nodes that are not draining, with their total resources."""
    return tuple(node_of(node["Resources"]) for node in steady_nodes().values())


def free_nodes() -> tuple[Node, ...]:
    """Return the connected cluster's nodes with their unused resources."""
    return tuple(node_of(resources) for resources in state.available_resources_per_node().values())


def look_at_cluster() -> ClusterView | None:
    """Return the cluster's nodes and this job's workers, or None if the head does not respond."""
    try:
        workers = [one["Address"] for one in workers_of_job(ray.get_runtime_context().get_job_id())]
        on_nodes = {str(one["NodeID"]): str(one["IPAddress"]) for one in workers}
        return ClusterView(nodes=cluster_nodes(), workers=len(workers), worker_nodes=on_nodes)
    except (OSError, RuntimeError, RayError) as error:
        _log.debug("the cluster's head does not respond: %s", error)
        return None


def answers_in_time(asked: Mapping[Any, str], timeout_s: float) -> dict[str, Any]:
    """Return the results of the Ray tasks that finish in time, by node; failures are logged and skipped."""
    answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=timeout_s) if asked else ([], [])
    found = {}
    for answer in answered:
        try:
            found[asked[answer]] = ray.get(answer)
        except RayError as error:
            _log.warning("%s does not respond (%s)", asked[answer], type(error).__name__)
    return found


def session_logs() -> str | None:
    """Return this node's directory of session logs, or None if it is unknown."""
    node = getattr(ray._private.worker, "_global_node", None)
    return None if node is None else str(node.get_logs_dir_path())


def workers_of_job(job: str) -> list[dict[str, Any]]:
    """Return the entries of Ray's actor table for a job's training workers.

    The actor table is private in Ray 2.60, and so is the class name of Ray Train's workers (a canary test covers both).

    Raises:
        RayError, OSError, RuntimeError: Ray does not respond.
    """
    actors = state.actors(job_id=ray.JobID.from_hex(job), actor_state_name="ALIVE").values()
    return [actor for actor in actors if str(actor["ActorClassName"]).endswith(_WORKER_CLASSES)]
