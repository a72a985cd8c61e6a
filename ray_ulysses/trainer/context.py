"""Checks the shared storage, claims an attempt number, and provides each rank with the attempt's context."""

from __future__ import annotations

import contextlib
import errno
import uuid
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from ray_ulysses.checkpoint.errors import CheckpointError, StorageFailedError
from ray_ulysses.checkpoint.fence import claim_attempt, read_lineage
from ray_ulysses.checkpoint.messenger import RankMessenger, TorchRankMessenger, agree
from ray_ulysses.errors import RunError, UserError
from ray_ulysses.logging import get_logger
from ray_ulysses.peer_memory import PeerMemoryStore
from ray_ulysses.peer_memory.files import LentMemory
from ray_ulysses.run.settings import ResolvedRun
from ray_ulysses.run.takeover import takeover
from ray_ulysses.run_names import PROBE_FOLDER, SESSION_FILE
from ray_ulysses.storage.place import Place, open_store
from ray_ulysses.storage.retry import is_transient
from ray_ulysses.tracking.journal import JournalWriter, claim_journal
from ray_ulysses.trainer.diagnostics import Diagnostics
from ray_ulysses.trainer.worker import Worker

_log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerStore:
    """One rank's access to peer memory."""

    store: PeerMemoryStore
    messenger: RankMessenger
    """Messenger for small values between the ranks' saving threads, over a separate process group."""
    lent: LentMemory | None = None
    """Memory that this node's agent lends, so that states need not be sent; None if the agent lends no memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptContext:
    """One rank's view of an attempt."""

    run: ResolvedRun
    """The run, including its checkpoint store and its layout at this attempt's world size."""
    worker: Worker
    """This rank's worker, including the clock."""
    attempt: int
    """Attempt number, identical on every rank."""
    nodes: tuple[str, ...]
    """Node name of each rank, indexed by rank."""
    messenger: RankMessenger
    """Messenger for small values between ranks, over a process group that training does not use."""
    save_messenger: RankMessenger
    """Messenger for small values between the ranks' saving threads, over a separate process group."""
    peer_memory: PeerStore | None = None
    """This rank's access to peer memory, or None if peer memory is not used."""
    stage: str = ""
    """Name of the current stage; empty before the stage is known and in runs without stages."""
    measured: str = ""
    """Identifier of the data on which losses are measured; empty before the stage is known."""

    @property
    def rank(self) -> int:
        """Global rank."""
        return self.worker.rank

    @property
    def diagnostics(self) -> Diagnostics:
        """Writer for this rank's diagnostic files."""
        worker = self.worker
        return Diagnostics(
            run_dir=self.run.config.run_dir, attempt=self.attempt, rank=worker.rank, device=worker.device
        )


def open_attempt(run: ResolvedRun, worker: Worker) -> tuple[AttemptContext, JournalWriter | None]:
    """Check the shared storage, claim the next attempt number, and return the attempt's context and rank 0's journal.

    All ranks must call this function.

    Raises:
        UserError: The storage is not shared by all nodes, or is not writable.
    """
    config = run.config
    timeout = timedelta(seconds=config.elastic.collective_timeout_s)
    messenger = TorchRankMessenger(dist.new_group(backend="gloo", timeout=timeout))
    # Saving needs a longer timeout, because one rank's storage may be much slower than another's.
    save_timeout = timedelta(seconds=config.checkpoint.save_timeout_s)
    save_messenger = TorchRankMessenger(dist.new_group(backend="gloo", timeout=save_timeout))
    probe_storage(config.run_dir, worker, messenger)
    journal = _claim(run, worker) if worker.rank == 0 else None
    context = AttemptContext(
        run=run,
        worker=worker,
        attempt=messenger.broadcast(journal.attempt if journal else None),
        nodes=tuple(messenger.broadcast(messenger.gather(worker.node))),
        messenger=messenger,
        save_messenger=save_messenger,
        peer_memory=_open_peer_memory(worker, messenger, timeout),
    )
    return context, journal


