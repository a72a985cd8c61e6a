"""Probes the storage, claims an attempt, and holds each rank's context of it."""

from __future__ import annotations

import contextlib
import errno
import uuid
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from ray_ulysses.checkpoint.errors import CheckpointError, StorageFailedError
from ray_ulysses.checkpoint.fence import claim_attempt, read_lineage
from ray_ulysses.checkpoint.messenger import TorchRankMessenger, agree
from ray_ulysses.errors import RunError, UserError
from ray_ulysses.logging import get_logger
from ray_ulysses.peer_memory import PeerMemoryStore
from ray_ulysses.run.takeover import takeover
from ray_ulysses.run_names import PROBE_FOLDER, SESSION_FILE
from ray_ulysses.storage.place import Place, open_store
from ray_ulysses.storage.retry import is_transient
from ray_ulysses.tracking.journal import claim_journal
from ray_ulysses.trainer.diagnostics import Diagnostics

if TYPE_CHECKING:
    from ray_ulysses.checkpoint.messenger import RankMessenger
    from ray_ulysses.peer_memory.files import LentMemory
    from ray_ulysses.run.settings import ResolvedRun
    from ray_ulysses.tracking.journal import JournalWriter
    from ray_ulysses.trainer.worker import Worker

_log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerStore:
    """Peer memory as used by one rank."""

    store: PeerMemoryStore
    messenger: RankMessenger
    """Exchanges small values between the saving threads, over their own group."""
    lent: LentMemory | None = None
    """Memory of this node's agent, which keeps states in place; None if the agent lends none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptContext:
    """An attempt as each of its ranks knows it."""

    run: ResolvedRun
    """The run, with its layout at this attempt's world size and the store of its checkpoints."""
    worker: Worker
    """This rank's worker, with its clock."""
    attempt: int
    """The attempt's number, on every rank."""
    nodes: tuple[str, ...]
    """Name of each rank's node, by rank."""
    messenger: RankMessenger
    """Exchanges small values between ranks, over a group apart from training's."""
    save_messenger: RankMessenger
    """The same for the saving threads, over their own group."""
    peer_memory: PeerStore | None = None
    """Peer memory and the messenger of its threads; None if there is none."""
    stage: str = ""
    """Name of its stage, once known; empty in a run without stages."""
    measured: str = ""
    """Identity of the data that its losses are measured on, once known."""

    @property
    def rank(self) -> int:
        """Global rank."""
        return self.worker.rank

    @property
    def diagnostics(self) -> Diagnostics:
        """The writer of this rank's diagnostic files."""
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
    messenger = TorchRankMessenger(dist.new_group(backend="gloo", timeout=timeout))
    # One rank's storage may be much slower than another's.
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
    """Open peer memory if every rank has its addresses; every rank must call."""
    given = messenger.gather(worker.peer_memory is not None)
    if not messenger.broadcast(given is not None and all(given)):
        return None
    assert worker.peer_memory is not None
    store = PeerMemoryStore(worker.peer_memory)
    lent = store.lent_memory()
    if lent is None:
        _log.info("the agent of this node takes no memory from this process: states are sent to it, which needs more")
    own = TorchRankMessenger(dist.new_group(backend="gloo", timeout=timeout))
    return PeerStore(store=store, messenger=own, lent=lent)


def _claim(run: ResolvedRun, worker: Worker) -> JournalWriter:
    """Claim an attempt number that is new to both the journal and the checkpoint store."""
    store, run_dir = run.store, run.config.run_dir
    if (text := takeover(run.config, worker.session)) is not None:
        # A command may not take a run back from the one that has it now.
        raise UserError(text)
    try:
        while True:
            journal = claim_journal(run_dir, worker.clock, after=read_lineage(store).newest_attempt)
            if claim_attempt(store, journal.attempt):
                return journal
            journal.close()
    except OSError as error:
        raise CheckpointError(
            f"the attempt can't be recorded beside the checkpoints in {run.location} ({error}); repair the storage, "
            "then start the same command again"
        ) from error


_FULL = (errno.ENOSPC, errno.EDQUOT)


def probe_storage(run_dir: Place, worker: Worker, messenger: RankMessenger) -> None:
    """Check that each node sees the driver's file and that rank 0 sees each node's.

    Every rank must call.

    Raises:
        UserError: Some nodes have another directory at that path, or can't write it; the text names them.
        StorageFailedError: It is full.
        RunError: It does not answer, which may pass.
    """
    store = open_store(run_dir, must_exist=True)
    # A dying attempt of the same session may be deleting its own marks right now.
    folder = messenger.broadcast(f"{PROBE_FOLDER}-{uuid.uuid4().hex}")
    mark = f"{folder}/rank-{worker.rank:05d}"
    problem = full = away = None
    try:
        if store.read_whole(SESSION_FILE).decode() != worker.session:
            problem = f"node {worker.node} sees another run directory than the driver"
        store.replace(mark, [worker.node.encode()])
    except OSError as error:
        problem = f"node {worker.node} can't use it ({error.strerror or error})"
        full = f"{worker.node} ({error.strerror})" if error.errno in _FULL else None
        away = f"{worker.node} ({error.strerror or error})" if is_transient(error) else None
    full = agree(messenger, full)
    if full is not None:
        raise StorageFailedError(
            f"run.storage: the disk of {run_dir} is full: {full}. Free space, then start the same command again"
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
        # The next command deletes leftovers.
        with contextlib.suppress(OSError):
            store.delete(folder)
    _refuse_away(run_dir, agree(messenger, away))
    problem = agree(messenger, problem)
    if problem is not None:
        hint = "Mount the same file system at that path on every node"
        if not isinstance(run_dir, Path):
            hint = "Give every node the same endpoint and credentials, by its environment or cluster.secrets_file"
        raise UserError(f"run.storage: {run_dir} is not one shared directory on every node: {problem}. {hint}")


def _refuse_away(run_dir: Place, nodes: str | None) -> None:
    """Raise `RunError` if the storage does not answer; another attempt may succeed."""
    if nodes is not None:
        raise RunError(f"run.storage: {run_dir} does not answer: {nodes}; make it reachable on every node")
