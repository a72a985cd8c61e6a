"""What an attempt knows of itself before it has any state: its number, its ranks, its storage and its exchanges."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from ray_ulysses.checkpoint.errors import CheckpointError
from ray_ulysses.checkpoint.exchange import TorchExchange
from ray_ulysses.checkpoint.fence import claim_attempt, read_lineage
from ray_ulysses.run.checkpoint_store import checkpoint_location, checkpoint_store
from ray_ulysses.run.takeover import refuse_taken_over
from ray_ulysses.tracking.journal import AttemptJournal
from ray_ulysses.trainer.shared_storage import probe_storage

if TYPE_CHECKING:
    from ray_ulysses.checkpoint.exchange import Exchange
    from ray_ulysses.config import Config
    from ray_ulysses.parallel.layout import ParallelLayout
    from ray_ulysses.storage import Store
    from ray_ulysses.trainer.worker import Worker


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptContext:
    """An attempt as each of its ranks knows it.

    Attributes:
        config: The run's configuration.
        worker: This rank's worker, with its clock.
        layout: Who shares rows with whom.
        attempt: The attempt's number, on every rank.
        nodes: Name of each rank's node, by rank.
        store: The store of the run's checkpoints.
        exchange: Small values between ranks, over a group apart from training's.
        save_exchange: The same for the threads that save, over a group of their own.
    """

    config: Config
    worker: Worker
    layout: ParallelLayout
    attempt: int
    nodes: tuple[str, ...]
    store: Store
    exchange: Exchange
    save_exchange: Exchange

    @property
    def rank(self) -> int:
        """Global rank."""
        return self.worker.rank


def open_attempt(
    config: Config, worker: Worker, layout: ParallelLayout
) -> tuple[AttemptContext, AttemptJournal | None]:
    """Probe the storage and claim the next attempt; every rank must call.

    Returns:
        The attempt, and on rank 0 its journal.

    Raises:
        UserError: The storage is not shared by every node, or can't be written.
    """
    timeout = timedelta(seconds=config.elastic.collective_timeout_s)
    exchange = TorchExchange(dist.new_group(backend="gloo", timeout=timeout))
    # A rank's storage may be much slower than another's.
    patience = timedelta(seconds=config.checkpoint.save_timeout_s)
    save_exchange = TorchExchange(dist.new_group(backend="gloo", timeout=patience))
    probe_storage(config.run_dir, worker, exchange)
    store = checkpoint_store(config)
    journal = _claim(config, store, worker) if worker.rank == 0 else None
    context = AttemptContext(
        config=config,
        worker=worker,
        layout=layout,
        attempt=exchange.broadcast(journal.attempt if journal else None),
        nodes=tuple(exchange.broadcast(exchange.gather(worker.node))),
        store=store,
        exchange=exchange,
        save_exchange=save_exchange,
    )
    return context, journal


def _claim(config: Config, store: Store, worker: Worker) -> AttemptJournal:
    """Claim a number that neither the journal nor the store of the checkpoints has seen.

    Raises:
        UserError: The journal can't be written, or another command has taken the run over.
        CheckpointError: The store of the checkpoints can't be.
    """
    try:
        while True:
            newest = read_lineage(store).newest_attempt
            journal = AttemptJournal.claim(config.run_dir, worker.clock, after=newest)
            # After a file was made in the journal's folder: NFS then shows what other hosts have made there.
            refuse_taken_over(config.run_dir, newest, worker.session)
            if claim_attempt(store, journal.attempt):
                return journal
            journal.close()
    except OSError as error:
        raise CheckpointError(
            f"attempts can't be noted beside the checkpoints in {checkpoint_location(config)} ({error}); repair the "
            "storage, then start the same command again"
        ) from error
