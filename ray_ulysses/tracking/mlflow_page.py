"""Locates the page of a run's metrics in MLflow."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from ray_ulysses.errors import without_secret
from ray_ulysses.storage.place import Place
from ray_ulysses.tracking.mlflow_tracker import TrackingIdentity

_UI_ADDRESS = "http://127.0.0.1:5000"
"""The default address of ``mlflow ui``."""
_TRAINING = "?workflowType=machine_learning"
"""Otherwise MLflow 3 shows the page as that of an application of language models, with runs as "evaluation runs"."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MlflowPage:
    """The way to a run's metrics."""

    command: str | None
    """The command that shows a database in a browser; None if a server does."""
    url: str | None
    """The page of the run's metrics; before the run is created, that of the server, if any."""
    is_run: bool
    """Whether the page is that of the run."""

    def in_words(self) -> str:
        """Return command and URL on one line."""
        return ", then ".join(part for part in (self.command, self.url) if part is not None)


def mlflow_page(uri: str, run_dir: Place) -> MlflowPage:
    """Return the way to the metrics of a run.

    Args:
        uri: Its tracking URI; a password in it is not shown.
        run_dir: Its directory, which names its MLflow run once there is one.
    """
    shown = without_secret(uri)
    is_server = uri.startswith(("http://", "https://"))
    is_database = "://" in uri and not is_server and not uri.startswith("databricks")
    try:
        identity = TrackingIdentity.load(run_dir)
    except OSError:
        # Showing the page must not fail because the storage does not answer now.
        identity = None
    path = None
    if identity is not None and identity.uri == uri and None not in (identity.run_id, identity.experiment_id):
        path = f"/#/experiments/{identity.experiment_id}/runs/{identity.run_id}/model-metrics{_TRAINING}"
    if is_server:
        return MlflowPage(command=None, url=shown.rstrip("/") + (path or ""), is_run=path is not None)
    if is_database:
        url = None if path is None else _UI_ADDRESS + path
        command = f"mlflow ui --backend-store-uri {shlex.quote(shown)}"
        return MlflowPage(command=command, url=url, is_run=path is not None)
    return MlflowPage(command=None, url=shown, is_run=False)
