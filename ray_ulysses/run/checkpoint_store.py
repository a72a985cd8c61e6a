"""Locates a run's checkpoints, claims them for one writer, and describes them for its journal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray_ulysses.checkpoint.choice import committed_steps
from ray_ulysses.checkpoint.fence import read_lineage
from ray_ulysses.checkpoint.manifest import ManifestError, read_facts
from ray_ulysses.checkpoint.retention import KeepRules
from ray_ulysses.config.reference_to_checkpoint import RunReference, parse_reference
from ray_ulysses.config.stages import corpus_paths
from ray_ulysses.errors import RunError
from ray_ulysses.run_names import CONFIG_FILE
from ray_ulysses.storage.claim import Claim
from ray_ulysses.storage.location import RETRY_S, ObjectLocation, parse_location
from ray_ulysses.storage.place import TRUST_RUN, Place, open_store, place_of, refuse_server

if TYPE_CHECKING:
    from ray_ulysses.checkpoint import CheckpointMeta, CheckpointRef
    from ray_ulysses.config import Config
    from ray_ulysses.storage import Store


def checkpoint_location(config: Config, run_dir: Place | None = None) -> str:
    """Return the path or URI under which ``checkpoints/`` of a run is stored.

    Args:
        config: The run's configuration.
        run_dir: The run's directory, if it may have been moved along with the checkpoints in it.
    """
    if config.checkpoint.storage is None:
        return str(config.run_dir if run_dir is None else run_dir.absolute())
    return str(place_of(config.checkpoint.storage) / config.run.name)


def checkpoint_store(config: Config, *, retry_s: float = RETRY_S) -> Store:
    """Return the store at `checkpoint_location`; opening it touches nothing.

    Args:
        config: The run's configuration.
        retry_s: How long requests to an unreachable object store are retried, in seconds.

    Raises:
        UserError: The location is neither a path nor a URI of a known kind.
    """
    if config.checkpoint.storage is None:
        # The command that claimed the run's directory has created it.
        return open_store(config.run_dir, must_exist=True, retry_s=retry_s)
    return open_store(checkpoint_location(config), retry_s=retry_s)


def is_apart(config: Config) -> bool:
    """Return whether a run's checkpoints are not in its directory."""
    there, run_dir = place_of(checkpoint_location(config)), config.run_dir
    if isinstance(there, Path) and isinstance(run_dir, Path):
        return there.resolve() != run_dir.resolve()
    return there != run_dir


def checkpoint_claim(config: Config, store: Store, command: str | None = None) -> AbstractContextManager[Claim | None]:
    """Return a claim on the run's checkpoints; entering it may raise `UserError`.

    The caller's claim on the run covers checkpoints in the run's directory: then entering returns None.
    """
    return Claim(store, run=config.run.name, command=command) if is_apart(config) else nullcontext()


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


def stored_checkpoints(
    config: Config, run_dir: Place, *, trust_run: bool = False, named: tuple[str, ...] = (), way_out: str = TRUST_RUN
) -> str:
    """Return the path or URI of the checkpoints of a run whose configuration is in its directory.

    Args:
        config: That configuration.
        run_dir: The run's directory, which the user names.
        trust_run: Whether to use every server that it names.
        named: Other locations that the user names.
        way_out: How to allow a refused server, besides the environment.

    Raises:
        UnnamedServerError: Only the configuration names the server of its ``checkpoint.storage``.
    """
    location = checkpoint_location(config, run_dir)
    if not trust_run and config.checkpoint.storage is not None:
        refuse_server(location, f"checkpoint.storage of {run_dir / CONFIG_FILE}", (run_dir, *named), way_out)
    return location


def named_by(config: Config) -> tuple[str, ...]:
    """Return the locations that the user's own configuration names (pure)."""
    reference = parse_reference(config.model.resume_from) if config.model.resume_from is not None else None
    other = (reference.location,) if isinstance(reference, RunReference) else ()
    storage = () if config.checkpoint.storage is None else (config.checkpoint.storage,)
    return (config.run.storage, *storage, *corpus_paths(config), *other)


def needs_trust(config: Config) -> bool:
    """Return whether commands that read the run need ``--trust-run``, or its server in their environment (pure)."""
    own, *places = map(parse_location, (config.run.storage, config.checkpoint.storage or "/", *corpus_paths(config)))
    stores = [one for one in places if isinstance(one, ObjectLocation)]
    named = {one.server for one in stores} - {None, own.server if isinstance(own, ObjectLocation) else None}
    return bool(named or (stores and config.cluster.secrets_file))


def keep_rules(config: Config) -> KeepRules:
    """Return the rules by which a run's checkpoints are kept."""
    section = config.checkpoint
    return KeepRules(
        last=section.keep_last,
        every_steps=section.keep_every_steps,
        best=section.keep_best,
        best_metric=section.best_metric,
    )


def commit_fields(ref: CheckpointRef, meta: CheckpointMeta) -> dict[str, Any]:
    """Return the journal's fields for a committed checkpoint (pure)."""
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
    """Return the fields of ``checkpoints_found`` for a run's committed checkpoints; None if there are none.

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
