"""Selection of the checkpoint to resume from: the newest committed checkpoint that is intact and part of the run."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import compress
from typing import Literal, TypeVar

from ray_ulysses.checkpoint.fence import Lineage, read_lineage
from ray_ulysses.checkpoint.intervals import CoverError
from ray_ulysses.checkpoint.manifest import ForeignManifestError, Manifest, ManifestError, read_manifest
from ray_ulysses.checkpoint.shards import find_damage
from ray_ulysses.run_names import CHECKPOINT_FOLDER, CHECKPOINT_KEY, MANIFEST_FILE, manifest_key, note_key, step_folder
from ray_ulysses.storage import Store
from ray_ulysses.storage.store import create_if_absent

Depth = Literal["sizes", "content"]
"""Depth of an examination: file sizes only, or checksums of all bytes."""

_MOST_LOOKS = 10
"""Maximum number of times that checkpoints are listed and examined, since some may be deleted meanwhile."""
_MOST_THREADS = 16

_Found = TypeVar("_Found")


@dataclass(frozen=True, kw_only=True, slots=True)
class Damage:
    """A step whose checkpoint can't be used, with the reason."""

    step: int
    reason: str
    kind: Literal["damaged", "unreadable", "superseded", "foreign"] = "damaged"
    """``damaged``: the content differs from what was written. ``unreadable``: the storage returned an error, which may
    be temporary. ``superseded``: a dead attempt committed the checkpoint after its successor had started from an
    earlier step. ``foreign``: another version of ray-ulysses wrote the checkpoint and can load it."""
    attempt: int | None = None
    """Attempt that committed the checkpoint, or None if the manifest can't be read."""
    is_absent: bool = False
    """Whether the step has no manifest, so that it is not committed or was deleted meanwhile."""

    def __str__(self) -> str:
        verdict = {
            "damaged": "is damaged",
            "unreadable": "can't be read",
            "superseded": "is not part of the run",
            "foreign": "was written by another version of ray-ulysses",
        }
        return f"the checkpoint of step {self.step} {verdict[self.kind]} and is not used: {self.reason}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The checkpoint to resume from, and the newer checkpoints that can't be used."""

    manifest: Manifest | None
    """Manifest of the newest intact checkpoint, or None if no checkpoint is intact."""
    damaged: tuple[Damage, ...] = ()
    """Newer checkpoints that can't be used, newest first."""


def committed_steps(store: Store) -> tuple[int, ...]:
    """Return all steps that have a manifest, in ascending order.

    An object store needs one request per step for it. If the manifests are read anyway, start from `begun_steps`.
    """
    steps = begun_steps(store)
    return tuple(compress(steps, for_each_step(steps, lambda step: is_committed(store, step))))


def any_is_committed(store: Store) -> bool:
    """Return whether any step has a manifest."""
    return any(is_committed(store, step) for step in reversed(begun_steps(store)))


def is_committed(store: Store, step: int) -> bool:
    """Return whether a step has a manifest, without reading it."""
    return MANIFEST_FILE in store.names(step_folder(step))


def committed_in(keys: Iterable[str]) -> tuple[int, ...]:
    """Return all steps whose manifest is among `keys`, in ascending order."""
    matches = (CHECKPOINT_KEY.match(key) for key in keys)
    return tuple(sorted(int(match["step"]) for match in matches if match and match["name"] == MANIFEST_FILE))


def begun_steps(store: Store) -> tuple[int, ...]:
    """Return all steps that have a folder, committed or not, in ascending order.

    An object store needs one request per thousand steps for it, however many shards the steps have.
    """
    return committed_in(f"{CHECKPOINT_FOLDER}/{name}/{MANIFEST_FILE}" for name in store.names(CHECKPOINT_FOLDER))


