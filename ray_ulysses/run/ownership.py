"""Assigns the checkpoints in ``checkpoint.storage`` to a single run directory.

Without an owner, two run directories with the same run name and checkpoint storage would alternately continue each
other's training, and neither journal would be complete. A moved or copied directory keeps its identity.
"""

from __future__ import annotations

import json
import socket
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter

from ray_ulysses.checkpoint import Manifest, newest_committed
from ray_ulysses.config import Config
from ray_ulysses.data.fingerprint import stable_hash
from ray_ulysses.errors import UserError
from ray_ulysses.run.checkpoint_store import storage_answers
from ray_ulysses.run.settings import ResolvedRun
from ray_ulysses.run_names import IDENTITY_FILE, OWNER_FILE
from ray_ulysses.storage import Store
from ray_ulysses.storage.place import open_store
from ray_ulysses.storage.store import create_if_absent
from ray_ulysses.tracking.events import CheckpointCommitted
from ray_ulysses.tracking.journal_reader import read_entries
from ray_ulysses.tracking.steps import StepGroup
from ray_ulysses.validation import ContentError, read_json


@dataclass(frozen=True, kw_only=True, slots=True)
class _Owner:
    identity: str
    run_dir: str
    host: str


_OWNER = TypeAdapter(_Owner)


def claim_checkpoints(run: ResolvedRun) -> None:
    """Make this run directory the permanent owner of its checkpoints. The caller must hold the run's claim.

    If several directories call this function concurrently, exactly one succeeds. Checkpoints without an owner file,
    for example after a move, belong to the directory whose journal records the newest checkpoint.

    Raises:
        UserError: The checkpoints belong to another directory. The storage was not changed.
        RunError: The storage does not respond.
    """
    config, store, location = run.config, run.store, run.location
    if config.checkpoint.storage is None:
        return
    identity = run_identity(config)
    with storage_answers(location):
        owner = _read_owner(store, location)
        if owner is None:
            newest = newest_committed(store, "sizes")
            if newest.manifest is not None and not _is_recorded(config, newest.manifest):
                raise _refusal(config, location, "the run directory whose journal records them")
            note = _Owner(identity=identity, run_dir=str(config.run_dir), host=socket.gethostname())
            is_created = create_if_absent(store, OWNER_FILE, json.dumps(asdict(note)).encode())
            owner = note if is_created else _read_owner(store, location)
    if owner is None or owner.identity != identity:
        there = "another directory" if owner is None else f"the run directory {owner.run_dir} on host {owner.host}"
        raise _refusal(config, location, there)


def run_identity(config: Config) -> str:
    """Return the run directory's unique id, which is stored in the directory. Create the id if it does not exist."""
    store = open_store(config.run_dir, must_exist=True)
    made = uuid.uuid4().hex
    if create_if_absent(store, IDENTITY_FILE, made.encode()):
        return made
    return store.read_whole(IDENTITY_FILE).decode(errors="replace")


def peer_memory_key(config: Config) -> str:
    """Return the key of the run's peer memory, which differs between copies of a run directory."""
    run_dir = config.run_dir
    # Resolve symbolic links, because the next driver may use another path to the same directory.
    place = run_dir.resolve() if isinstance(run_dir, Path) else run_dir
    return stable_hash([run_identity(config), str(place)])


def _read_owner(store: Store, location: str) -> _Owner | None:
    try:
        return read_json(_OWNER, store.read_whole(OWNER_FILE))
    except FileNotFoundError:
        return None
    except ContentError as error:
        raise UserError(
            f"{location}/{OWNER_FILE}, which records the owner of the checkpoints, is damaged ({error}); delete the "
            "file, then continue the run in the directory whose journal records the newest checkpoint"
        ) from error


def _is_recorded(config: Config, manifest: Manifest) -> bool:
    """Return whether the journal records the checkpoint's commit, or its training step if no commit is recorded."""
    step, trained, digests = manifest.step, False, set()
    for entry in read_entries(config.run_dir):
        if entry.attempt == manifest.attempt and isinstance(entry, StepGroup):
            trained |= bool((entry.rows["step"] == step).any())
        elif entry.attempt == manifest.attempt and isinstance(entry, CheckpointCommitted) and entry.step == step:
            digests.add(entry.digest)
    return int(manifest.meta.digest, 16) in digests if digests else trained


def _refusal(config: Config, location: str, owner: str) -> UserError:
    return UserError(
        f"checkpoint.storage={config.checkpoint.storage!r}: the checkpoints of run {config.run.name!r} belong "
        f"to {owner}, not to {config.run_dir}, and only the owner may continue the run. Set another run.name or "
        f"checkpoint.storage; model.resume_from={location} starts a new run from these checkpoints"
    )
