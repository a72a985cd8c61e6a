"""Opens connections to MLflow with short timeouts, since callers retry by themselves."""

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
"""Variables that make MLflow's client send credentials."""
_CREDENTIALS_FILE = "~/.mlflow/credentials"
HTTPS = "give an https:// address, or set tracking.allow_http: true for a network that nobody else reads"
# One attempt of 3 s instead of five over minutes: what failed stays in the journal, and the tracker's thread retries.
_ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "3",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "0",
    "MLFLOW_HTTP_REQUEST_BACKOFF_JITTER": "0",
    # Otherwise MLflow 3 prints links and table migrations between the lines of the progress view.
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
}


def plain_http_problem(uri: str) -> str | None:
    """Return why credentials of the environment may not be sent to a server, as a clause; None if they may."""
    if not is_clear_text(uri):
        return None
    found = [name for name in _AUTHENTICATE if os.environ.get(name)]
    found += [_CREDENTIALS_FILE] if Path(_CREDENTIALS_FILE).expanduser().is_file() else []
    return f"would get credentials ({', '.join(found)}) in clear text" if found else None


def open_client(uri: str, *, allow_http: bool = False, way_out: str = "") -> MlflowClient:
    """Return a client of a tracking server or database, which is made if it is not there; nothing is sent yet.

    Args:
        uri: Its URI.
        allow_http: Whether credentials may be sent without encryption: ``tracking.allow_http``.
        way_out: What else the user has to do for that setting to be used.

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
