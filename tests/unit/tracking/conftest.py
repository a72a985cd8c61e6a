from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def uri(tmp_path_factory):
    """Return one SQLite database for all tests of MLflow: making its tables takes seconds."""
    patch = pytest.MonkeyPatch()
    patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    patch.setenv("DO_NOT_TRACK", "true")
    yield f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"
    patch.undo()


@pytest.fixture
def client(uri):
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=uri)
