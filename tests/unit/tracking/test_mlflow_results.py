"""Evaluations are added to the run's MLflow run, and an outage is reported in one line."""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path
from typing import Any

import pytest

from ray_ulysses.tracking.mlflow_models import KEY_TAG
from ray_ulysses.tracking.mlflow_results import track_evaluation
from ray_ulysses.tracking.mlflow_tracker import TrackingIdentity

METRICS = {"evaluation/loss": 1.5, "evaluation/key_value_1024": 0.25}
FILES = {"evaluation/step-00000004/evaluation.json": "{}\n", "evaluation/step-00000004/retrieval.svg": "<svg/>"}


@pytest.fixture
def run_dir(uri: str, tmp_path: Path) -> Path:
    """A run directory next to the database."""
    folder = Path(uri.removeprefix("sqlite:///")).parent / tmp_path.name
    folder.mkdir()
    return folder


def _tracked(client: Any, run_dir: Path, uri: str, artifacts: Path | None = None, key: str = "k") -> str:
    """Create an MLflow run, and store its id in the run directory."""
    location = (artifacts or run_dir.parent / "mlartifacts").as_uri()
    experiment = client.create_experiment(uuid.uuid4().hex, artifact_location=location)
    run_id: str = client.create_run(experiment, tags={KEY_TAG: "k"}).info.run_id
    client.set_terminated(run_id, status="FINISHED")
    identity = TrackingIdentity(uri=uri, experiment="e", key=key, run_id=run_id, experiment_id=experiment)
    identity.save(run_dir)
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
    TrackingIdentity(uri="", experiment="e", key="k", run_id="0" * 32).save(tmp_path / "run")
    assert "only the run's files specify the server" in track_evaluation(tmp_path / "run", 4, METRICS, FILES)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_no_database_is_created_and_no_link_is_followed(uri: str, tmp_path: Path) -> None:
    run_dir, database = tmp_path / "run", tmp_path / "mlflow.db"
    run_dir.mkdir()
    for _ in range(2):
        TrackingIdentity(uri=f"sqlite:///{database}", experiment="e", key="k", run_id="0" * 32).save(run_dir)
        assert "only the run's files specify the server" in track_evaluation(run_dir, 4, METRICS, FILES)
        assert not database.is_file() or database.is_symlink()
        database.unlink(missing_ok=True)
        database.symlink_to(uri.removeprefix("sqlite:///"))


def test_an_outage_is_reported_without_the_password(tmp_path: Path) -> None:
    assert track_evaluation(tmp_path, 4, METRICS, FILES) == "", "the run is not tracked"
    uri = "http://user:secret@127.0.0.1:9"
    TrackingIdentity(uri=uri, experiment="e", key="k", run_id="0" * 32, experiment_id="0").save(tmp_path)
    said = track_evaluation(tmp_path, 4, METRICS, FILES, trust_run=True)
    assert said and "secret" not in said
    said = track_evaluation(tmp_path, 4, METRICS, FILES)
    assert "only the run's files specify" in said and "secret" not in said
