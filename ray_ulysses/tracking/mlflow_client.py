"""Opens connections to MLflow with short timeouts, since callers retry by themselves."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ray_ulysses.errors import UserError
from ray_ulysses.storage.local import LocalStore
from ray_ulysses.storage.location import SQLITE, sqlite_path
from ray_ulysses.storage.store import AlreadyExistsError

if TYPE_CHECKING:
    from mlflow import MlflowClient

# One attempt of 3 s instead of five over minutes: the spool keeps failed events, and the tracker's thread retries.
_ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "3",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "0",
    "MLFLOW_HTTP_REQUEST_BACKOFF_JITTER": "0",
    # Otherwise MLflow 3 prints links and table migrations between the lines of the progress view.
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
}


def open_client(uri: str) -> MlflowClient:
    """Return a client of a tracking server or database, which is made if it is not there; nothing is sent yet."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from mlflow import MlflowClient

    database = sqlite_path(uri)
    if database is not None and database.parent.is_dir() and not database.exists():
        _make_database(database)
    return MlflowClient(tracking_uri=uri)


def _make_database(path: Path) -> None:
    """Create MLflow's database whole or not at all.

    MLflow 3 takes seconds to make its tables, not in one transaction: a process that dies meanwhile would leave a
    database that no client can open any more (``table ... already exists``).
    """
    from mlflow import MlflowClient

    with tempfile.TemporaryDirectory(prefix="ray-ulysses-") as folder:
        made = Path(folder) / "mlflow.db"
        MlflowClient(tracking_uri=f"{SQLITE}{made}")
        # Another process may have made it meanwhile; or the file system has no links, and MLflow makes it there.
        with suppress(AlreadyExistsError, UserError):
            LocalStore(path.parent).create(path.name, [made.read_bytes()])
