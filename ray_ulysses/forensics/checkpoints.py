"""What the checkpoints on disk say of the data, read from their manifests."""

from __future__ import annotations

from pathlib import Path

from ray_ulysses.checkpoint.choice import committed_steps
from ray_ulysses.checkpoint.each_step import for_each_step
from ray_ulysses.checkpoint.manifest import ManifestError, read_facts
from ray_ulysses.forensics.checkpoint_checks import Claim
from ray_ulysses.forensics.checkpoint_place import find_checkpoints
from ray_ulysses.run_names import manifest_key
from ray_ulysses.storage import Store


def read_claims(run_dir: Path) -> list[Claim]:
    """Return what each committed checkpoint of a run says; one that is deleted meanwhile is left out."""
    store = find_checkpoints(run_dir).store
    claims = for_each_step(committed_steps(store), lambda step: _claim(store, step))
    return [claim for claim in claims if claim is not None]


def _claim(store: Store, step: int) -> Claim | None:
    origin = manifest_key(step)
    try:
        _, meta = read_facts(store, step)
    except ManifestError as error:
        gone = isinstance(error.__cause__, FileNotFoundError)
        return None if gone else Claim(step=step, origin=origin, problem=str(error))
    return Claim(step=step, origin=origin, digest=meta.digest, tokens=meta.tokens, cursor=dict(meta.cursor))
