"""Adds what was made of a run, its evaluations and its report, to its MLflow run, apart from the tracker.

The run's ``tracking.json`` names the MLflow run, and somebody else may have written it. So only a server that the
environment names gets a request with the user's credentials, and no database is opened but the one beside the run;
there, only the MLflow run that has the key of this run is changed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from ray_ulysses.errors import UserError, without_secret
from ray_ulysses.run_names import TRACKING_FILE
from ray_ulysses.storage.location import sqlite_path
from ray_ulysses.storage.place import TRUST_RUN, Place, UnnamedServerError
from ray_ulysses.tracking.mlflow_client import open_client
from ray_ulysses.tracking.mlflow_models import KEY_TAG
from ray_ulysses.tracking.mlflow_tracker import TrackingIdentity

if TYPE_CHECKING:
    from mlflow import MlflowClient


class ArtifactError(Exception):
    """MLflow did not take a file."""


def store_text(run_dir: Place, name: str, text: str, *, trust_run: bool = False, allow_http: bool = False) -> None:
    """Store a text in place of the artifact with that name.

    Args:
        run_dir: The run's directory, which names its MLflow run.
        name: Path of the artifact.
        text: Its content.
        trust_run: Whether any server or database is used that the run names.
        allow_http: As of `open_client`, if the run is trusted.

    Raises:
        ArtifactError: MLflow has no such run, or doesn't answer, its artifact store refuses the file, or only the run
            names the server.
    """
    identity = TrackingIdentity.load(run_dir)
    if identity is None or identity.run_id is None:
        raise ArtifactError("MLflow has no run for it yet")
    try:
        client = _client(identity, run_dir, trust_run=trust_run, allow_http=allow_http)
        client.log_text(identity.run_id, text, name)
    except UserError as error:
        raise ArtifactError(str(error)) from error
    except Exception as error:  # MLflow and its artifact stores raise errors of many libraries
        shown = without_secret(identity.uri)
        raise ArtifactError(f"{shown} did not take {name} ({str(error).replace(identity.uri, shown)})") from error


def track_evaluation(
    run_dir: Place,
    step: int,
    metrics: Mapping[str, float],
    files: Mapping[str, str],
    *,
    trust_run: bool = False,
    allow_http: bool = False,
) -> str:
    """Log metrics and texts; does nothing if the run was never tracked.

    Args:
        run_dir: The run's directory, which names its MLflow run.
        step: Step of the checkpoint that was evaluated.
        metrics: Values by name.
        files: Texts by path of the artifact.
        trust_run: As of `store_text`.
        allow_http: As of `store_text`.

    Returns:
        Why MLflow did not take all of it; empty if it did, or there was nothing to tell.
    """
    try:
        identity = TrackingIdentity.load(run_dir)
        if identity is None or identity.run_id is None:
            return ""
        client = _client(identity, run_dir, trust_run=trust_run, allow_http=allow_http)
        from mlflow.entities import Metric

        now = round(time.time() * 1000)
        points = [Metric(key=name, value=value, timestamp=now, step=step) for name, value in metrics.items()]
        client.log_batch(identity.run_id, metrics=points, synchronous=True)
        for name, text in files.items():
            client.log_text(identity.run_id, text, name)
    except UserError as error:
        return str(error)
    except Exception as error:
        # Of any type and from any depth of MLflow: an outage must not cost the result, which is written already.
        return without_secret(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason'}")
    return ""


def _client(identity: TrackingIdentity, run_dir: Place, *, trust_run: bool, allow_http: bool) -> MlflowClient:
    """Return a client of the MLflow that a run names.

    Raises:
        UserError: Only the run names it, or the MLflow run there is of another run.
    """
    if trust_run:
        return open_client(identity.uri, allow_http=allow_http)
    shown = f"{run_dir / TRACKING_FILE}: uri={without_secret(identity.uri)!r}"
    named = os.environ.get("MLFLOW_TRACKING_URI", "").rstrip("/")
    is_server = named != "" and identity.uri.rstrip("/") == named
    shared = None if is_server else _shared_folder(identity.uri, run_dir)
    if not is_server and shared is None:
        raise UnnamedServerError(
            f"{shown}: only the run names this MLflow; set MLFLOW_TRACKING_URI to its address, or {TRUST_RUN}"
        )
    client = open_client(identity.uri, way_out=f", and {TRUST_RUN}")
    found = client.get_run(str(identity.run_id))
    is_own = found.data.tags.get(KEY_TAG) == identity.key
    if shared is not None:
        place = urlsplit(str(found.info.artifact_uri))
        is_own &= place.scheme == "file" and Path(unquote(place.path)).resolve().is_relative_to(shared / "mlartifacts")
    if not is_own:
        raise UserError(f"{shown}: the MLflow run {identity.run_id} there is not of this run; {TRUST_RUN}")
    return client


def _shared_folder(uri: str, run_dir: Place) -> Path | None:
    """Return the folder that holds a run's directory, if a URI names the database there, the default of its runs."""
    database = sqlite_path(uri)
    if not isinstance(run_dir, Path) or database is None or "?" in uri or database.name != "mlflow.db":
        return None
    folder = run_dir.absolute().parent.resolve()
    is_there = database.is_file() and not database.is_symlink()
    return folder if is_there and database.parent.resolve() == folder else None
