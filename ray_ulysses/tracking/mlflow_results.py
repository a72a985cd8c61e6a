"""Adds evaluations and reports to a run's MLflow run, outside of the tracker.

The run's ``tracking.json`` specifies the MLflow run, but another user may have written that file. Therefore credentials
are sent only to the server in ``MLFLOW_TRACKING_URI``, only the database next to the run is opened, and only an MLflow
run with this run's key is changed.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from importlib.metadata import version
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
    """Storing a file as an MLflow artifact failed."""


def store_text(run_dir: Place, name: str, text: str, *, trust_run: bool = False, allow_http: bool = False) -> None:
    """Store a text as an artifact of the run's MLflow run, replacing an existing artifact of this name.

    Args:
        run_dir: The run's directory.
        name: Path of the artifact.
        text: Content of the artifact.
        trust_run: Whether to use any server or database that the run's ``tracking.json`` specifies.
        allow_http: See `open_client`; has an effect only with ``trust_run``.

    Raises:
        ArtifactError: The MLflow run does not exist, MLflow or its artifact store fails, or the server is specified
            only by an untrusted run.
    """
    with _own_run(run_dir, name, trust_run=trust_run, allow_http=allow_http) as (client, run_id):
        client.log_text(run_id, text, name)


def register_model(
    run_dir: Place, step: int, model: Path, name: str, *, trust_run: bool = False, allow_http: bool = False
) -> str:
    """Copy a model directory into MLflow and register it as a version that `mlflow` loads, with the run as its source.

    Args:
        run_dir: The run's directory.
        step: Step of the exported checkpoint.
        model: The directory of a complete model and its tokenizer, which must fit into memory.
        name: Name of the registered model, which is created if it does not exist.
        trust_run: See `store_text`.
        allow_http: See `store_text`.

    Returns:
        The version's URI, which `mlflow.transformers.load_model` accepts.

    Raises:
        ArtifactError: See `store_text`.
    """
    with _own_run(run_dir, "the model", trust_run=trust_run, allow_http=allow_http) as (client, run_id):
        import mlflow.transformers
        from mlflow.entities import LoggedModelStatus
        from mlflow.exceptions import MlflowException
        from transformers import AutoModelForCausalLM, AutoTokenizer

        with tempfile.TemporaryDirectory(prefix="ray-ulysses-") as folder:
            # Without these, MLflow loads the model in another process to find its imports.
            needed = [f"{library}=={version(library)}" for library in ("transformers", "torch")]
            path = f"{folder}/model"
            # Loaded, since MLflow 3.17 can't save a directory with Transformers 5 (its tasks name classes by string).
            parts = {
                "model": AutoModelForCausalLM.from_pretrained(model),
                "tokenizer": AutoTokenizer.from_pretrained(model),
            }
            # Saving imports DeepSpeed, whose log would become part of the output of `--json`.
            with redirect_stdout(sys.stderr):
                mlflow.transformers.save_model(parts, path, task="text-generation", pip_requirements=needed)
            logged = client.create_logged_model(
                client.get_run(run_id).info.experiment_id,
                name=f"exported-step-{step:08d}",
                source_run_id=run_id,
                params={"step": str(step)},
                model_type="transformers",
            )
            client.log_model_artifacts(logged.model_id, path)
        client.finalize_logged_model(logged.model_id, LoggedModelStatus.READY)
        try:
            client.create_registered_model(name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        made = client.create_model_version(
            name, logged.artifact_location, run_id, tags={"step": str(step)}, model_id=logged.model_id
        )
        return f"models:/{name}/{made.version}"


@contextmanager
def _own_run(run_dir: Place, what: str, **options: bool) -> Iterator[tuple[MlflowClient, str]]:
    """Open the run's MLflow run for the block, and convert errors to `ArtifactError`."""
    identity = TrackingIdentity.load(run_dir)
    if identity is None or identity.run_id is None:
        raise ArtifactError("the run has no MLflow run yet")
    try:
        yield _client(identity, run_dir, **options), identity.run_id
    except UserError as error:
        raise ArtifactError(str(error)) from error
    except Exception as error:  # MLflow and its artifact stores raise errors of many libraries
        shown = without_secret(identity.uri)
        raise ArtifactError(f"{shown} did not store {what} ({str(error).replace(identity.uri, shown)})") from error


def track_evaluation(
    run_dir: Place,
    step: int,
    metrics: Mapping[str, float],
    files: Mapping[str, str],
    *,
    trust_run: bool = False,
    allow_http: bool = False,
) -> str:
    """Log an evaluation's metrics and files to the run's MLflow run. Does nothing if the run was never tracked.

    Args:
        run_dir: The run's directory.
        step: Step of the evaluated checkpoint.
        metrics: Values by metric name.
        files: Texts by artifact path.
        trust_run: See `store_text`.
        allow_http: See `store_text`.

    Returns:
        The error if logging failed, otherwise an empty string.
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
        # MLflow raises errors of any type. An outage must not fail the evaluation, whose result is already saved.
        return without_secret(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason'}")
    return ""


def _client(identity: TrackingIdentity, run_dir: Place, *, trust_run: bool, allow_http: bool) -> MlflowClient:
    """Return a client for the MLflow server or database that a run was tracked in.

    Raises:
        UserError: The server is specified only by an untrusted run, or the MLflow run belongs to another run.
    """
    if trust_run:
        return open_client(identity.uri, allow_http=allow_http)
    shown = f"{run_dir / TRACKING_FILE}: uri={without_secret(identity.uri)!r}"
    named = os.environ.get("MLFLOW_TRACKING_URI", "").rstrip("/")
    is_server = named != "" and identity.uri.rstrip("/") == named
    shared = None if is_server else _shared_folder(identity.uri, run_dir)
    if not is_server and shared is None:
        raise UnnamedServerError(
            f"{shown}: only the run's files specify the server; set MLFLOW_TRACKING_URI to its address, or {TRUST_RUN}"
        )
    client = open_client(identity.uri, way_out=f", and {TRUST_RUN}")
    found = client.get_run(str(identity.run_id))
    is_own = found.data.tags.get(KEY_TAG) == identity.key
    if shared is not None:
        place = urlsplit(str(found.info.artifact_uri))
        is_own &= place.scheme == "file" and Path(unquote(place.path)).resolve().is_relative_to(shared / "mlartifacts")
    if not is_own:
        raise UserError(f"{shown}: its MLflow run {identity.run_id} belongs to another run; {TRUST_RUN}")
    return client


def _shared_folder(uri: str, run_dir: Place) -> Path | None:
    """Return the run directory's parent folder if the URI is the default database in it, otherwise None."""
    database = sqlite_path(uri)
    if not isinstance(run_dir, Path) or database is None or "?" in uri or database.name != "mlflow.db":
        return None
    folder = run_dir.absolute().parent.resolve()
    is_there = database.is_file() and not database.is_symlink()
    return folder if is_there and database.parent.resolve() == folder else None
