"""Adds what was made of a run, its evaluations and its report, to its MLflow run, apart from the tracker."""

from __future__ import annotations

import time
from collections.abc import Mapping

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


def track_evaluation(run_dir: Place, step: int, metrics: Mapping[str, float], files: Mapping[str, str]) -> str:
    """Log metrics and texts; does nothing if the run was never tracked.

    Args:
        run_dir: The run's directory, which names its MLflow run.
        step: Step of the checkpoint that was evaluated.
        metrics: Values by name.
        files: Texts by path of the artifact.

    Returns:
        Why MLflow did not take all of it; empty if it did, or there was nothing to tell.
    """
    try:
        identity = TrackingIdentity.load(run_dir)
        if identity is None or identity.run_id is None:
            return ""
        from mlflow.entities import Metric

        client = open_client(identity.uri)
        now = round(time.time() * 1000)
        points = [Metric(key=name, value=value, timestamp=now, step=step) for name, value in metrics.items()]
        client.log_batch(identity.run_id, metrics=points, synchronous=True)
        for name, text in files.items():
            client.log_text(identity.run_id, text, name)
    except Exception as error:
        # Of any type and from any depth of MLflow: an outage must not cost the result, which is written already.
        return without_secret(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason'}")
    return ""
