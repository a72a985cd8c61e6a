"""MLflow's database is created atomically; evaluations are added to the run's MLflow run."""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import mlflow
import pytest

from ray_ulysses.errors import UserError
from ray_ulysses.tracking.mlflow_client import open_client
from ray_ulysses.tracking.mlflow_models import KEY_TAG
from ray_ulysses.tracking.mlflow_results import track_evaluation
from ray_ulysses.tracking.mlflow_tracker import TrackingIdentity


def test_a_death_during_creation_leaves_no_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    database = tmp_path / "mlflow.db"
    made: list[Path] = []

    def die(tracking_uri: str) -> None:
        made.append(Path(tracking_uri.removeprefix("sqlite:///")))
        made[0].write_bytes(b"half of a database")
        raise KeyboardInterrupt

    monkeypatch.setattr(mlflow, "MlflowClient", die)
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
    opened: list[str] = []

    def make(tracking_uri: str) -> None:
        """Create the file only for a URI without options."""
        opened.append(tracking_uri)
        if "?" not in tracking_uri:
            Path(tracking_uri.removeprefix("sqlite:///")).touch()

    monkeypatch.setattr(mlflow, "MlflowClient", make)
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}?timeout=60"
    with monkeypatch.context() as patch:
        patch.setattr(os, "link", Mock(side_effect=OSError(errno.EPERM, "Operation not permitted")))
        open_client(uri)
    assert opened[1:] == [uri] and list(tmp_path.iterdir()) == []
    open_client(uri)
    assert opened[3:] == [uri] and [path.name for path in tmp_path.iterdir()] == ["mlflow.db"]


