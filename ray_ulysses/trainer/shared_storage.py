"""Checks that every node sees the same storage before anything is trained."""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from ray_ulysses.checkpoint.errors import StorageFailedError
from ray_ulysses.checkpoint.exchange import agree
from ray_ulysses.errors import RunError, UserError
from ray_ulysses.run_names import PROBE_FOLDER, PROBE_NAME, SESSION_FILE
from ray_ulysses.storage.patience import is_transient
from ray_ulysses.storage.place import Place, store_at
from ray_ulysses.storage.store import read_bytes

if TYPE_CHECKING:
    from ray_ulysses.checkpoint.exchange import Exchange
    from ray_ulysses.trainer.worker import Worker

_FULL = (errno.ENOSPC, errno.EDQUOT)


def announce_session(run_dir: Place, session: str) -> None:
    """Write the session's name where every worker looks for it; the driver calls it before it has workers."""
    store = store_at(run_dir)
    for left in _left_probes(run_dir):
        store.delete(left)
    store.replace(SESSION_FILE, [session.encode()])


def _left_probes(run_dir: Place) -> Collection[str]:
    """Return the folders of probes that attempts were killed in."""
    if isinstance(run_dir, Path):
        names = os.listdir(run_dir) if run_dir.is_dir() else []
    else:
        names = run_dir.open_store().root_names()
    return [name for name in names if PROBE_NAME.match(name)]


def probe_storage(run_dir: Place, worker: Worker, exchange: Exchange) -> None:
    """Check that each node sees the driver's file and that rank 0 sees each node's.

    Every rank must call.

    Raises:
        UserError: Some nodes have another directory at that path, or can't write it; the text names them.
        StorageFailedError: It is full.
        RunError: It does not answer, which may pass.
    """
    store = store_at(run_dir, must_exist=True)
    # A dying attempt of the same session may be deleting its marks at this moment.
    folder = exchange.broadcast(f"{PROBE_FOLDER}-{uuid.uuid4().hex}")
    mark = f"{folder}/rank-{worker.rank:05d}"
    problem = full = away = None
    try:
        if read_bytes(store, SESSION_FILE).decode() != worker.session:
            problem = f"node {worker.node} sees another run directory than the driver"
        store.replace(mark, [worker.node.encode()])
    except OSError as error:
        problem = f"node {worker.node} can't use it ({error.strerror or error})"
        full = f"{worker.node} ({error.strerror})" if error.errno in _FULL else None
        away = f"{worker.node} ({error.strerror or error})" if is_transient(error) else None
    full = agree(exchange, full)
    if full is not None:
        raise StorageFailedError(
            f"run.storage: the disk of {run_dir} is full: {full}. Free space, then start the same command again"
        )
    _refuse_away(run_dir, agree(exchange, away))
    nodes = exchange.gather((worker.rank, worker.node, problem))
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
        # The next command deletes what is left.
        with contextlib.suppress(OSError):
            store.delete(folder)
    _refuse_away(run_dir, agree(exchange, away))
    problem = agree(exchange, problem)
    if problem is not None:
        hint = "Mount the same file system at that path on every node"
        if not isinstance(run_dir, Path):
            hint = "Give every node the same endpoint and credentials, by its environment or cluster.secrets_file"
        raise UserError(f"run.storage: {run_dir} is not one shared directory on every node: {problem}. {hint}")


def _refuse_away(run_dir: Place, nodes: str | None) -> None:
    """Raise `RunError` if the storage does not answer; another attempt may meet it again."""
    if nodes is not None:
        raise RunError(f"run.storage: {run_dir} does not answer: {nodes}; make it reachable on every node")
