from __future__ import annotations

import shutil

import pytest


@pytest.fixture(scope="session")
def uri(tmp_path_factory, mlflow_tables):
    """Return one SQLite database for all tests of MLflow."""
    patch = pytest.MonkeyPatch()
    patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    patch.setenv("DO_NOT_TRACK", "true")
    copy = shutil.copy(mlflow_tables, tmp_path_factory.mktemp("mlflow") / "mlflow.db")
    yield f"sqlite:///{copy}"
    patch.undo()


@pytest.fixture
def client(uri):
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=uri)
