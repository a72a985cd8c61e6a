"""An evaluation is added to the run's own MLflow run, and an outage of MLflow is said in a line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ray_ulysses.tracking.mlflow_results import track_evaluation
from ray_ulysses.tracking.mlflow_tracker import TrackingIdentity

METRICS = {"evaluation/loss": 1.5, "evaluation/key_value_1024": 0.25}
FILES = {"evaluation/step-00000004/evaluation.json": "{}\n", "evaluation/step-00000004/retrieval.svg": "<svg/>"}


def test_metrics_and_files_are_those_of_the_runs_mlflow_run(uri: str, client: Any, tmp_path: Path) -> None:
    experiment = client.create_experiment("evaluations", artifact_location=(tmp_path / "artifacts").as_uri())
    run_id = client.create_run(experiment).info.run_id
    client.set_terminated(run_id, status="FINISHED")
    identity = TrackingIdentity(uri=uri, experiment="evaluations", key="k", run_id=run_id, experiment_id=experiment)
    identity.save(tmp_path)
    assert track_evaluation(tmp_path, 4, METRICS, FILES) == ""
    run = client.get_run(run_id)
    assert run.data.metrics == METRICS
    assert [point.step for point in client.get_metric_history(run_id, "evaluation/loss")] == [4]
    assert run.info.status == "FINISHED"
    for name, text in FILES.items():
        assert (tmp_path / "artifacts" / run_id / "artifacts" / name).read_text() == text


def test_an_untracked_run_has_nothing_to_tell(tmp_path: Path) -> None:
    assert track_evaluation(tmp_path, 4, METRICS, FILES) == ""


def test_an_outage_is_said_without_the_password(tmp_path: Path) -> None:
    uri = "http://user:secret@127.0.0.1:9"
    TrackingIdentity(uri=uri, experiment="e", key="k", run_id="0" * 32, experiment_id="0").save(tmp_path)
    said = track_evaluation(tmp_path, 4, METRICS, FILES)
    assert said and "secret" not in said