def _open_peer_memory(worker: Worker, messenger: RankMessenger, timeout: timedelta) -> PeerStore | None:
    """Open peer memory if every rank has the agents' addresses. All ranks must call this function."""
    given = messenger.gather(worker.peer_memory is not None)
    if not messenger.broadcast(given is not None and all(given)):
        return None
    assert worker.peer_memory is not None
    store = PeerMemoryStore(worker.peer_memory)
    lent = store.lent_memory()
    if lent is None:
        _log.info("the peer-memory agent on this node lends no memory; states are sent to it, which needs more memory")
    own = TorchRankMessenger(dist.new_group(backend="gloo", timeout=timeout))
    return PeerStore(store=store, messenger=own, lent=lent)


def _claim(run: ResolvedRun, worker: Worker) -> JournalWriter:
    """Claim an attempt number that neither the journal nor the checkpoint store contains."""
    store, run_dir = run.store, run.config.run_dir
    if (text := takeover(run.config, worker.session)) is not None:
        # Another command has taken over the run, and this command must not take it back.
        raise UserError(text)
    try:
        while True:
            journal = claim_journal(run_dir, worker.clock, after=read_lineage(store).newest_attempt)
            if claim_attempt(store, journal.attempt):
                return journal
            journal.close()
    except OSError as error:
        raise CheckpointError(
            f"the attempt can't be recorded in the checkpoint storage {run.location} ({error}); repair the storage, "
            "then run the same command again"
        ) from error


_FULL = (errno.ENOSPC, errno.EDQUOT)


def probe_storage(run_dir: Place, worker: Worker, messenger: RankMessenger) -> None:
    """Check that every node sees the driver's session file, and that rank 0 sees a file from every node.

    All ranks must call this function.

    Raises:
        UserError: Some nodes see a different directory at the run's path or can't write to it; the error lists them.
        StorageFailedError: The storage is full.
        RunError: The storage does not respond; a later attempt may succeed.
    """
    store = open_store(run_dir, must_exist=True)
    # Use a new folder: a dying attempt of the same session may still be deleting its own folder.
    folder = messenger.broadcast(f"{PROBE_FOLDER}-{uuid.uuid4().hex}")
    mark = f"{folder}/rank-{worker.rank:05d}"
    problem = full = away = None
    try:
        if store.read_whole(SESSION_FILE).decode() != worker.session:
            problem = f"node {worker.node} sees a different run directory than the driver"
        store.replace(mark, [worker.node.encode()])
    except OSError as error:
        problem = f"node {worker.node} can't use it ({error.strerror or error})"
        full = f"{worker.node} ({error.strerror})" if error.errno in _FULL else None
        away = f"{worker.node} ({error.strerror or error})" if is_transient(error) else None
    full = agree(messenger, full)
    if full is not None:
        raise StorageFailedError(
            f"run.storage: the disk of {run_dir} is full: {full}. Free space, then run the same command again"
        )
    _refuse_away(run_dir, agree(messenger, away))
    nodes = messenger.gather((worker.rank, worker.node, problem))
    if nodes is not None:
        try:
            seen = {Path(key).name for key in store.list(folder)}
        except OSError as error:
            problem = f"node {worker.node} can't list it ({error.strerror or error})"
            away = f"{worker.node} ({error.strerror or error})" if is_transient(error) else None
        else:
            unseen = [node for rank, node, known in nodes if known is None and f"rank-{rank:05d}" not in seen]
            if unseen:
                problem = f"files of node {', '.join(sorted(set(unseen)))} are not visible on node {worker.node}"
        # If this fails, the next command deletes the folder.
        with contextlib.suppress(OSError):
            store.delete(folder)
    _refuse_away(run_dir, agree(messenger, away))
    problem = agree(messenger, problem)
    if problem is not None:
        hint = "Mount the same file system at that path on every node"
        if not isinstance(run_dir, Path):
            hint = "Set the same endpoint and credentials on every node, in the environment or cluster.secrets_file"
        raise UserError(f"run.storage: {run_dir} is not shared by all nodes: {problem}. {hint}")


def _refuse_away(run_dir: Place, nodes: str | None) -> None:
    if nodes is not None:
        raise RunError(f"run.storage: {run_dir} does not respond on {nodes}; make the storage reachable on every node")
