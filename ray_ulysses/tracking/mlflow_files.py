"""Stores a file of a run as an artifact of its MLflow run, apart from the tracker that trains along."""

from __future__ import annotations

from ray_ulysses.errors import without_secret
from ray_ulysses.storage.place import Place
from ray_ulysses.tracking.mlflow_client import open_client
from ray_ulysses.tracking.mlflow_tracker import TrackingIdentity


class ArtifactError(Exception):
    """MLflow did not take a file."""


def store_text(run_dir: Place, name: str, text: str) -> None:
    """Store a text in place of the artifact with that name.

    Raises:
        ArtifactError: MLflow has no such run, or doesn't answer, or its artifact store refuses the file.
    """
    identity = TrackingIdentity.load(run_dir)
    if identity is None or identity.run_id is None:
        raise ArtifactError("MLflow has no run for it yet")
    try:
        open_client(identity.uri).log_text(identity.run_id, text, name)
    except Exception as error:  # MLflow and its artifact stores raise errors of many libraries
        shown = without_secret(identity.uri)
        raise ArtifactError(f"{shown} did not take {name} ({str(error).replace(identity.uri, shown)})") from error
