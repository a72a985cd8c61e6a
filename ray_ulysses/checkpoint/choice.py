"""Chooses what to resume from: the newest checkpoint that is committed and whole."""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import dataclass
from typing import Literal

from ray_ulysses.checkpoint.intervals import CoverError, check_cover
from ray_ulysses.checkpoint.manifest import (
    CHECKPOINT_FOLDER,
    MANIFEST_FILE,
    Manifest,
    ManifestError,
    manifest_key,
    read_manifest,
    step_folder,
)
from ray_ulysses.checkpoint.shards import find_damage
from ray_ulysses.storage import AlreadyExistsError, Store
from ray_ulysses.storage.store import read_bytes

Depth = Literal["sizes", "content"]
"""How closely a checkpoint is looked at: the files' sizes, or every byte's checksum."""

_MANIFEST_KEY = re.compile(rf"^{CHECKPOINT_FOLDER}/step-(\d{{8,}})/{re.escape(MANIFEST_FILE)}$")


@dataclass(frozen=True, kw_only=True, slots=True)
class Damage:
    """A checkpoint that was committed and can't be loaded any more.

    Attributes:
        step: Its step.
        reason: What is wrong with it.
    """

    step: int
    reason: str

    def __str__(self) -> str:
        return f"the checkpoint of step {self.step} is damaged and not used: {self.reason}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """What to resume from.

    Attributes:
        manifest: The newest whole checkpoint; None if there is none.
        damaged: Newer ones that are damaged, newest first.
    """

    manifest: Manifest | None
    damaged: tuple[Damage, ...] = ()


def committed_steps(store: Store) -> tuple[int, ...]:
    """Return the steps that have a manifest, ascending."""
    matches = (_MANIFEST_KEY.match(key) for key in store.list(CHECKPOINT_FOLDER))
    return tuple(sorted(int(match[1]) for match in matches if match))


def newest_committed(store: Store, depth: Depth = "content") -> Choice:
    """Return the newest checkpoint that is committed and whole; changes nothing.

    Args:
        store: The run's store.
        depth: How closely to look; a flipped byte is found only by "content", which reads every byte.
    """
    damaged: list[Damage] = []
    for step in reversed(committed_steps(store)):
        examined = examine(store, step, depth)
        if isinstance(examined, Manifest):
            return Choice(manifest=examined, damaged=tuple(damaged))
        damaged.append(examined)
    return Choice(manifest=None, damaged=tuple(damaged))


def examine(store: Store, step: int, depth: Depth = "content") -> Manifest | Damage:
    """Return a step's manifest if the checkpoint is whole, else what is wrong with it."""
    try:
        manifest = read_manifest(store, step)
        sizes = {key: spec.num_elements for key, spec in manifest.state.tensors.items()}
        check_cover(sizes, [stored.interval for shard in manifest.shards for stored in shard.intervals])
    except (ManifestError, CoverError) as error:
        return Damage(step=step, reason=str(error))
    for shard in manifest.shards:
        reason = find_damage(store, step_folder(step), shard, read_content=depth == "content")
        if reason is not None:
            return Damage(step=step, reason=reason)
    return manifest


def set_aside(store: Store, damage: Damage, *, attempt: int) -> None:
    """Take a damaged checkpoint out of the way, so that its step can be committed anew.

    What it said, and why it was set aside, stays in ``set-aside-<attempt>.json`` beside it; its shards stay
    until retention takes them after the next commit. Only the holder of the run's lock may call.

    Args:
        store: The run's store.
        damage: What was found.
        attempt: The attempt that sets it aside.
    """
    key = manifest_key(damage.step)
    try:
        manifest = read_bytes(store, key).decode(errors="replace")
    except OSError:
        manifest = None
    note = json.dumps({"reason": damage.reason, "manifest": manifest})
    # A note of this attempt is there already if it was interrupted right here before.
    with contextlib.suppress(AlreadyExistsError):
        store.create(f"{step_folder(damage.step)}/set-aside-{attempt:04d}.json", [note.encode()])
    store.delete(key)
