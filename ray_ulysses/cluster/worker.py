"""Runs the supervisor of one Ray Train worker."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import ray.train

from ray_ulysses.cluster.session import host_of
from ray_ulysses.config.loading import parse_config
from ray_ulysses.errors import UserError
from ray_ulysses.logging import configure_logging
from ray_ulysses.run.secrets_file import SecretsFile, use_secrets
from ray_ulysses.run.takeover import refusal
from ray_ulysses.supervision.order import Job
from ray_ulysses.supervision.supervisor import Announcement, Supervisor

if TYPE_CHECKING:
    from ray_ulysses.config import Config
    from ray_ulysses.data.read.blocks import Streams

_ANNOUNCEMENT = "RAY_ULYSSES_COORDINATOR"


def train_worker(job: dict[str, Any]) -> str:
    """Supervise this worker's attempts until the run ends or Ray Train must restart the workers.

    Args:
        job: ``config`` (the configuration as a mapping), ``session`` (the command's ID), ``command_started`` and
            ``workers_asked`` (times at which the command started and requested its workers).
    """
    context = ray.train.get_context()
    # Processes started by the worker do not need the variable.
    announcement = Announcement(**json.loads(os.environ.pop(_ANNOUNCEMENT)))
    return supervise(job, announcement, context.get_world_rank(), context.get_local_rank())


def supervise(
    job: Mapping[str, Any],
    announcement: Announcement,
    worker: int,
    local_rank: int,
    *,
    joins_late: bool = False,
) -> str:
    """Supervise a worker's attempts in this process.

    Args:
        job: See `train_worker`.
        announcement: Connection details of the coordinator.
        worker: Worker number.
        local_rank: Index of the worker on its node.
        joins_late: Whether to join the other workers only once a child can start immediately.
    """
    configure_logging()
    config = parse_config(job["config"])
    if not isinstance(config.run_dir, Path):
        # Access to the run's remote directory needs the secrets; the training processes read them separately.
        use_secrets(config, is_needed=False)
    if (text := refusal(config.run_dir, job["session"])) is not None:
        raise UserError(text)
    address, device = ray.util.get_node_ip_address(), "cpu"
    if config.cluster.gpus_per_worker:
        local_rank = _gpu_index()
        device = f"cuda:{local_rank}"
    supervisor = Supervisor(
        announcement,
        worker=worker,
        cluster_node=ray.get_runtime_context().get_node_id(),
        host=host_of(address),
        job=Job(**job, node=f"{socket.gethostname()}/{address}", local_rank=local_rank, device=device),
        make_streams=_stream_maker(config),
        joins_late=joins_late,
    )
    return supervisor.run()


def announce(announcement: Announcement) -> None:
    """Store the coordinator's connection details in the environment; called in each worker before training starts."""
    os.environ[_ANNOUNCEMENT] = json.dumps(dataclasses.asdict(announcement))


def _gpu_index() -> int:
    """Return the index of this worker's GPU in its node's visible devices, without initializing the GPU."""
    own = str(ray.get_gpu_ids()[0])
    shown = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return shown.index(own) if own in shown else 0


def _stream_maker(config: Config) -> Callable[[], Streams] | None:
    if config.data.engine == "local":
        return None

    def make() -> Streams:
        # Ray Data takes a second to import.
        from ray_ulysses.cluster.stream import RayStreams

        return RayStreams(config.cluster.data_cpus, SecretsFile.of(config))

    return make
