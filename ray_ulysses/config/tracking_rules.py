"""Rules between the settings of the trackers and others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ray_ulysses.config.reference_to_checkpoint import MlflowReference, parse_reference
from ray_ulysses.config.tracking_section import mlflow_is_on
from ray_ulysses.errors import NOT_GIVEN, Problem, without_secret

if TYPE_CHECKING:
    from ray_ulysses.config import Config


def network_storage_has_a_server(config: Config) -> Iterator[Problem]:
    """Yield a problem if MLflow would use SQLite on a network file system or beside an object store."""
    is_remote = not isinstance(config.run_dir, Path)
    if not (is_remote or config.run.storage_kind == "nfs") or not mlflow_is_on(config.tracking):
        return
    uri = config.tracking.uri
    if uri is None or not (uri == "databricks" or uri.startswith(("http://", "https://"))):
        yield Problem(
            path="tracking.uri",
            value=NOT_GIVEN if uri is None else without_secret(uri),
            rule=f"run.storage={config.run.storage} needs an MLflow server, since no path is shared by every node"
            if is_remote
            else "run.storage_kind=nfs needs an MLflow server, since SQLite is not safe there",
            hint="give the server's http:// or https:// address, or leave mlflow out of tracking.trackers",
        )


def event_files_have_a_path(config: Config) -> Iterator[Problem]:
    """Yield a problem if TensorBoard's files, which are appended to, would lie in an object store."""
    if "tensorboard" in config.trackers and not isinstance(config.run_dir, Path):
        yield Problem(
            path="tracking.trackers",
            value=list(config.trackers),
            rule=f"TensorBoard's event files are appended to, and run.storage={config.run.storage} can't append",
            hint="leave tensorboard out, or set run.storage to a path that every node can access",
        )


def mlflow_reference_has_a_server(config: Config) -> Iterator[Problem]:
    """Yield a problem if a checkpoint is to be looked up in MLflow, which is off."""
    reference, tracking = config.model.resume_from, config.tracking
    if reference is None or mlflow_is_on(tracking) or not isinstance(parse_reference(reference), MlflowReference):
        return
    yield Problem(
        path="tracking.trackers",
        value=list(tracking.trackers) if tracking.enabled else [],
        rule=f"model.resume_from={reference!r} is looked up in MLflow, which is off",
        hint="record the run there too, or name the run's directory or store in model.resume_from",
    )
