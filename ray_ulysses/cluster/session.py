"""A connection to Ray: the cluster at hand, or an embedded one on this machine that ends with this process."""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
import ray._private.state

from ray_ulysses.cluster.address import check_address
from ray_ulysses.cluster.quiet import quiet_errors
from ray_ulysses.errors import RunError

_SLACK_CPUS = 1.0
_WORKER_CLASS = "RayTrainWorker"


@contextmanager
def ray_session(address: str | None, *, cpus: float, environment: dict[str, str] | None = None) -> Iterator[bool]:
    """Connect to Ray for the time of a block.

    Args:
        address: Address of a cluster; ``None`` takes ``RAY_ADDRESS``, else starts an embedded Ray.
        cpus: CPUs that an embedded Ray must offer; they are logical, several may share a core.
        environment: Variables for every process that Ray starts for this job.

    Yields:
        Whether the Ray is embedded.

    Raises:
        UserError: The address is none.
        RunError: The cluster can't be reached; this is known within seconds.
    """
    target = address or os.environ.get("RAY_ADDRESS") or None
    target = None if target == "local" else target
    if target is not None:
        check_address(target)
    os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    options: dict[str, Any] = {
        "log_to_driver": False,
        "logging_level": logging.ERROR,
        "runtime_env": {"env_vars": environment or {}},
    }
    try:
        if target is not None:
            ray.init(address=target, **options)
        else:
            _start_embedded(cpus, options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        where = f"the Ray cluster at {target}" if target else "an embedded Ray"
        raise RunError(
            f"{where} can't be reached ({error}); start it with `ray start --head`, correct cluster.address or "
            "RAY_ADDRESS, or unset both to run on this machine alone"
        ) from error
    try:
        with quiet_errors():
            yield target is None
    finally:
        ray.shutdown()


def _start_embedded(cpus: float, options: dict[str, Any]) -> None:
    # A plain ray.init() may create an authentication token that later `ray start --head` would insist on.
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    offered = max(os.cpu_count() or 1, math.ceil(cpus + _SLACK_CPUS))
    # Workers that share cores are more processes than cores: Ray would warn of them, end idle ones and start new ones.
    os.environ.setdefault("RAY_worker_maximum_startup_concurrency", "16")
    os.environ.setdefault("RAY_num_workers_soft_limit", "16")
    os.environ.setdefault("RAY_idle_worker_killing_time_threshold_ms", "600000")
    with _children_in_own_group():
        ray.init(address="local", num_cpus=offered, include_dashboard=False, **options)


@contextmanager
def _children_in_own_group() -> Iterator[None]:
    """Start children in a process group apart from ours.

    A SIGTERM to our group, as ``timeout`` and schedulers send it, would otherwise end Ray's processes while the run
    saves. They still end with us: Ray ties their life to this process.
    """
    own, group = os.getpid(), os.getpgrp()
    if own in (group, os.getsid(0)):
        # A leader can't leave its group and come back; its children stay in it.
        yield
        return
    os.setpgid(0, 0)
    try:
        yield
    finally:
        # The group is gone if we were the last in it; then the one made here will do.
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.setpgid(0, group)


def missing_resources(*, cpus: float, gpus: float) -> str | None:
    """Return what the connected cluster lacks at the moment, in words, or ``None``; nodes may still be joining."""
    total = ray.cluster_resources()
    lacking = [
        f"{needed:g} {name}s are asked for, {total.get(name, 0):g} are there"
        for name, needed in (("CPU", cpus), ("GPU", gpus))
        if total.get(name, 0.0) < needed
    ]
    return "; ".join(lacking) or None


def session_logs() -> str | None:
    """Return the directory of this session's logs on this node, where Ray says it."""
    node = getattr(ray._private.worker, "_global_node", None)
    return None if node is None else str(node.get_logs_dir_path())


def workers_there() -> int | None:
    """Return how many workers of this job's training are there, or ``None`` where Ray does not say.

    The table of actors is private to Ray 2.60, as is the name of Ray Train's workers (a canary test stands beside it).
    """
    try:
        job = ray.JobID.from_hex(ray.get_runtime_context().get_job_id())
        actors = ray._private.state.state.actor_table(None, job, "ALIVE").values()
    except Exception:  # only for the screen
        return None
    return sum(1 for actor in actors if str(actor["ActorClassName"]).endswith(_WORKER_CLASS))
