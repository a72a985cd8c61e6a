"""Supervises the attempts of one Ray Train worker: describes the worker to its supervisor, and runs that."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import ray.train
from ray.train.v2._internal.execution.context import get_train_context

from ray_ulysses.checkpoint.notice import Notice
from ray_ulysses.cluster.session import host_of
from ray_ulysses.config.loading import parse_config
from ray_ulysses.errors import UserError
from ray_ulysses.logging import configure_logging
from ray_ulysses.run.secrets_file import SecretsFile, use_secrets
from ray_ulysses.run.takeover import refusal
from ray_ulysses.supervision.channel import Announcement
from ray_ulysses.supervision.order import Job
from ray_ulysses.supervision.supervisor import Supervisor

if TYPE_CHECKING:
    from ray_ulysses.config import Config
    from ray_ulysses.data.read.blocks import Streams

_ANNOUNCEMENT = "RAY_ULYSSES_COORDINATOR"


def train_worker(job: dict[str, Any]) -> str:
    """Supervise this worker's attempts until the run ends or Ray is to restart the workers.

    Args:
        job: ``config``, the configuration as a mapping, ``session``, the command's name, and when the command began
            (``command_started``) and requested its workers (``workers_asked``).
    """
    context = ray.train.get_context()
    return supervise(
        job, _announcement(), context.get_world_rank(), context.get_local_rank(), notice=preemption_noticed
    )


def supervise(
    job: Mapping[str, Any],
    announcement: Announcement,
    worker: int,
    local_rank: int,
    *,
    notice: Callable[[Collection[str]], Notice | None] = lambda nodes: None,
    joins_late: bool = False,
) -> str:
    """Supervise the attempts of a worker of this process.

    Args:
        job: What `train_worker` takes.
        announcement: How the coordinator is reached.
        worker: The worker's number.
        local_rank: The worker's number on its node.
        notice: Returns the notice that one of the nodes that it is given will be taken away, or None.
        joins_late: Whether it joins the others only once a child could start at once.
    """
    configure_logging()
    config = parse_config(job["config"])
    session = str(job["session"])
    if not isinstance(config.run_dir, Path):
        # The run's directory itself is reached with them; the processes that train read them anyway.
        use_secrets(config, is_needed=False)
    text = refusal(config.run_dir, session)
    if text is not None:
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
        job=Job(
            config=job["config"],
            session=session,
            command_started=job.get("command_started"),
            workers_asked=job.get("workers_asked"),
            node=f"{socket.gethostname()}/{address}",
            local_rank=local_rank,
            device=device,
        ),
        make_streams=_stream_maker(config),
        notice=notice,
        joins_late=joins_late,
    )
    return supervisor.run()


def preemption_noticed(nodes: Collection[str]) -> Notice | None:
    """Return the notice that one of these nodes is draining, if this worker has received one.

    Ray Train 2.60 hands the announcement to every worker. Its public ``get_preemption_info`` is a barrier over all
    workers; the loop agrees in a collective of its own, so the worker's own copy is read, which is private to Ray
    (a canary test covers it).
    """
    info = get_train_context().preemption_context.preemption_info
    if info is None or not set(nodes).intersection(info.preempted_node_to_ranks):
        # The workers that train may have left that node.
        return None
    return Notice(deadline=info.deadline_ms / 1000 if info.deadline_ms else None)


def announce(announcement: Announcement) -> None:
    """Note how the coordinator is reached; runs in each worker before it begins."""
    os.environ[_ANNOUNCEMENT] = json.dumps(dataclasses.asdict(announcement))


def _announcement() -> Announcement:
    # The processes that it starts have no use for it.
    return Announcement(**json.loads(os.environ.pop(_ANNOUNCEMENT)))


def _gpu_index() -> int:
    """Return the index of this worker's GPU among those that its node shows to the workers, without touching it."""
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
