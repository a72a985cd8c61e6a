"""What the checkpoints on disk say of the data, read from their manifests."""

from __future__ import annotations

from pathlib import Path

from ray_ulysses.checkpoint.choice import committed_steps
from ray_ulysses.checkpoint.manifest import ManifestError, manifest_key, read_manifest
from ray_ulysses.forensics.checkpoint_checks import Claim
from ray_ulysses.forensics.checkpoint_place import find_checkpoints


def read_claims(run_dir: Path) -> list[Claim]:
    """Return what each committed checkpoint of a run says; one that is deleted meanwhile is left out."""
    store = find_checkpoints(run_dir).store
    claims = []
    for step in committed_steps(store):
        origin = manifest_key(step)
        try:
            meta = read_manifest(store, step).meta
        except ManifestError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                claims.append(Claim(step=step, origin=origin, problem=str(error)))
            continue
        claims.append(Claim(step=step, origin=origin, digest=meta.digest, tokens=meta.tokens, cursor=dict(meta.cursor)))
    return claims
