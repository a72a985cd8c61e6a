"""Where a run's checkpoints are kept: in its directory, or under a place of their own."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from ray_ulysses.storage.lease import RunLease
from ray_ulysses.storage.local import LocalStore
from ray_ulysses.storage.location import join_location, open_store
from ray_ulysses.storage.lock import RunLock

if TYPE_CHECKING:
    from ray_ulysses.config import Config
    from ray_ulysses.storage import Store


def checkpoint_location(config: Config) -> str:
    """Return the path or URI under which ``checkpoints/`` of a run lies."""
    if config.checkpoint.storage is None:
        return str(config.run_dir)
    return join_location(config.checkpoint.storage, config.run.name)


def checkpoint_lock(config: Config) -> AbstractContextManager[object]:
    """Return what keeps a second command from writing the run's checkpoints; entering it may raise `UserError`.

    In the run's directory that is the run's own lock, which the caller holds.
    """
    if config.checkpoint.storage is None:
        return nullcontext()
    store = checkpoint_store(config)
    if isinstance(store, LocalStore):
        return RunLock(store.root)
    return RunLease(store, run=config.run.name)


def checkpoint_store(config: Config) -> Store:
    """Return the store of a run's checkpoints; opening it touches nothing.

    Raises:
        UserError: The location is no path and no URI of a known kind.
    """
    if config.checkpoint.storage is None:
        return LocalStore(config.run_dir)
    return open_store(checkpoint_location(config))