def for_each_step(steps: Iterable[int], look: Callable[[int], _Found]) -> list[_Found]:
    """Call `look` for each step and return the results in the same order.

    The calls run in parallel, because on an object store each call waits for several requests. `look` should not return
    the manifest itself: at a large world size, a manifest occupies 2 MiB of memory, and a run may have a thousand.
    """
    with ThreadPoolExecutor(_MOST_THREADS, thread_name_prefix="ray-ulysses-steps") as threads:
        return list(threads.map(look, steps))


def newest_committed(
    store: Store, depth: Depth = "content", *, unless: Collection[int] = (), lineage: Lineage | None = None
) -> Choice:
    """Find the newest committed checkpoint that is intact, without changing the store.

    Only the depth "content", which reads every byte, detects a flipped bit. With "sizes", a flipped bit is detected on
    load, and the caller must then call this function again with `unless`, the steps that are known to be damaged. If
    `lineage` is None, it is read from `store`.
    """
    for _ in range(_MOST_LOOKS):
        whole, passed = None, []
        steps = begun_steps(store)
        for step in reversed(steps):
            if step in unless:
                continue
            examined = examine(store, step, depth, lineage)
            if isinstance(examined, Manifest):
                whole = examined
                break
            passed.append(examined)
        absent = {damage.step for damage in passed if damage.is_absent}
        damaged = {damage.step for damage in passed if damage.kind == "damaged"} - absent
        passed = [damage for damage in passed if not damage.is_absent]
        if not damaged and not absent:
            break
        looked = {*damaged, *absent, *set(begun_steps(store)).difference(steps)}
        if damaged == {step for step in looked if is_committed(store, step)}:
            break
        # A step was committed meanwhile, or retention has deleted one after a newer commit, so look again.
    return Choice(manifest=whole, damaged=tuple(passed))


def examine(store: Store, step: int, depth: Depth = "content", lineage: Lineage | None = None) -> Manifest | Damage:
    """Return the step's manifest if the checkpoint is intact and part of the run, or a `Damage` with the reason."""
    manifest = read_committed(store, step)
    if isinstance(manifest, Damage):
        return manifest
    lineage = lineage if lineage is not None else read_lineage(store)
    if not lineage.holds(step, manifest.attempt):
        late = f"attempt {manifest.attempt} committed it after a later attempt had started before step {step}"
        return Damage(step=step, reason=late, kind="superseded", attempt=manifest.attempt)
    folder = step_folder(step)
    try:
        # One listing instead of one request per shard; shards whose listed size differs are examined individually.
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
    """Return the step's manifest if it is valid and covers the state, else a `Damage`; ignores the shard files."""
    try:
        manifest = read_manifest(store, step)
        manifest.shards.check_cover()
    except (ManifestError, CoverError) as error:
        cause = error.__cause__
        if isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError):
            return _unreadable(step, MANIFEST_FILE, cause)
        kind: Literal["foreign", "damaged"] = "foreign" if isinstance(error, ForeignManifestError) else "damaged"
        return Damage(step=step, reason=str(error), kind=kind, is_absent=isinstance(cause, FileNotFoundError))
    return manifest


def set_aside(store: Store, damage: Damage, *, attempt: int) -> None:
    """Remove a damaged checkpoint's manifest so that its step can be committed again.

    The manifest and the reason are stored in ``set-aside-<attempt>.json`` in the step's folder. The shards stay until
    retention deletes them after the next commit. Nothing is changed if the checkpoint is only unreadable, if another
    version of ray-ulysses wrote it, or if another attempt has committed the step since the examination. In these cases
    the checkpoint stops being part of the run when the current attempt records its start. Only the process that holds
    the run's claim may call this function. `attempt` is the number of the current attempt.
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
    # The note already exists if an earlier call was interrupted before the deletion below.
    create_if_absent(store, note_key(damage.step, attempt), note.encode())
    store.delete(key)


def _unreadable(step: int, file: str, error: OSError) -> Damage:
    return Damage(step=step, reason=f"{file} can't be read ({error.strerror or error})", kind="unreadable")
