"""Locates a run's checkpoint store, claims it for one writer, and describes committed checkpoints for the journal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from ray_ulysses.checkpoint import CheckpointMeta, CheckpointRef
from ray_ulysses.checkpoint.choice import committed_steps
from ray_ulysses.checkpoint.fence import read_lineage
from ray_ulysses.checkpoint.manifest import ManifestError, read_facts
from ray_ulysses.checkpoint.retention import KeepRules
from ray_ulysses.config import Config
from ray_ulysses.config.reference_to_checkpoint import RunReference, parse_reference
from ray_ulysses.config.stages import corpus_paths
from ray_ulysses.errors import RunError
from ray_ulysses.run_names import CONFIG_FILE
from ray_ulysses.storage import Store
from ray_ulysses.storage.claim import Claim
from ray_ulysses.storage.location import RETRY_S, ObjectLocation, parse_location
from ray_ulysses.storage.place import TRUST_RUN, Place, open_store, place_of, refuse_server


def checkpoint_location(config: Config, run_dir: Place | None = None) -> str:
    """Return the path or URI of the folder that contains a run's ``checkpoints/`` folder.

    Args:
        config: The run's configuration.
        run_dir: The run's current directory, if it may have been moved; None for the configured directory.
    """
    if config.checkpoint.storage is None:
        return str(config.run_dir if run_dir is None else run_dir.absolute())
    return str(place_of(config.checkpoint.storage) / config.run.name)


def checkpoint_store(config: Config, *, retry_s: float = RETRY_S) -> Store:
    """Return the store at `checkpoint_location` without accessing the storage.

    Args:
        config: The run's configuration.
        retry_s: Maximum time to retry requests to an unreachable object store, in seconds.

    Raises:
        UserError: The location is invalid.
    """
    if config.checkpoint.storage is None:
        # The directory already exists, because the command has claimed it.
        return open_store(config.run_dir, must_exist=True, retry_s=retry_s)
    return open_store(checkpoint_location(config), retry_s=retry_s)


def is_apart(config: Config) -> bool:
    """Return whether a run's checkpoints are stored outside its directory."""
    there, run_dir = place_of(checkpoint_location(config)), config.run_dir
    if isinstance(there, Path) and isinstance(run_dir, Path):
        return there.resolve() != run_dir.resolve()
    return there != run_dir


def checkpoint_claim(config: Config, store: Store, command: str | None = None) -> AbstractContextManager[Claim | None]:
    """Return a context manager that claims the run's checkpoints or raises `UserError` if they are already claimed.

    If the checkpoints are in the run's directory, the claim on that directory suffices, and the context value is None.
    """
    return Claim(store, run=config.run.name, command=command) if is_apart(config) else nullcontext()


@contextmanager
def storage_answers(location: str) -> Iterator[None]:
    """Convert storage errors in the block to errors that name the checkpoint location.

    Raises:
        RunError: The block raised OSError.
    """
    try:
        yield
    except OSError as error:
        raise RunError(
            f"can't read the checkpoints in {location} ({error.strerror or error}); check that the storage is mounted "
            "and readable, then try again"
        ) from error


@contextmanager
def run_dir_answers(config: Config) -> Iterator[None]:
    """Convert object store errors in the block to errors that name ``run.storage``.

    Raises:
        RunError: The block raised OSError, and the run's directory is in an object store.
    """
    try:
        yield
    except OSError as error:
        if isinstance(config.run_dir, Path):
            raise
        raise RunError(
            f"run.storage={config.run.storage!r} can't be read ({error.strerror or error}); check the bucket, its "
            "region and endpoint, and the credentials in the environment or in cluster.secrets_file"
        ) from error


def stored_checkpoints(
    config: Config, run_dir: Place, *, trust_run: bool = False, named: tuple[str, ...] = (), way_out: str = TRUST_RUN
) -> str:
    """Return an existing run's checkpoint location after checking that the user accepts its server.

    Args:
        config: The configuration stored in the run's directory.
        run_dir: The run's directory, specified by the user.
        trust_run: Whether to accept any server in the stored configuration.
        named: Other locations that the user has specified.
        way_out: Advice for the error on how to accept the server; see `refuse_server`.

    Raises:
        UnnamedServerError: The server in ``checkpoint.storage`` is specified only by the stored configuration.
    """
    location = checkpoint_location(config, run_dir)
    if not trust_run and config.checkpoint.storage is not None:
        refuse_server(location, f"checkpoint.storage of {run_dir / CONFIG_FILE}", (run_dir, *named), way_out)
    return location


def named_by(config: Config) -> tuple[str, ...]:
    """Return all storage locations in the user's own configuration."""
    reference = parse_reference(config.model.resume_from) if config.model.resume_from is not None else None
    other = (reference.location,) if isinstance(reference, RunReference) else ()
    storage = () if config.checkpoint.storage is None else (config.checkpoint.storage,)
    return (config.run.storage, *storage, *corpus_paths(config), *other)


def needs_trust(config: Config) -> bool:
    """Return whether users can read the run later only with ``--trust-run``, or with its servers and secrets set."""
    own, *places = map(parse_location, (config.run.storage, config.checkpoint.storage or "/", *corpus_paths(config)))
    stores = [one for one in places if isinstance(one, ObjectLocation)]
    named = {one.server for one in stores} - {None, own.server if isinstance(own, ObjectLocation) else None}
    return bool(named or (stores and config.cluster.secrets_file))


def keep_rules(config: Config) -> KeepRules:
    """Return a run's retention rules for checkpoints."""
    section = config.checkpoint
    return KeepRules(
        last=section.keep_last,
        every_steps=section.keep_every_steps,
        best=section.keep_best,
        best_metric=section.best_metric,
    )


def commit_fields(ref: CheckpointRef, meta: CheckpointMeta) -> dict[str, Any]:
    """Return the journal fields for a committed checkpoint."""
    return {
        "step": ref.step,
        "path": ref.folder,
        "world_size": ref.world_size,
        "digest": meta.digest,
        "tokens": meta.tokens,
        "next_row": meta.cursor["next_row"],
        "reason": meta.reason,
        "sp_size": meta.sp_size,
        "ring_size": meta.ring_size,
        "zero_stage": meta.zero_stage,
        "cursor": dict(meta.cursor),
        "metrics": {name: meta.metrics[name] for name in ("loss", "eval_loss") if name in meta.metrics},
        "parent": meta.extra.get("parent"),
        "written_at": meta.written_at,
        "stage": meta.stage,
        "measured": meta.measured,
    }


def found_fields(store: Store) -> dict[str, Any] | None:
    """Return the fields of the ``checkpoints_found`` event for a run's checkpoints, or None if none is committed.

    Raises:
        OSError: The store can't be listed.
    """
    steps, lineage = committed_steps(store), read_lineage(store)
    for step in reversed(steps):
        with suppress(ManifestError):
            ref, meta = read_facts(store, step)
            if lineage.holds(step, ref.attempt):
                return {**commit_fields(ref, meta), "written_by": ref.attempt, "steps": steps}
    return None
