"""Runs one attempt in each Ray Train worker: describes the worker to the training loop and calls it."""

from __future__ import annotations

import contextlib
import os
import socket
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray.train
import ray.train.torch
import torch

from ray_ulysses.checkpoint import FencedError
from ray_ulysses.checkpoint.exchange import TorchExchange
from ray_ulysses.checkpoint.fence import read_lineage
from ray_ulysses.cluster.preemption import preemption_noticed
from ray_ulysses.cluster.stream import RaySource
from ray_ulysses.config.loading import parse_config
from ray_ulysses.data.read.row_source import DirectSource
from ray_ulysses.errors import UserError
from ray_ulysses.logging import configure_logging
from ray_ulysses.run.checkpoint_store import checkpoint_store
from ray_ulysses.run.secrets_file import use_secrets
from ray_ulysses.run.takeover import is_taken_over, taken_over_text
from ray_ulysses.run_names import REFUSAL_FOLDER
from ray_ulysses.storage.local import LocalStore
from ray_ulysses.storage.store import AlreadyExistsError, read_bytes
from ray_ulysses.trainer.data import moved_sources
from ray_ulysses.trainer.loop import run_attempt
from ray_ulysses.trainer.worker import Worker

if TYPE_CHECKING:
    from ray_ulysses.config import Config
    from ray_ulysses.data.plan.plan import Plan
    from ray_ulysses.data.read.reader import RowReader
    from ray_ulysses.data.read.row_source import RowSource
    from ray_ulysses.parallel.layout import ParallelLayout
    from ray_ulysses.storage import Store


def train_worker(job: dict[str, Any]) -> str:
    """Run one attempt on this worker.

    Args:
        job: ``config``, the configuration as a mapping, ``session``, the command's name, and when the command began
            (``command_started``) and requested its workers (``workers_asked``).
    """
    configure_logging()
    config = parse_config(job["config"])
    session = str(job["session"])
    _repeat_refusal(config.run_dir, session)
    context = ray.train.get_context()
    device = ray.train.torch.get_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if device.type == "cpu":
        cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(max(1, cores // context.get_local_world_size()))
    worker = Worker(
        rank=context.get_world_rank(),
        local_rank=context.get_local_rank(),
        world_size=context.get_world_size(),
        node=f"{socket.gethostname()}/{ray.util.get_node_ip_address()}",
        device=device,
        session=session,
        command_started=job.get("command_started"),
        workers_asked=job.get("workers_asked"),
        make_source=_source_maker(config),
        notice=preemption_noticed,
        is_watched=True,
    )
    try:
        use_secrets(config)
        return run_attempt(config, worker).status
    except UserError as error:
        # Another attempt would meet the same input: the next one of this session ends immediately.
        leave_refusal(config.run_dir, session, str(error))
        raise
    except FencedError:
        # Another attempt would take the run back from its owner, unless that is a newer attempt of this session.
        refuse_if_taken_over(config.run_dir, checkpoint_store(config), session)
        raise


def refuse_if_taken_over(run_dir: Path, store: Store, session: str) -> None:
    """Leave a refusal if the newest attempt is certainly another command's; an unreachable storage proves nothing."""
    with contextlib.suppress(OSError):
        newest = read_lineage(store).newest_attempt
        if is_taken_over(run_dir, newest, session):
            leave_refusal(run_dir, session, taken_over_text(newest))


def leave_refusal(run_dir: Path, session: str, text: str) -> None:
    """Write why this session is to end, for the driver and for its next attempt; the first reason is kept."""
    with contextlib.suppress(AlreadyExistsError, OSError):
        LocalStore(run_dir, must_exist=True).create(f"{REFUSAL_FOLDER}/{session}", [text.encode()])


def refusal(run_dir: Path, session: str) -> str | None:
    """Return why this session is to end, or ``None``: unusable input, or another command has the run now."""
    try:
        return read_bytes(LocalStore(run_dir), f"{REFUSAL_FOLDER}/{session}").decode()
    except OSError:
        return None


def _repeat_refusal(run_dir: Path, session: str) -> None:
    text = refusal(run_dir, session)
    if text is not None:
        raise UserError(text)


def _source_maker(config: Config) -> Any:
    def make(plan: Plan, reader: RowReader, layout: ParallelLayout, rank: int) -> RowSource:
        if config.data.engine == "local":
            return DirectSource(
                reader,
                plan,
                layout.dp_rank(rank),
                layout.dp_size,
                layout.sp_rank(rank),
                layout.sp_size,
                ring_size=layout.ring_size,
                prefetch_rows=config.data.prefetch_rows,
                timeout_s=config.elastic.collective_timeout_s,
            )
        timeout = timedelta(seconds=config.elastic.collective_timeout_s)
        group = torch.distributed.new_group(backend="gloo", timeout=timeout)
        return RaySource(
            moved_sources(config, plan),
            plan,
            rank=rank,
            layout=layout,
            share=TorchExchange(group).broadcast,
            num_cpus=config.cluster.data_cpus,
            prefetch_rows=config.data.prefetch_rows,
            timeout_s=config.elastic.collective_timeout_s,
        )

    return make
