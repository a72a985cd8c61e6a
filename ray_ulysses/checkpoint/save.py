"""Checkpoint saving: every rank writes and verifies its shard, then rank 0 commits the manifest."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from ray_ulysses.checkpoint.checksums import checksum
from ray_ulysses.checkpoint.choice import Damage, examine, read_committed, set_aside
from ray_ulysses.checkpoint.errors import CheckpointError, FencedError
from ray_ulysses.checkpoint.fence import is_overtaken, read_lineage
from ray_ulysses.checkpoint.intervals import CoverError
from ray_ulysses.checkpoint.manifest import CheckpointMeta, CheckpointRef, Manifest
from ray_ulysses.checkpoint.messenger import RankMessenger, join_problems
from ray_ulysses.checkpoint.shard_table import ShardTable, record_of
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
    """Save and commit a checkpoint of the state after `step` steps.

    All ranks must call this function, with the same `step`, `attempt` and `retry`. Each rank's parts are stored, with
    rank 0's description of the state and rank 0's `meta`. `retry` is the number of earlier saves of this step in this
    attempt, which makes shard names unique. If a rank must not save, `obstacle` is the reason, and every rank raises an
    error with it. `read_back` means to read and verify the shard after writing; a store that verifies writes does not
    need it.

    Raises:
        FencedError: A newer attempt has started.
        CheckpointError: A shard or the manifest could not be written, or another attempt has committed the step. All
            ranks raise the same message, and earlier checkpoints are intact.
    """
    shard, problem, cause, tensors = None, obstacle, None, state.description.tensors
    if obstacle is None:
        file = shard_file(attempt, rank, world_size, retry)
        entry, problem, cause = _write_own(store, step, file, state, read_back=read_back)
        shard = None if entry is None else record_of(entry, tensors, world_size, rank)
    # A record numbers the tensors, so every rank must have them in rank 0's order.
    gathered = messenger.gather((shard, checksum(repr([*tensors.items()]).encode()), problem))
    outcome = _Outcome()
    if gathered is not None:
        shards, sums, problems = zip(*gathered, strict=True)
        other = "its tensors differ from rank 0's in name, order, shape or dtype; all ranks must build the same model"
        others = [None if one == sums[0] else other for one in sums]
        problem = join_problems(list(problems)) or join_problems(others)
        outcome = _Outcome(problem=problem, cause=cause, is_unused=True)
        if outcome.problem is None:
            names = {"step": step, "attempt": attempt, "world_size": world_size}
            table = ShardTable(tensors, world_size, shards)
            outcome = _commit(store, Manifest(**names, meta=meta, state=state.description, shards=table))
        cause = outcome.cause
    is_fenced = isinstance(cause, FencedError)
    problem, is_fenced, is_unused = messenger.broadcast((outcome.problem, is_fenced, outcome.is_unused))
    if shard is not None and is_unused:
        # If the deletion fails, retention deletes the shard later.
        with contextlib.suppress(OSError):
            store.delete(f"{step_folder(step)}/{shard.file}")
    if problem is not None:
        if is_fenced:
            raise FencedError(problem) from cause
        error = CheckpointError(
            f"the checkpoint of step {step} could not be saved: {problem}; the previous checkpoint is intact. Free "
            "some space or repair the storage, then run the same command again to resume from the previous checkpoint"
        )
        error.reason = problem
        raise error from cause
    return CheckpointRef(step=step, attempt=attempt, world_size=world_size)


def _write_own(
    store: Store, step: int, file: str, state: ShardedState, *, read_back: bool
) -> tuple[ShardEntry | None, str | None, Exception | None]:
    """Write and verify this rank's shard; return a problem instead of raising, because the other ranks are waiting."""
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
    problem: str | None = None
    """Reason for the failure, or None if the step is committed."""
    cause: Exception | None = None
    is_unused: bool = False
    """Whether no manifest can refer to the shards of this save; False if the outcome of the commit is unknown."""


def _commit(store: Store, manifest: Manifest) -> _Outcome:
    """Create the manifest after checking that the shards contain the complete state."""
    try:
        manifest.shards.validate()
        manifest.shards.check_cover()
        if is_overtaken(store, manifest.attempt):
            raise FencedError(
                f"the checkpoint of step {manifest.step} is not committed: an attempt newer than attempt "
                f"{manifest.attempt} has taken over the run; no action is needed, because this attempt ends"
            )
        content = manifest.to_bytes()
    except CoverError as error:
        return _Outcome(problem=f"the shards do not contain the complete state ({error})", cause=error, is_unused=True)
    except FencedError as error:
        return _Outcome(problem=str(error), cause=error, is_unused=True)
    except Exception as error:
        return _Outcome(problem=f"the manifest could not be written ({error})", cause=error, is_unused=True)
    try:
        _create_manifest(store, manifest, content)
    except Exception as error:
        # The store may have created the manifest although its response was lost.
        found = _stored_bytes(store, manifest.step)
        if found == content:
            return _Outcome()
        if isinstance(error, AlreadyExistsError):
            if _is_own(store, manifest):
                return _Outcome(is_unused=True)
            problem = f"another attempt has already committed step {manifest.step}"
            return _Outcome(problem=problem, cause=error, is_unused=found is not None)
        return _Outcome(problem=f"the manifest could not be written ({error})", cause=error)
    return _Outcome()


def _is_own(store: Store, manifest: Manifest) -> bool:
    """Return whether an earlier save in this attempt committed the step although the store's response was lost."""
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
        # A dead attempt's late commit must not block the attempt that repeated these steps.
        _clear_dead(store, manifest)
        store.create(manifest_key(manifest.step), [content])


def _stored_bytes(store: Store, step: int) -> bytes | None:
    """Return the content of a step's manifest, or None if the manifest can't be read."""
    try:
        return store.read_whole(manifest_key(step))
    except OSError:
        return None


def _clear_dead(store: Store, manifest: Manifest) -> None:
    """Set aside an earlier attempt's checkpoint of the same step if it is not part of the run.

    Raises:
        AlreadyExistsError: The checkpoint is part of the run, or its manifest can't be read.
    """
    found = read_committed(store, manifest.step)
    if not isinstance(found, Manifest) or read_lineage(store).holds(manifest.step, found.attempt):
        raise AlreadyExistsError(f"step {manifest.step} already has a manifest")
    reason = f"attempt {manifest.attempt} repeated this step, because attempt {found.attempt} had ended before it"
    damage = Damage(step=manifest.step, reason=reason, kind="superseded", attempt=found.attempt)
    set_aside(store, damage, attempt=manifest.attempt)
