"""Opens MLflow clients with short timeouts; callers do their own retries."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ray_ulysses.errors import UserError, without_secret
from ray_ulysses.storage.local import LocalStore
from ray_ulysses.storage.location import SQLITE, is_clear_text, sqlite_path
from ray_ulysses.storage.store import AlreadyExistsError

if TYPE_CHECKING:
    from mlflow import MlflowClient

_AUTHENTICATE = (
    *("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN"),
    *("MLFLOW_TRACKING_AUTH", "MLFLOW_TRACKING_AWS_SIGV4"),
)
"""Environment variables that make MLflow's client send credentials."""
_CREDENTIALS_FILE = "~/.mlflow/credentials"
HTTPS = "use an https:// address, or set tracking.allow_http: true if the network is trusted"
# One try of 3 s instead of MLflow's five over minutes: the tracker's thread retries from the journal.
_ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "3",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "0",
    "MLFLOW_HTTP_REQUEST_BACKOFF_JITTER": "0",
    # Otherwise MLflow 3 prints links and migration messages into the progress view.
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
}


def plain_http_problem(uri: str) -> str | None:
    """Return a clause that says why credentials must not be sent to a server, or None if they may be sent."""
    if not is_clear_text(uri):
        return None
    found = [name for name in _AUTHENTICATE if os.environ.get(name)]
    found += [_CREDENTIALS_FILE] if Path(_CREDENTIALS_FILE).expanduser().is_file() else []
    return f"the server would receive credentials ({', '.join(found)}) in clear text" if found else None


def open_client(uri: str, *, allow_http: bool = False, way_out: str = "") -> MlflowClient:
    """Return a client for a tracking server or database, without contacting the server. A missing database is created.

    Args:
        uri: Tracking URI.
        allow_http: Whether credentials may be sent without encryption (``tracking.allow_http``).
        way_out: Text appended to the error, for example a further step that makes ``tracking.allow_http`` effective.

    Raises:
        UserError: Credentials would be sent without encryption.
    """
    if not allow_http and (problem := plain_http_problem(uri)) is not None:
        raise UserError(f"tracking.uri={without_secret(uri)!r}: {problem}; {HTTPS}{way_out}")
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from mlflow import MlflowClient

    database = sqlite_path(uri)
    if database is not None and database.parent.is_dir() and not database.exists():
        _make_database(database)
    return MlflowClient(tracking_uri=uri)


def _make_database(path: Path) -> None:
    """Create MLflow's database atomically.

    MLflow 3 creates its tables over several seconds, and not in one transaction. A process that dies in between would
    leave a database that no client can open (``table ... already exists``).
    """
    from mlflow import MlflowClient

    with tempfile.TemporaryDirectory(prefix="ray-ulysses-") as folder:
        made = Path(folder) / "mlflow.db"
        MlflowClient(tracking_uri=f"{SQLITE}{made}")
        # Another process may have created the file; or the file system has no hard links, and MLflow creates it later.
        with suppress(AlreadyExistsError, UserError):
            LocalStore(path.parent).create(path.name, [made.read_bytes()])
