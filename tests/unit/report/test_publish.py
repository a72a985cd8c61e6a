"""The report of a run that goes on reaches MLflow, and nothing waits for it or fails with it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ray_ulysses.config.loading import parse_config
from ray_ulysses.report import publish
from ray_ulysses.report.page import render_report
from ray_ulysses.report.publish import ReportPublisher, published, redraw
from ray_ulysses.tracking import mlflow_results
from ray_ulysses.tracking.mlflow_results import ArtifactError, store_text
from ray_ulysses.tracking.mlflow_tracker import TrackingIdentity
from tests.polling import wait_until
from tests.unit.config.trees import small_tree
from tests.unit.forensics.runs import Run


def tracked(folder: Path, uri: str = "sqlite:///nowhere.db", run_id: str = "r") -> Path:
    """Store that MLflow has a run for a directory."""
    folder.mkdir(exist_ok=True)
    TrackingIdentity(uri=uri, experiment="e", key="k", run_id=run_id, experiment_id="1").save(folder)
    return folder


@pytest.fixture
def noted(tmp_path: Path) -> Path:
    return tmp_path / "noted"


def _noting(noted: Path, then: str = "") -> list[str]:
    return [sys.executable, "-c", f"open({str(noted)!r}, 'a').write('x')\n{then}"]


def _times(noted: Path) -> int:
    return len(noted.read_text()) if noted.exists() else 0


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


def test_a_tracking_json_of_somebody_else_is_not_followed_while_a_run_trains(
    report_run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    config = parse_config(small_tree(tracking__uri="https://mlflow.example"))
    (tracked(report_run.folder, "http://127.0.0.1:9") / "config.yaml").write_text(config.to_yaml())
    assert publish.main([str(report_run.folder)]) == 1
    assert capsys.readouterr().err == "MLflow has no run for it yet\n"


@pytest.mark.parametrize("minutes", [30.0, None])
def test_a_report_is_drawn_again_in_mlflow_unless_the_run_has_none_there(
    tmp_path: Path, report_run: Run, monkeypatch: pytest.MonkeyPatch, minutes: float | None
) -> None:
    tree = small_tree(tracking__report_minutes=minutes)
    (report_run.folder / "config.yaml").write_text(parse_config(tree).to_yaml())
    stored: list[str] = []
    monkeypatch.setattr(mlflow_results, "store_text", lambda run_dir, name, text, **options: stored.append(text))
    redraw(tracked(report_run.folder))
    assert stored == ([] if minutes is None else [render_report(report_run.folder)])
    assert not (report_run.folder / "report.html").exists()


def test_what_mlflow_does_not_take_is_an_error_of_one_line(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"^MLflow has no run for it yet$"):
        store_text(tmp_path, "report.html", "x")
    away = tracked(tmp_path / "run", "http://someone:secret@127.0.0.1:9")
    with pytest.raises(ArtifactError, match=r"did not take report\.html") as caught:
        store_text(away, "report.html", "x", trust_run=True)
    assert "secret" not in str(caught.value)


def test_it_is_published_every_while_and_once_more_at_the_end(tmp_path: Path, noted: Path) -> None:
    publisher = ReportPublisher(tracked(tmp_path / "run"), 0.01, command=_noting(noted))
    publisher.start()
    wait_until(lambda: _times(noted) >= 3, "it is published again and again")
    publisher.close()
    after = _times(noted)
    time.sleep(0.2)
    assert after >= 4 and _times(noted) == after


def test_a_short_command_publishes_once_and_a_run_that_is_not_tracked_never(tmp_path: Path, noted: Path) -> None:
    for run_dir in (tracked(tmp_path / "run"), tmp_path / "other"):
        publisher = ReportPublisher(run_dir, 3600, command=_noting(noted))
        publisher.start()
        publisher.close()
    assert _times(noted) == 1


def test_a_failure_is_warned_of_once_and_training_goes_on(
    tmp_path: Path, noted: Path, caplog: pytest.LogCaptureFixture
) -> None:
    failing = _noting(noted, "import sys; sys.stderr.write('first\\nthe server is away\\n'); sys.exit(1)")
    publisher = ReportPublisher(tracked(tmp_path / "run"), 0.01, command=failing)
    publisher.start()
    wait_until(lambda: _times(noted) >= 3, "it is tried again")
    publisher.close()
    assert [record.getMessage() for record in caplog.records] == [
        "the report could not be stored in MLflow (the server is away); the run goes on without it"
    ]


def test_one_that_hangs_does_not_keep_the_command(
    tmp_path: Path, noted: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hanging = _noting(noted, "import time; time.sleep(600)")
    publisher = ReportPublisher(tracked(tmp_path / "run"), 0.01, command=hanging)
    publisher.start()
    wait_until(lambda: _times(noted) == 1, "it is being published")
    publisher.close(last_s=0.2)
    assert publisher._process is not None
    assert publisher._process.wait(30) != 0, "it was killed"
    publisher = ReportPublisher(tmp_path / "run", 3600, command=hanging)
    publisher.start()
    publisher.close(last_s=0.2)
    assert publisher._process is not None and publisher._process.poll() is not None
    assert "it was not done after 0.2 s" in caplog.text


def test_an_interrupt_waits_for_no_report(
    tmp_path: Path, noted: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hanging = _noting(noted, "import time; time.sleep(600)")
    made: list[ReportPublisher] = []

    def make(run_dir: Path, every_s: float) -> ReportPublisher:
        made.append(ReportPublisher(run_dir, every_s, command=hanging))
        return made[-1]

    monkeypatch.setattr(publish, "ReportPublisher", make)
    began = 0.0

    def train(every_minutes: float) -> None:
        nonlocal began
        with published(tracked(tmp_path / "run"), every_minutes, lambda: pytest.fail("none is drawn")):
            if every_minutes < 1:
                wait_until(lambda: _times(noted) == 1, "it is being published")
            began = time.monotonic()
            raise KeyboardInterrupt

    for every_minutes in (0.0001, 60.0):
        with pytest.raises(KeyboardInterrupt):
            train(every_minutes)
        assert time.monotonic() - began < 10
    # The one that was being published was killed, and there was no other.
    first, second = (one._process for one in made)
    assert first is not None and first.wait(30) != 0 and second is None and _times(noted) == 1
    made[0]._thread.join(30)
    assert not caplog.records


def test_nothing_is_published_where_it_is_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[object] = []

    class Noting:
        def start(self) -> None:
            happened.append("start")

        def close(self, last_s: float) -> None:
            happened.append("close")

    monkeypatch.setattr(publish, "ReportPublisher", lambda run_dir, every_s: happened.append(every_s) or Noting())
    with published(tmp_path, None, lambda: happened.append("drawing")):
        pass
    assert happened == []
    with pytest.raises(KeyError), published(tmp_path, 0.5, lambda: happened.append("drawing")):
        raise KeyError
    assert happened == [30.0, "start", "drawing", "close"]
