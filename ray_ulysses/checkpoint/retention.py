"""What may be deleted, decided apart from deleting it: old checkpoints, and what dead attempts left."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from ray_ulysses.checkpoint.choice import committed_steps
from ray_ulysses.checkpoint.manifest import (
    CHECKPOINT_FOLDER,
    CheckpointRef,
    ManifestError,
    manifest_key,
    read_manifest,
    step_folder,
)
from ray_ulysses.storage import Store

_ATTEMPT_KEY = re.compile(rf"^({CHECKPOINT_FOLDER}/step-(\d{{8,}})/attempt-(\d{{4,}}))/")


def steps_to_delete(committed: Sequence[int], *, newest: int, keep_last: int) -> tuple[int, ...]:
    """Return the committed steps that are no longer needed, oldest first (pure).

    Args:
        committed: Steps that have a manifest.
        newest: The step that was committed just now; it and whatever is beyond it are kept.
        keep_last: How many to keep up to and including it.

    Raises:
        ValueError: `keep_last` is not positive, or `newest` is not committed.
    """
    if keep_last < 1:
        raise ValueError(f"checkpoint.keep_last={keep_last} would delete the only state there is; use 1 or more")
    if newest not in committed:
        raise ValueError(f"step {newest} is not committed, so nothing may be deleted in its favour")
    older = sorted(step for step in committed if step <= newest)
    return tuple(older[: max(len(older) - keep_last, 0)])


def leftovers(
    keys: Iterable[str],
    committed: Mapping[int, int | None],
    *,
    attempt: int,
    in_flight: frozenset[int] = frozenset(),
) -> tuple[str, ...]:
    """Return the folders of shards that no manifest names (pure).

    Args:
        keys: All keys under the checkpoints' folder.
        committed: The attempt that each committed step's manifest names; None if it can't be read: whose
        shards
            are its own is unknown then, so all of them stay.
        attempt: The attempt that asks; folders of later ones are not its business.
        in_flight: Steps that this attempt is saving at the moment.
    """
    found = set()
    for key in keys:
        match = _ATTEMPT_KEY.match(key)
        if not match:
            continue
        step, owner = int(match[2]), int(match[3])
        saving = owner == attempt and step in in_flight
        needed = step in committed and committed[step] in (owner, None)
        if owner <= attempt and not needed and not saving:
            found.add(match[1])
    return tuple(sorted(found))


def apply_retention(store: Store, *, newest: CheckpointRef, keep_last: int) -> tuple[int, ...]:
    """Delete what a new checkpoint has made superfluous; one rank calls, after that checkpoint was committed.

    A checkpoint's manifest goes first, so that a death in between leaves it absent and not torn.

    Args:
        store: The run's store.
        newest: What `save_checkpoint` returned.
        keep_last: How many checkpoints to keep.

    Returns:
        The steps that were deleted.
    """
    committed = committed_steps(store)
    deleted = steps_to_delete(committed, newest=newest.step, keep_last=keep_last)
    for step in deleted:
        store.delete(manifest_key(step))
        store.delete(step_folder(step))
    kept = {step: _owner(store, step) for step in committed if step not in deleted}
    for folder in leftovers(store.list(CHECKPOINT_FOLDER), kept, attempt=newest.attempt):
        store.delete(folder)
    return deleted


def _owner(store: Store, step: int) -> int | None:
    """Return the attempt that a step's manifest names; None if it can't be read."""
    try:
        return read_manifest(store, step).attempt
    except ManifestError:
        return None
