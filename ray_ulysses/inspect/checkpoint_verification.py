"""Verifies a checkpoint: its manifest, its tensor coverage, and every byte of every file."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from ray_ulysses.checkpoint.choice import Damage, committed_steps, is_committed, read_committed
from ray_ulysses.checkpoint.fence import Lineage, read_lineage
from ray_ulysses.checkpoint.manifest import Manifest
from ray_ulysses.checkpoint.retention import nameable
from ray_ulysses.checkpoint.shards import ShardDamage, ShardEntry, verified_chunks
from ray_ulysses.clock import Clock
from ray_ulysses.errors import UserError
from ray_ulysses.inspect.checkpoint_listing import CheckpointCondition, plain_json
from ray_ulysses.inspect.run_data import open_run_storage
from ray_ulysses.run.checkpoint_store import storage_answers
from ray_ulysses.run_names import step_folder
from ray_ulysses.storage import Store
from ray_ulysses.storage.place import Place

_NUM_THREADS = 4

Watch = Callable[[int, int], None]
"""Progress callback, called with the number of bytes read so far and in total, by one thread at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileVerdict:
    """Verification result of one checkpoint file."""

    file: str
    num_bytes: int
    num_tensors: int
    problem: str | None
    """Description of the damage, with tensor and byte range; None if the file is intact."""
    is_unread: bool = False
    """Whether the file currently can't be read, so that any damage is unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointVerdict:
    """Verification result of a checkpoint."""

    name: str
    location: str
    step: int
    path: str
    problem: str | None
    """Problem with the checkpoint itself, not a file (manifest, tensor coverage, or not part of the run), or None."""
    kind: Literal["damaged", "unreadable", "superseded", "foreign"] = "damaged"
    attempt: int | None = None
    """The attempt that wrote the checkpoint; None if the manifest can't be read."""
    world_size: int | None = None
    num_tensors: int = 0
    num_elements: int = 0
    """Number of elements in the state; each element is stored exactly once."""
    files: tuple[FileVerdict, ...] = ()
    seconds: float = 0.0

    @property
    def is_whole(self) -> bool:
        """Whether the checkpoint can be loaded."""
        return self.problem is None and all(file.problem is None for file in self.files)

    @property
    def condition(self) -> CheckpointCondition:
        """Condition of the checkpoint: ``damaged`` only if a file is missing or its content is wrong."""
        bad = [file for file in self.files if file.problem is not None]
        if any(not file.is_unread for file in bad):
            return "damaged"
        if bad:
            return "unreadable"
        return "whole" if self.problem is None else self.kind

    def to_json(self) -> dict[str, Any]:
        """Return the output of ``inspect RUN --verify-checkpoint STEP --json``."""
        fields = asdict(self)
        del fields["kind"]
        return {"whole": self.is_whole, "condition": self.condition, **plain_json(fields)}


def verify_checkpoint(
    run_dir: Place,
    which: int | Literal["latest"],
    *,
    clock: Clock,
    watch: Watch = lambda done, total: None,
    trust_run: bool = False,
) -> CheckpointVerdict:
    """Read every byte of a committed checkpoint and compare it with the checksums.

    Args:
        run_dir: The run's directory. Its configuration may specify another checkpoint store.
        which: Checkpoint step, or "latest" for the newest checkpoint that is part of the run, even if it is damaged.
        clock: Clock that measures the duration.
        watch: Progress callback.
        trust_run: See `open_run_storage`.

    Raises:
        UserError: The checkpoint is not committed or was deleted during the verification, or the store can't be opened.
        RunError: The store can't be listed.
    """
    started = clock.monotonic()
    storage = open_run_storage(run_dir, trust_run=trust_run)
    with storage_answers(storage.location):
        steps, lineage = committed_steps(storage.store), read_lineage(storage.store)
        step = which if which != "latest" else max(nameable(storage.store), default=None)
    if step is None or step not in steps:
        subject = "no checkpoint" if which == "latest" else f"no checkpoint of step {which}"
        raise UserError(
            f"--verify-checkpoint={which}: {subject} is committed in {storage.location}; committed: "
            f"{', '.join(map(str, steps)) or 'none'} (`inspect RUN --checkpoints` lists all folders)"
        )
    verdict = CheckpointVerdict(
        name=run_dir.absolute().name, location=storage.location, step=step, path=step_folder(step), problem=None
    )
    verdict = _read(storage.store, verdict, lineage, watch)
    if not verdict.is_whole and _is_gone(storage.store, step):
        raise UserError(f"--verify-checkpoint={step}: retention deleted this checkpoint; choose another step")
    return replace(verdict, seconds=clock.monotonic() - started)


def _read(store: Store, verdict: CheckpointVerdict, lineage: Lineage, watch: Watch) -> CheckpointVerdict:
    manifest = read_committed(store, verdict.step)
    if isinstance(manifest, Damage):
        return replace(verdict, problem=manifest.reason, kind=manifest.kind)
    problem = (
        f"attempt {manifest.attempt} committed this checkpoint after a later attempt had resumed from an earlier step; "
        "the checkpoint is not part of the run and is never loaded"
    )
    return replace(
        verdict,
        problem=None if lineage.holds(verdict.step, manifest.attempt) else problem,
        kind="superseded",
        attempt=manifest.attempt,
        world_size=manifest.world_size,
        num_tensors=len(manifest.state.tensors),
        num_elements=sum(spec.num_elements for spec in manifest.state.tensors.values()),
        files=_read_files(store, manifest, watch),
    )


def _is_gone(store: Store, step: int) -> bool:
    try:
        return not is_committed(store, step)
    except OSError:
        # The verdict reports the files that could not be read.
        return False


def _read_files(store: Store, manifest: Manifest, watch: Watch) -> tuple[FileVerdict, ...]:
    """Read all files, several in parallel to hide the storage latency."""
    shards = manifest.shards
    total = sum(record.bytes for record in shards.records)
    lock, done = threading.Lock(), 0

    def tell(num_bytes: int) -> None:
        nonlocal done
        with lock:
            done += num_bytes
            watch(done, total)

    folder = step_folder(manifest.step)
    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="ray-ulysses-verify") as threads:
        # By number, because an entry holds the positions of all intervals of its shard.
        return tuple(threads.map(lambda at: _read_file(store, folder, shards[at], tell), range(len(shards))))


def _read_file(store: Store, folder: str, shard: ShardEntry, tell: Callable[[int], None]) -> FileVerdict:
    problem, is_unread = None, False
    try:
        for num_bytes in verified_chunks(store, folder, shard):
            tell(num_bytes)
    except FileNotFoundError:
        problem = f"{shard.file} is missing"
    except OSError as error:
        problem, is_unread = f"{shard.file} can't be read ({error.strerror or error}), possibly only temporarily", True
    except ShardDamage as damage:
        problem = str(damage)
    return FileVerdict(
        file=shard.file,
        num_bytes=shard.num_bytes,
        num_tensors=len(shard.intervals),
        problem=problem,
        is_unread=is_unread,
    )
