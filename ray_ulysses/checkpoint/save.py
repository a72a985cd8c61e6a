"""Saves a checkpoint: every rank writes and checks its shard, then rank 0 commits the manifest."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from ray_ulysses.checkpoint.choice import Damage, examine, read_committed, set_aside
from ray_ulysses.checkpoint.errors import CheckpointError, FencedError
from ray_ulysses.checkpoint.fence import is_overtaken, read_lineage
from ray_ulysses.checkpoint.intervals import CoverError
from ray_ulysses.checkpoint.manifest import CheckpointMeta, CheckpointRef, Manifest
from ray_ulysses.checkpoint.messenger import RankMessenger, join_problems
from ray_ulysses.checkpoint.shards import ShardEntry, find_damage, write_shard
from ray_ulysses.checkpoint.state import ShardedState
from ray_ulysses.run_names import manifest_key, shard_file, step_folder
from ray_ulysses.storage import AlreadyExistsError, Store


def save_checkpoint(
    store: Store,
    *,
    step: int,
    attempt: int,
    rank: int,
    world_size: int,
    state: ShardedState,
    meta: CheckpointMeta,
    messenger: RankMessenger,
    retry: int = 0,
    obstacle: str | None = None,
    read_back: bool = True,
) -> CheckpointRef:
    """Save the state after `step` steps; when it returns, the checkpoint is committed.

    Every rank must call, with the same `step`, `attempt` and `retry`.

    Args:
        store: The run's store.
        step: Completed optimizer steps.
        attempt: The attempt's number; its shards are in a folder of their own.
        rank: This rank.
        world_size: All ranks.
        state: This rank's parts; the description of rank 0 is stored.
        meta: What the loop adds; rank 0's is stored.
        messenger: Joins the ranks.
        retry: How often this attempt has tried this step before; a shard's name is never used twice.
        obstacle: Why nothing may be committed now, if this rank knows a reason; every rank fails with it.
        read_back: Whether to read a shard back once it is written; not needed where the store itself verifies it.

    Raises:
        FencedError: A newer attempt has begun.
        CheckpointError: A rank could not write, or the step was committed before. Every rank raises it with
            the same text, nothing is committed, and checkpoints before it are untouched.
    """
    shard, problem, cause = None, obstacle, None
    if obstacle is None:
        file = shard_file(attempt, rank, world_size, retry)
        shard, problem, cause = _write_own(store, step, file, state, read_back=read_back)
    gathered = messenger.gather((shard, problem))
    outcome = _Outcome()
    if gathered is not None:
        shards = tuple(shard for shard, _ in gathered)
        outcome = _Outcome(problem=join_problems([problem for _, problem in gathered]), cause=cause, is_unused=True)
        if outcome.problem is None:
            names = {"step": step, "attempt": attempt, "world_size": world_size}
            outcome = _commit(store, Manifest(**names, meta=meta, state=state.description, shards=shards))
        cause = outcome.cause
    is_fenced = isinstance(cause, FencedError)
    problem, is_fenced, is_unused = messenger.broadcast((outcome.problem, is_fenced, outcome.is_unused))
    if shard is not None and is_unused:
        # If that fails too, retention takes it later.
        with contextlib.suppress(OSError):
            store.delete(f"{step_folder(step)}/{shard.file}")
    if problem is not None:
        if is_fenced:
            raise FencedError(problem) from cause
        raise _failed(step, problem) from cause
    return CheckpointRef(step=step, attempt=attempt, world_size=world_size)


def _failed(step: int, problem: str) -> CheckpointError:
    error = CheckpointError(
        f"the checkpoint of step {step} could not be saved: {problem}; the checkpoint before it is "
        f"untouched. Make room or repair the storage, then start the same command again: it resumes there"
    )
    error.reason = problem
    return error


def _write_own(
    store: Store, step: int, file: str, state: ShardedState, *, read_back: bool
) -> tuple[ShardEntry | None, str | None, Exception | None]:
    """Write this rank's shard and read it back; return the problem instead of raising, since the other ranks wait."""
    try:
        shard = write_shard(store, step_folder(step), file, state.parts)
    except Exception as error:
        return None, f"{file} could not be written ({error})", error
    if not read_back:
        return shard, None, None
    try:
        return shard, find_damage(store, step_folder(step), shard, read_content=True), None
    except OSError as error:
        return shard, f"{file} could not be read back ({error})", error


