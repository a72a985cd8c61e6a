"""A run's report is stored in MLflow, and a failure is only a warning."""

from __future__ import annotations

import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from ray_ulysses.config.loading import parse_config
from ray_ulysses.report import publish
from ray_ulysses.report.page import render_report
from ray_ulysses.report.publish import published, redraw
from ray_ulysses.tracking import mlflow_results
from ray_ulysses.tracking.mlflow_results import ArtifactError, store_text
from ray_ulysses.tracking.mlflow_tracker import TrackingIdentity
from tests.unit.config.trees import small_tree
from tests.unit.inspect.runs import Run


def tracked(folder: Path, uri: str = "sqlite:///nowhere.db", run_id: str = "r") -> Path:
    """Store the id of an MLflow run in a directory."""
    folder.mkdir(exist_ok=True)
    TrackingIdentity(uri=uri, experiment="e", key="k", run_id=run_id, experiment_id="1").save(folder)
    return folder


def test_the_report_is_an_artifact_of_the_mlflow_run(tmp_path: Path, report_run: Run, mlflow_tables: Path) -> None:
    from mlflow import MlflowClient

    shutil.copy(mlflow_tables, tmp_path / "mlflow.db")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    client = MlflowClient(tracking_uri=uri)
    experiment = client.create_experiment("e", artifact_location=(tmp_path / "artifacts").as_uri())
    run_dir = tracked(report_run.folder, uri, client.create_run(experiment).info.run_id)
    (run_dir / "config.yaml").write_text(parse_config(small_tree(tracking__uri=uri)).to_yaml())
    subprocess.run([sys.executable, "-m", "ray_ulysses.report.publish", str(run_dir)], check=True, timeout=120)
    (stored,) = (tmp_path / "artifacts").rglob("report.html")
    assert stored.read_text(encoding="utf-8") == render_report(run_dir)


def test_a_foreign_tracking_json_is_not_used(report_run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    config = parse_config(small_tree(tracking__uri="https://mlflow.example"))
    (tracked(report_run.folder, "http://127.0.0.1:9") / "config.yaml").write_text(config.to_yaml())
    assert publish.main([str(report_run.folder)]) == 1
    assert capsys.readouterr().err == "the run has no MLflow run yet\n"


def test_an_existing_report_in_mlflow_is_updated(
    tmp_path: Path, report_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    (report_run.folder / "config.yaml").write_text(parse_config(small_tree()).to_yaml())
    stored: list[str] = []
    monkeypatch.setattr(mlflow_results, "store_text", lambda run_dir, name, text, **options: stored.append(text))
    redraw(tracked(report_run.folder))
    assert stored == [render_report(report_run.folder)]
    assert not (report_run.folder / "report.html").exists()


def test_a_failed_upload_is_an_error_without_the_password(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"^the run has no MLflow run yet$"):
        store_text(tmp_path, "report.html", "x")
    away = tracked(tmp_path / "run", "http://someone:secret@127.0.0.1:9")
    with pytest.raises(ArtifactError, match=r"did not store report\.html") as caught:
        store_text(away, "report.html", "x", trust_run=True)
    assert "secret" not in str(caught.value)


def publish_after(run_dir: Path, command: list[str], error: BaseException | None = None) -> list[str]:
    """Train with or without an error, and return the events in order."""
    happened: list[str] = []
    with published(run_dir, lambda: happened.append("drawing"), command=command):
        happened.append("trained")
        if error is not None:
            raise error
    return happened


@pytest.mark.parametrize(("error", "times"), [(None, 1), (KeyError("it failed"), 1), (KeyboardInterrupt(), 0)])
def test_a_tracked_run_is_published_at_its_end_unless_it_is_interrupted(
    tmp_path: Path, error: BaseException | None, times: int
) -> None:
    noted = tmp_path / "noted"
    command = ["sh", "-c", f"printf x >> {noted}"]
    with nullcontext() if error is None else pytest.raises(type(error)):
        assert publish_after(tracked(tmp_path / "run"), command, error) == ["trained", "drawing"]
    assert publish_after(tmp_path / "untracked", command) == ["trained"]
    assert (noted.read_text() if noted.exists() else "") == "x" * times


def test_a_failure_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    publish_after(tracked(tmp_path / "run"), ["sh", "-c", "printf 'first\\nthe server is away\\n' >&2; exit 1"])
    assert [record.getMessage() for record in caplog.records] == [
        "the report could not be stored in MLflow (the server is away); run `ray-ulysses report` to create it"
    ]


def test_a_hanging_report_does_not_block_the_command(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "_LONGEST_S", 1.0)
    publish_after(tracked(tmp_path / "run"), ["sleep", "600"])
    assert "rendering and upload did not finish within 1 s" in caplog.text
