"""MLflow's database is created atomically."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import mlflow
import pytest

from ray_ulysses.errors import UserError
from ray_ulysses.tracking.mlflow_client import open_client


def test_a_death_during_creation_leaves_no_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    database = tmp_path / "mlflow.db"
    made: list[Path] = []

    class Dying:
        def __init__(self, tracking_uri: str) -> None:
            made.append(Path(tracking_uri.removeprefix("sqlite:///")))
            made[0].write_bytes(b"half of a database")
            raise KeyboardInterrupt

    monkeypatch.setattr(mlflow, "MlflowClient", Dying)
    with pytest.raises(KeyboardInterrupt):
        open_client(f"sqlite:///{database}")
    assert list(tmp_path.iterdir()) == [] and not made[0].exists()


def test_an_existing_database_is_not_created_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(mlflow, "MlflowClient", lambda tracking_uri: opened.append(tracking_uri))
    (tmp_path / "mlflow.db").touch()
    for uri in (f"sqlite:///{tmp_path / 'mlflow.db'}", "http://127.0.0.1:1", f"sqlite:///{tmp_path / 'none' / 'm.db'}"):
        open_client(uri)
        assert opened.pop() == uri and opened == []


def test_without_hard_links_mlflow_creates_the_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_link(source: str, target: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    opened: list[str] = []
    monkeypatch.setattr(mlflow, "MlflowClient", _maker(opened))
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}?timeout=60"
    with monkeypatch.context() as patch:
        patch.setattr(os, "link", no_link)
        open_client(uri)
    assert opened[1:] == [uri] and list(tmp_path.iterdir()) == []
    open_client(uri)
    assert opened[3:] == [uri] and [path.name for path in tmp_path.iterdir()] == ["mlflow.db"]


def _maker(opened: list[str]) -> Callable[[str], None]:
    """Return a fake MLflow client, which creates the file only for a URI without options."""

    def make(tracking_uri: str) -> None:
        opened.append(tracking_uri)
        if "?" not in tracking_uri:
            Path(tracking_uri.removeprefix("sqlite:///")).touch()

    return make


@pytest.mark.parametrize("name", ["MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_PASSWORD"])
def test_credentials_require_encryption_or_allow_http(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    uri = "http://mlflow:5000"
    open_client(uri)
    monkeypatch.setenv(name, "hunter2")
    with pytest.raises(
        UserError, match=f"would receive credentials .{name}. in clear text; .*tracking.allow_http"
    ) as refused:
        open_client(uri)
    assert "hunter2" not in str(refused.value)
    open_client(uri, allow_http=True)
    for other in ("https://mlflow:5000", "http://127.0.0.1:5000", "http://localhost:5000", "http://[::1]:5000"):
        open_client(other)
