"""A connection to MLflow that gives up soon: whoever uses it keeps what failed and comes back."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlflow import MlflowClient

# One attempt of 3 s instead of five over minutes: the spool keeps what failed, and the thread comes back to it.
_ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "3",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "0",
    "MLFLOW_HTTP_REQUEST_BACKOFF_JITTER": "0",
    # Or MLflow 3 prints links between the lines of the progress view, and the making of its tables.
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
}


def open_client(uri: str) -> MlflowClient:
    """Return a client of a tracking server or database; nothing is asked of it yet.

    Args:
        uri: Tracking URI.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=uri)
