"""Locates a run's checkpoints, locks them against a second writer, and says which of them are kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from ray_ulysses.checkpoint.retention import KeepRules
from ray_ulysses.config.loading import load_config
from ray_ulysses.errors import RunError
from ray_ulysses.run_names import CONFIG_FILE
from ray_ulysses.storage.lease import RunLease
from ray_ulysses.storage.local import LocalStore
from ray_ulysses.storage.location import RETRY_S, join_location
from ray_ulysses.storage.lock import RunLock
from ray_ulysses.storage.place import Place, open_store, place_of, store_at

if TYPE_CHECKING:
    from ray_ulysses.config import Config
    from ray_ulysses.storage import Store
    from ray_ulysses.storage.lock_watch import Hold


def checkpoint_location(config: Config, run_dir: Place | None = None) -> str:
    """Return the path or URI under which ``checkpoints/`` of a run is stored.

    Args:
        config: The run's configuration.
        run_dir: The run's directory, if it may have been moved; checkpoints in it were moved along.
    """
    if config.checkpoint.storage is None:
        return str(config.run_dir if run_dir is None else run_dir.absolute())
    return join_location(config.checkpoint.storage, config.run.name)


def checkpoint_store(config: Config, *, retry_s: float = RETRY_S) -> Store:
    """Return the store at `checkpoint_location`; opening it touches nothing.

    Args:
        config: The run's configuration.
        retry_s: How long a request to an object store is tried again while it is away, in seconds.

    Raises:
        UserError: The location is neither a path nor a URI of a known kind.
    """
    if config.checkpoint.storage is None:
        # The command that claimed the run's directory has created it.
        return store_at(config.run_dir, must_exist=True, retry_s=retry_s)
    return open_store(checkpoint_location(config), retry_s=retry_s)


def checkpoint_lock(config: Config, store: Store) -> AbstractContextManager[Hold | None]:
    """Return a lock against a second writer of the run's checkpoints; entering it may raise `UserError`.

    In the run's directory that is the run's own lock, which the caller holds: then entering returns None.
    """
    run_dir = config.run_dir
    if config.checkpoint.storage is None or checkpoint_location(config) == str(run_dir):
        return nullcontext()
    if isinstance(store, LocalStore):
        is_own = isinstance(run_dir, Path) and store.root.resolve() == run_dir.resolve()
        return nullcontext() if is_own else RunLock(store.root, setting="checkpoint.storage")
    return RunLease(store, run=config.run.name)


@contextmanager
def storage_answers(location: str) -> Iterator[None]:
    """Turn a failure of the storage within a block into an error that names the location.

    Raises:
        RunError: The storage could not be read.
    """
    try:
        yield
    except OSError as error:
        raise RunError(
            f"the checkpoints in {location} can't be read ({error.strerror or error}); check that the storage is "
            "mounted and readable, then try again"
        ) from error


@contextmanager
def run_dir_answers(config: Config) -> Iterator[None]:
    """Turn a failure of an object store within a block into an error that names ``run.storage``.

    Raises:
        RunError: The run's directory could not be read.
    """
    try:
        yield
    except OSError as error:
        if isinstance(config.run_dir, Path):
            raise
        raise RunError(
            f"run.storage={config.run.storage!r}: can't be read ({error.strerror or error}); check the bucket, its "
            "region and endpoint, and the credentials in the environment or in cluster.secrets_file"
        ) from error


def checkpoints_of(location: str) -> str:
    """Return the path or URI under which ``checkpoints/`` is stored, for a location that a person names.

    Args:
        location: A run's directory, whose configuration may place them elsewhere, or the root of a store itself.

    Raises:
        ConfigError: The directory's configuration can't be read.
    """
    where = place_of(location)
    if not (where / CONFIG_FILE).is_file():
        return location
    return checkpoint_location(load_config(where / CONFIG_FILE), where)


def keep_rules(config: Config) -> KeepRules:
    """Return the rules by which a run's checkpoints are kept."""
    section = config.checkpoint
    return KeepRules(
        last=section.keep_last,
        every_steps=section.keep_every_steps,
        best=section.keep_best,
        best_metric=section.best_metric,
    )
