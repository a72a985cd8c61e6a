"""Opens connections to MLflow with short timeouts, since callers retry by themselves."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

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
    """Return a client of a tracking server or database; nothing is sent yet."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=uri)
