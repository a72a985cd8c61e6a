"""Chooses what to resume from: the newest checkpoint that is committed, whole and part of the run."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, TypeVar

from ray_ulysses.checkpoint.fence import Lineage, read_lineage
from ray_ulysses.checkpoint.intervals import CoverError
from ray_ulysses.checkpoint.manifest import ForeignManifestError, Manifest, ManifestError, read_manifest
from ray_ulysses.checkpoint.shards import find_damage
from ray_ulysses.run_names import CHECKPOINT_FOLDER, CHECKPOINT_KEY, MANIFEST_FILE, manifest_key, note_key, step_folder
from ray_ulysses.storage import Store
from ray_ulysses.storage.store import create_if_absent

Depth = Literal["sizes", "content"]
"""Depth of an examination: the sizes of the files, or the checksum of every byte."""

_MOST_LOOKS = 10
"""Number of times that checkpoints are listed again because one of them was deleted meanwhile."""
_MOST_THREADS = 16

_Found = TypeVar("_Found")


@dataclass(frozen=True, kw_only=True, slots=True)
class Damage:
    """A checkpoint that was committed and can't be used."""

    step: int
    reason: str
    kind: Literal["damaged", "unreadable", "superseded", "foreign"] = "damaged"
    """``damaged``: it is not what was written. ``unreadable``: the storage does not give it now, which may pass.
    ``superseded``: a dead attempt committed it after its successor had started before that step. ``foreign``: another
    version of ray-ulysses wrote it, and can load it."""
    attempt: int | None = None
    """The attempt that committed what was examined; None if that can't be read."""

    def __str__(self) -> str:
        verdict = {
            "damaged": "is damaged",
            "unreadable": "can't be read",
            "superseded": "is not part of the run",
            "foreign": "is of another version",
        }
        return f"the checkpoint of step {self.step} {verdict[self.kind]} and not used: {self.reason}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The checkpoint to resume from, and those passed over."""

    manifest: Manifest | None
    """The newest whole checkpoint; None if there is none."""
    damaged: tuple[Damage, ...] = ()
    """Newer ones that can't be used, newest first."""


def committed_steps(store: Store) -> tuple[int, ...]:
    """Return the steps that have a manifest, ascending."""
    return committed_in(store.list(CHECKPOINT_FOLDER))


def committed_in(keys: Iterable[str]) -> tuple[int, ...]:
    """Return the steps whose manifest is among some keys, ascending (pure)."""
    matches = (CHECKPOINT_KEY.match(key) for key in keys)
    return tuple(sorted(int(match["step"]) for match in matches if match and match["name"] == MANIFEST_FILE))


def for_each_step(steps: Iterable[int], look: Callable[[int], _Found]) -> list[_Found]:
    """Return the results of a function for each step, in the order of the steps.

    It looks at many concurrently, since on an object store each waits for its answers.

    Args:
        steps: The steps.
        look: It returns what is needed of a manifest and not the manifest itself: in a large world one takes tens of
            megabytes, and a run may have a thousand.
    """
    with ThreadPoolExecutor(_MOST_THREADS, thread_name_prefix="ray-ulysses-steps") as threads:
        return list(threads.map(look, steps))


def newest_committed(
    store: Store, depth: Depth = "content", *, unless: Collection[int] = (), lineage: Lineage | None = None
) -> Choice:
    """Return the newest checkpoint that is committed and whole; changes nothing.

    Args:
        store: The store that holds the checkpoints.
        depth: How closely to look. A flipped byte is found by "content" alone, which reads every byte; after
            "sizes" it is found while loading, and the caller chooses again without that step.
        unless: Steps that are known not to be whole.
        lineage: The run's attempts, where another store than this records them.
    """
    for _ in range(_MOST_LOOKS):
        whole, passed = None, []
        for step in reversed(committed_steps(store)):
            if step in unless:
                continue
            examined = examine(store, step, depth, lineage)
            if isinstance(examined, Manifest):
                whole = examined
                break
            passed.append(examined)
        damaged = {damage.step for damage in passed if damage.kind == "damaged"}
        if not damaged or damaged.issubset(committed_steps(store)):
            break
        # What retention has deleted since it was listed is not damaged, and something newer is there by now.
    return Choice(manifest=whole, damaged=tuple(passed))


def examine(store: Store, step: int, depth: Depth = "content", lineage: Lineage | None = None) -> Manifest | Damage:
    """Return a step's manifest if the checkpoint is whole and part of the run, else what is wrong with it."""
    manifest = read_committed(store, step)
    if isinstance(manifest, Damage):
        return manifest
    lineage = lineage if lineage is not None else read_lineage(store)
    if not lineage.holds(step, manifest.attempt):
        late = f"attempt {manifest.attempt} committed it after a later attempt had started before step {step}"
        return Damage(step=step, reason=late, kind="superseded", attempt=manifest.attempt)
    folder = step_folder(step)
    try:
        # One request instead of one per shard; shards that do not agree with it are examined one by one.
        listed = store.sizes(folder) if depth == "sizes" else {}
    except OSError as error:
        return _unreadable(step, "its folder", error)
    for shard in manifest.shards:
        if listed.get(f"{folder}/{shard.file}") == shard.num_bytes:
            continue
        try:
            reason = find_damage(store, folder, shard, read_content=depth == "content")
        except OSError as error:
            return _unreadable(step, shard.file, error)
        if reason is not None:
            return Damage(step=step, reason=reason, attempt=manifest.attempt)
    return manifest


def read_committed(store: Store, step: int) -> Manifest | Damage:
    """Return a step's manifest if it can be read and its shards hold the whole state, as far as it says."""
    try:
        manifest = read_manifest(store, step)
        manifest.check_cover()
    except (ManifestError, CoverError) as error:
        cause = error.__cause__
        if isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError):
            return _unreadable(step, MANIFEST_FILE, cause)
        is_foreign = isinstance(error, ForeignManifestError)
        return Damage(step=step, reason=str(error), kind="foreign" if is_foreign else "damaged")
    return manifest


def set_aside(store: Store, damage: Damage, *, attempt: int) -> None:
    """Take a checkpoint out of the way, so that its step can be committed again.

    Its manifest, and the reason, are kept in ``set-aside-<attempt>.json`` beside it; its shards stay
    until retention takes them after the next commit. One that can't be read now is left alone: it is passed over,
    and once this attempt has announced its start, it is no longer part of the run. So is one that somebody has
    committed again since it was examined. Only the holder of the run may call.

    Args:
        store: The run's store.
        damage: What was found.
        attempt: The attempt that sets it aside.
    """
    if damage.kind in ("unreadable", "foreign"):
        return
    found = read_committed(store, damage.step)
    if isinstance(found, Manifest) and found.attempt != damage.attempt:
        return
    key = manifest_key(damage.step)
    try:
        manifest = store.read_whole(key).decode(errors="replace")
    except OSError:
        manifest = None
    note = json.dumps({"reason": damage.reason, "kind": damage.kind, "manifest": manifest})
    # A note of this attempt is there already if it was interrupted right here before.
    create_if_absent(store, note_key(damage.step, attempt), note.encode())
    store.delete(key)


def _unreadable(step: int, file: str, error: OSError) -> Damage:
    return Damage(step=step, reason=f"{file} can't be read ({error.strerror or error})", kind="unreadable")