@dataclass(frozen=True, kw_only=True, slots=True)
class _Outcome:
    """The result of a commit."""

    problem: str | None = None
    """What went wrong; None if the step is committed."""
    cause: Exception | None = None
    is_unused: bool = False
    """Whether no manifest can name the shards of this try; they are kept where a commit's outcome is unknown."""


def _commit(store: Store, manifest: Manifest) -> _Outcome:
    """Check that the shards hold the whole state and create the manifest."""
    try:
        manifest.check_cover()
        _refuse_overtaken(store, manifest)
        content = manifest.to_bytes()
    except CoverError as error:
        return _Outcome(problem=f"the shards do not hold the whole state ({error})", cause=error, is_unused=True)
    except FencedError as error:
        return _Outcome(problem=str(error), cause=error, is_unused=True)
    except Exception as error:
        return _Outcome(problem=f"the manifest could not be written ({error})", cause=error, is_unused=True)
    try:
        _create_manifest(store, manifest, content)
    except Exception as error:
        # The answer may have been lost and not the manifest.
        found = _stored_bytes(store, manifest.step)
        if found == content:
            return _Outcome()
        if isinstance(error, AlreadyExistsError):
            if _is_own(store, manifest):
                return _Outcome(is_unused=True)
            problem = f"step {manifest.step} is committed already, by another attempt"
            return _Outcome(problem=problem, cause=error, is_unused=found is not None)
        return _Outcome(problem=f"the manifest could not be written ({error})", cause=error)
    return _Outcome()


def _is_own(store: Store, manifest: Manifest) -> bool:
    """Return whether an earlier try of this attempt committed the step and its answer was lost."""
    try:
        found = examine(store, manifest.step, "sizes")
    except OSError:
        return False
    return isinstance(found, Manifest) and found.attempt == manifest.attempt


def _create_manifest(store: Store, manifest: Manifest, content: bytes) -> None:
    try:
        store.create(manifest_key(manifest.step), [content])
    except AlreadyExistsError:
        if _stored_bytes(store, manifest.step) == content:
            return
        # A dead attempt's late commit is in the way of the one that trained these steps again.
        _clear_dead(store, manifest)
        store.create(manifest_key(manifest.step), [content])


def _stored_bytes(store: Store, step: int) -> bytes | None:
    """Return a step's manifest as it is stored; None if there is none, or if it can't be read now."""
    try:
        return store.read_whole(manifest_key(step))
    except OSError:
        return None


def _refuse_overtaken(store: Store, manifest: Manifest) -> None:
    if is_overtaken(store, manifest.attempt):
        raise FencedError(
            f"the checkpoint of step {manifest.step} is not committed: a newer attempt than attempt {manifest.attempt} "
            "has taken the run over; no action is needed, this attempt ends"
        )


def _clear_dead(store: Store, manifest: Manifest) -> None:
    """Set aside what an earlier attempt committed after this one had started before that step.

    Raises:
        AlreadyExistsError: It is part of the run, or can't be read.
    """
    found = read_committed(store, manifest.step)
    if not isinstance(found, Manifest) or read_lineage(store).holds(manifest.step, found.attempt):
        raise AlreadyExistsError(f"step {manifest.step} has a manifest")
    reason = f"attempt {manifest.attempt} trained this step again, attempt {found.attempt} had ended before it"
    damage = Damage(step=manifest.step, reason=reason, kind="superseded", attempt=found.attempt)
    set_aside(store, damage, attempt=manifest.attempt)
