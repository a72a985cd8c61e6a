"""Saves a checkpoint: every rank writes and checks its shard, then rank 0 commits the manifest."""

from __future__ import annotations

from ray_ulysses.checkpoint.exchange import Exchange, join_problems
from ray_ulysses.checkpoint.intervals import CoverError, check_cover
from ray_ulysses.checkpoint.manifest import (
    CheckpointMeta,
    CheckpointRef,
    Manifest,
    manifest_key,
    shard_file,
    step_folder,
)
from ray_ulysses.checkpoint.shards import ShardEntry, find_damage, write_shard
from ray_ulysses.checkpoint.state import ShardedState
from ray_ulysses.errors import RunError
from ray_ulysses.storage import AlreadyExistsError, Store


class CheckpointError(RunError):
    """A checkpoint could not be saved or loaded; every rank raises the same text."""


def save_checkpoint(
    store: Store,
    *,
    step: int,
    attempt: int,
    rank: int,
    world_size: int,
    state: ShardedState,
    meta: CheckpointMeta,
    exchange: Exchange,
) -> CheckpointRef:
    """Save the state after `step` steps; when it returns, the checkpoint is committed.

    Every rank must call, with the same `step` and `attempt`.

    Args:
        store: The run's store.
        step: Completed optimizer steps.
        attempt: The attempt's number; its shards lie in a folder of their own.
        rank: This rank.
        world_size: All ranks.
        state: This rank's pieces; the description of rank 0 is stored.
        meta: What the loop adds; rank 0's is stored.
        exchange: Joins the ranks.

    Raises:
        CheckpointError: A rank could not write, or the step was committed before. Every rank raises it with
        the same
            text, nothing is committed, and checkpoints before it are untouched.
    """
    shard, problem, cause = _write_own(store, step, shard_file(attempt, rank, world_size), state)
    gathered = exchange.gather((shard, problem))
    if gathered is not None:
        problem = join_problems([problem for _, problem in gathered])
        if problem is None:
            shards = tuple(shard for shard, _ in gathered)
            manifest = Manifest(
                step=step,
                attempt=attempt,
                world_size=world_size,
                meta=meta,
                state=state.description,
                shards=shards,
            )
            problem, cause = _commit(store, manifest)
    problem = exchange.broadcast(problem)
    if problem is not None:
        if shard is not None:
            _delete_own(store, step, shard.file)
        raise CheckpointError(
            f"the checkpoint of step {step} could not be saved: {problem}; the checkpoint before it is "
            f"untouched. Make room or repair run.storage, then start the same command again: it resumes there"
        ) from cause
    return CheckpointRef(step=step, attempt=attempt, world_size=world_size, folder=step_folder(step))


def _write_own(
    store: Store, step: int, file: str, state: ShardedState
) -> tuple[ShardEntry | None, str | None, Exception | None]:
    """Write this rank's shard and read it back; return what goes wrong, since the others wait to hear."""
    try:
        shard = write_shard(store, step_folder(step), file, state.pieces)
    except Exception as error:
        return None, f"{file} could not be written ({error})", error
    return shard, find_damage(store, step_folder(step), shard, read_content=True), None


def _commit(store: Store, manifest: Manifest) -> tuple[str | None, Exception | None]:
    """Check that the shards hold the whole state and create the manifest; return what goes wrong."""
    sizes = {key: spec.num_elements for key, spec in manifest.state.tensors.items()}
    intervals = [stored.interval for shard in manifest.shards for stored in shard.intervals]
    try:
        check_cover(sizes, intervals)
        store.create(manifest_key(manifest.step), [manifest.to_bytes()])
    except AlreadyExistsError as error:
        return f"step {manifest.step} is committed already, by another attempt or an earlier save", error
    except CoverError as error:
        return f"the shards do not hold the whole state ({error})", error
    except Exception as error:
        return f"the manifest could not be written ({error})", error
    return None, None


def _delete_own(store: Store, step: int, file: str) -> None:
    """Delete a shard that was not committed; if that fails too, retention takes it later."""
    try:
        store.delete(f"{step_folder(step)}/{file}")
    except OSError:
        return
