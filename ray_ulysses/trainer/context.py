"""Claims an attempt, and holds what each rank knows of it before there is any state."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from ray_ulysses.checkpoint.errors import CheckpointError
from ray_ulysses.checkpoint.exchange import TorchExchange
from ray_ulysses.checkpoint.fence import claim_attempt, read_lineage
from ray_ulysses.logging import get_logger
from ray_ulysses.run.takeover import refuse_taken_over
from ray_ulysses.tracking.journal import claim_journal
from ray_ulysses.trainer.diagnostics import Diagnostics
from ray_ulysses.trainer.shared_storage import probe_storage
from ray_ulysses.vault import VaultStore

if TYPE_CHECKING:
    from ray_ulysses.checkpoint.exchange import Exchange
    from ray_ulysses.run.settings import ResolvedRun
    from ray_ulysses.tracking.journal import JournalWriter
    from ray_ulysses.trainer.worker import Worker
    from ray_ulysses.vault.files import LentMemory

_log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerStore:
    """The memory of peers, as one rank uses it.

    Attributes:
        store: The store.
        exchange: Exchanges small values between the threads that save there, over a group of their own.
        lent: Memory that this node's agent keeps states in where they are; None where it can't.
    """

    store: VaultStore
    exchange: Exchange
    lent: LentMemory | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptContext:
    """An attempt as each of its ranks knows it.

    Attributes:
        run: The run, with its layout at this attempt's world size and the store of its checkpoints.
        worker: This rank's worker, with its clock.
        attempt: The attempt's number, on every rank.
        nodes: Name of each rank's node, by rank.
        exchange: Exchanges small values between ranks, over a group apart from training's.
        save_exchange: The same for the threads that save, over a group of their own.
        vault: The memory of peers, and the exchange for its threads; None without.
        stage: Name of the stage that it trains, once that is known; empty in a run without stages.
        measured: Identity of what its losses are measured on, once that is known.
    """

    run: ResolvedRun
    worker: Worker
    attempt: int
    nodes: tuple[str, ...]
    exchange: Exchange
    save_exchange: Exchange
    vault: PeerStore | None = None
    stage: str = ""
    measured: str = ""

    @property
    def rank(self) -> int:
        """Global rank."""
        return self.worker.rank

    @property
    def diagnostics(self) -> Diagnostics:
        """What writes the files that explain this rank's attempt."""
        worker = self.worker
        return Diagnostics(
            run_dir=self.run.config.run_dir, attempt=self.attempt, rank=worker.rank, device=worker.device
        )


def open_attempt(run: ResolvedRun, worker: Worker) -> tuple[AttemptContext, JournalWriter | None]:
    """Probe the storage and claim the next attempt; every rank must call.

    Returns:
        The attempt, and on rank 0 its journal.

    Raises:
        UserError: The storage is not shared by every node, or can't be written.
    """
    config = run.config
    timeout = timedelta(seconds=config.elastic.collective_timeout_s)
    exchange = TorchExchange(dist.new_group(backend="gloo", timeout=timeout))
    # One rank's storage may be much slower than another's.
    patience = timedelta(seconds=config.checkpoint.save_timeout_s)
    save_exchange = TorchExchange(dist.new_group(backend="gloo", timeout=patience))
    probe_storage(config.run_dir, worker, exchange)
    journal = _claim(run, worker) if worker.rank == 0 else None
    context = AttemptContext(
        run=run,
        worker=worker,
        attempt=exchange.broadcast(journal.attempt if journal else None),
        nodes=tuple(exchange.broadcast(exchange.gather(worker.node))),
        exchange=exchange,
        save_exchange=save_exchange,
        vault=_open_vault(worker, exchange, timeout),
    )
    return context, journal


def _open_vault(worker: Worker, exchange: Exchange, timeout: timedelta) -> PeerStore | None:
    """Open the memory of peers, if every rank was given addresses of it; every rank must call."""
    given = exchange.gather(worker.vault is not None)
    if not exchange.broadcast(given is not None and all(given)):
        return None
    assert worker.vault is not None
    store = VaultStore(worker.vault)
    lent = store.lent_memory()
    if lent is None:
        _log.info("the agent of this node takes no memory from this process: states are sent to it, which needs more")
    return PeerStore(store=store, exchange=TorchExchange(dist.new_group(backend="gloo", timeout=timeout)), lent=lent)


def _claim(run: ResolvedRun, worker: Worker) -> JournalWriter:
    """Claim a number that neither the journal nor the store of the checkpoints has seen.

    Raises:
        UserError: The journal can't be written, or another command has taken the run over.
        CheckpointError: The store of the checkpoints can't be written.
    """
    store, run_dir = run.store, run.config.run_dir
    try:
        while True:
            newest = read_lineage(store).newest_attempt
            journal = claim_journal(run_dir, worker.clock, after=newest)
            # Only after a file was created in the journal's folder: NFS then shows the files of other hosts there.
            refuse_taken_over(run_dir, newest, worker.session)
            if claim_attempt(store, journal.attempt):
                return journal
            journal.close()
    except OSError as error:
        raise CheckpointError(
            f"the attempt can't be recorded beside the checkpoints in {run.location} ({error}); repair the storage, "
            "then start the same command again"
        ) from error