@pytest.mark.parametrize("name", ["MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_PASSWORD"])
def test_credentials_require_encryption_or_allow_http(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    uri = "http://mlflow:5000"
    open_client(uri)
    monkeypatch.setenv(name, "hunter2")
    said = f"would receive credentials .{name}. in clear text; .*tracking.allow_http"
    with pytest.raises(UserError, match=said) as refused:
        open_client(uri)
    assert "hunter2" not in str(refused.value)
    open_client(uri, allow_http=True)
    for other in ("https://mlflow:5000", "http://127.0.0.1:5000", "http://localhost:5000", "http://[::1]:5000"):
        open_client(other)


METRICS = {"evaluation/loss": 1.5, "evaluation/key_value_1024": 0.25}
FILES = {"evaluation/step-00000004/evaluation.json": "{}\n", "evaluation/step-00000004/retrieval.svg": "<svg/>"}


@pytest.fixture
def run_dir(uri: str, tmp_path: Path) -> Path:
    """A run directory next to the database."""
    folder = Path(uri.removeprefix("sqlite:///")).parent / tmp_path.name
    folder.mkdir()
    return folder


def _identify(run_dir: Path, uri: str, **fields: Any) -> None:
    """Store in a run directory which MLflow run is its own."""
    TrackingIdentity(**{"uri": uri, "experiment": "e", "key": "k", "run_id": "0" * 32, **fields}).save(run_dir)


def _tracked(client: Any, run_dir: Path, uri: str, artifacts: Path | None = None, key: str = "k") -> str:
    """Create an MLflow run, and store its id in the run directory."""
    location = (artifacts or run_dir.parent / "mlartifacts").as_uri()
    experiment = client.create_experiment(uuid.uuid4().hex, artifact_location=location)
    run_id: str = client.create_run(experiment, tags={KEY_TAG: "k"}).info.run_id
    client.set_terminated(run_id, status="FINISHED")
    _identify(run_dir, uri, key=key, run_id=run_id, experiment_id=experiment)
    return run_id


def test_metrics_and_files_are_added_to_the_runs_mlflow_run(uri: str, client: Any, run_dir: Path) -> None:
    run_id = _tracked(client, run_dir, uri)
    way_there = run_dir / ".." / run_dir.name
    assert track_evaluation(way_there, 4, METRICS, FILES) == ""
    run = client.get_run(run_id)
    assert run.data.metrics == METRICS
    assert [point.step for point in client.get_metric_history(run_id, "evaluation/loss")] == [4]
    assert run.info.status == "FINISHED"
    for name, text in FILES.items():
        assert (run_dir.parent / "mlartifacts" / run_id / "artifacts" / name).read_text() == text


def test_a_database_elsewhere_is_changed_only_if_the_run_is_trusted(uri: str, client: Any, tmp_path: Path) -> None:
    run_id = _tracked(client, tmp_path, uri, tmp_path / "artifacts")
    said = track_evaluation(tmp_path, 4, METRICS, FILES)
    assert "only the run's files specify the server" in said and "--trust-run" in said
    assert client.get_run(run_id).data.metrics == {}
    assert track_evaluation(tmp_path, 4, METRICS, FILES, trust_run=True) == ""
    assert client.get_run(run_id).data.metrics == METRICS


@pytest.mark.parametrize("theirs", ["key", "artifacts", "dots"])
def test_an_mlflow_run_of_another_run_is_not_changed(
    uri: str, client: Any, run_dir: Path, tmp_path: Path, theirs: str
) -> None:
    artifacts = {"artifacts": tmp_path, "dots": run_dir.parent / "mlartifacts" / ".." / "elsewhere"}.get(theirs)
    run_id = _tracked(client, run_dir, uri, artifacts, key="another" if theirs == "key" else "k")
    assert "belongs to another run" in track_evaluation(run_dir, 4, METRICS, FILES)
    assert client.get_run(run_id).data.metrics == {}


def test_no_link_among_the_artifacts_beside_a_run_is_followed(
    uri: str, client: Any, run_dir: Path, tmp_path: Path
) -> None:
    """MLflow itself refuses links below the folder of a run's artifacts."""
    artifacts = run_dir.parent / "mlartifacts" / _tracked(client, run_dir, uri) / "artifacts"
    (canary := tmp_path / "canary").mkdir()
    (file := canary / "file").write_text("mine")
    for place in ("evaluation/step-00000004/evaluation.json", "evaluation", "."):
        link = artifacts / place
        shutil.rmtree(link, ignore_errors=True)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(file if link.suffix else canary)
        assert track_evaluation(run_dir, 4, METRICS, FILES) != ""
        assert [*canary.iterdir()] == [file] and file.read_text() == "mine"
        link.unlink()


@pytest.mark.parametrize("named", ["", "/", None])
def test_an_empty_uri_never_matches_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    if named is not None:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", named)
    (tmp_path / "run").mkdir()
    _identify(tmp_path / "run", "")
    assert "only the run's files specify the server" in track_evaluation(tmp_path / "run", 4, METRICS, FILES)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_no_database_is_created_and_no_link_is_followed(uri: str, tmp_path: Path) -> None:
    run_dir, database = tmp_path / "run", tmp_path / "mlflow.db"
    run_dir.mkdir()
    for _ in range(2):
        _identify(run_dir, f"sqlite:///{database}")
        assert "only the run's files specify the server" in track_evaluation(run_dir, 4, METRICS, FILES)
        assert not database.is_file() or database.is_symlink()
        database.unlink(missing_ok=True)
        database.symlink_to(uri.removeprefix("sqlite:///"))


def test_an_outage_is_reported_without_the_password(tmp_path: Path) -> None:
    assert track_evaluation(tmp_path, 4, METRICS, FILES) == "", "the run is not tracked"
    _identify(tmp_path, "http://user:secret@127.0.0.1:9", experiment_id="0")
    said = track_evaluation(tmp_path, 4, METRICS, FILES, trust_run=True)
    assert said and "secret" not in said
    said = track_evaluation(tmp_path, 4, METRICS, FILES)
    assert "only the run's files specify" in said and "secret" not in said
