"""Where a person sees a run in MLflow: the page of its curves."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from ray_ulysses.errors import without_secret
from ray_ulysses.tracking.mlflow_tracker import TrackingIdentity

_UI_ADDRESS = "http://127.0.0.1:5000"
"""Where ``mlflow ui`` listens unless it is told otherwise."""
_TRAINING = "?workflowType=machine_learning"
"""Or MLflow 3 shows the page among those of an application of language models, with runs as "evaluation runs"."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MlflowPage:
    """How to get to a run's curves.

    Attributes:
        command: Shows a database in a browser; None where a server does.
        url: The page of the run's metrics; before the run is made, the server's, if there is one.
        is_run: Whether the page is the run's.
    """

    command: str | None
    url: str | None
    is_run: bool

    def in_words(self) -> str:
        """Return it on one line."""
        return ", then ".join(part for part in (self.command, self.url) if part is not None)


def mlflow_page(uri: str, run_dir: Path) -> MlflowPage:
    """Return how to get to the curves of a run.

    Args:
        uri: Its tracking URI; a password in it is not shown.
        run_dir: Its directory, which knows its MLflow run once there is one.
    """
    shown = without_secret(uri)
    is_server = uri.startswith(("http://", "https://"))
    is_database = "://" in uri and not is_server and not uri.startswith("databricks")
    try:
        identity = TrackingIdentity.load(run_dir)
    except OSError:
        # A storage that does not answer now must not end who only wants to show the page.
        identity = None
    path = None
    if identity is not None and identity.uri == uri and None not in (identity.run_id, identity.experiment_id):
        path = f"/#/experiments/{identity.experiment_id}/runs/{identity.run_id}/model-metrics{_TRAINING}"
    if is_server:
        server = shown.rstrip("/")
        return MlflowPage(command=None, url=server + (path or ""), is_run=path is not None)
    if is_database:
        command, url = (
            f"mlflow ui --backend-store-uri {shlex.quote(shown)}",
            None if path is None else _UI_ADDRESS + path,
        )
        return MlflowPage(command=command, url=url, is_run=path is not None)
    return MlflowPage(command=None, url=shown, is_run=False)
