"""All attempts share one MLflow run, whose curves have no repeated steps."""

import os
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from ray_ulysses.tracking.mlflow_models import tracked_checkpoints
from ray_ulysses.tracking.mlflow_tracker import MlflowSink, TrackingIdentity, is_tracked, mlflow_page
from tests.polling import wait_until
from tests.unit.tracking.checkpoints import STORE, committed
from tests.unit.tracking.tails import ScriptedTracker


def make_sink(uri, run_dir, **changes):
    fields = {"experiment": "tests", "run_name": "demo", "run_dir": run_dir, "location": STORE, **changes}
    return MlflowSink(uri=uri, **fields)


def make_tracker(uri, run_dir, *, drain_s=60.0, **changes):
    return ScriptedTracker(make_sink(uri, run_dir, **changes), run_dir, retry_s=(0.05, 0.2), drain_s=drain_s)


def log_steps(tracker, steps):
    for step in steps:
        tracker.log_step(step, {"loss": 5.0 - step / 10, "tokens_per_s": 1000.0})


def run_attempt(uri, run_dir, steps, *, params=None, tags=None, status="failed", **changes):
    tracker = make_tracker(uri, run_dir, **changes)
    tracker.start(params or {"optimizer.lr": 0.1}, tags or {"world_size": 4})
    log_steps(tracker, steps)
    tracker.finish(status)
    return TrackingIdentity.load(run_dir)


def mlflow_run(client, run_dir):
    return client.get_run(TrackingIdentity.load(run_dir).run_id)


def curve(client, run_id, name="loss"):
    return [(point.step, point.value) for point in client.get_metric_history(run_id, name)]


def expected(steps):
    return [(step, 5.0 - step / 10) for step in steps]


def test_three_attempts_make_one_run_with_one_curve(uri, client, tmp_path):
    ids = {
        run_attempt(uri, tmp_path, range(1, 8)).run_id,
        run_attempt(uri, tmp_path, range(5, 11), tags={"world_size": 2}).run_id,
        run_attempt(uri, tmp_path, range(11, 13), status="finished").run_id,
    }
    (run_id,) = ids
    assert curve(client, run_id) == expected(range(1, 13))
    run = client.get_run(run_id)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "demo")
    assert (run.data.params, run.data.tags["world_size"]) == ({"optimizer.lr": "0.1"}, "4")
    experiment = client.get_experiment_by_name("tests")
    assert len(client.search_runs([experiment.experiment_id], filter_string=f"tags.run_dir='{tmp_path}'")) == 1


def test_a_resumed_run_is_running_and_a_stopped_run_is_finished(uri, client, tmp_path):
    def state():
        run = mlflow_run(client, tmp_path)
        return run.info.status, run.data.tags["state"]

    run_attempt(uri, tmp_path, range(1, 3), status="stopped")
    assert state() == ("FINISHED", "stopped")
    tracker = make_tracker(uri, tmp_path)
    tracker.start({}, {})
    wait_until(lambda: state() == ("RUNNING", "running"), "the run is running again")
    tracker.finish("failed", 7)
    assert state() == ("FAILED", "failed at step 7")


def test_end_metrics_replace_metrics_of_the_same_step(uri, client, tmp_path):
    tracker = make_tracker(uri, tmp_path)
    tracker.start({}, {})
    tracker.log_step(3, {"time_saves_s": 1.0})
    tracker.finish("finished", 3, {"time_saves_s": 4.5, "goodput": 0.25})
    assert mlflow_run(client, tmp_path).data.metrics == {"time_saves_s": 4.5, "goodput": 0.25}


FILES = {"README.md": "# demo", "config.yaml": "run: {}", "plan.txt": "plan of run 'demo'"}


def start_with_files(uri, run_dir):
    tracker = make_tracker(uri, run_dir)
    tracker.start({}, {}, FILES)
    log_steps(tracker, range(1, 3))
    tracker.finish("finished")
    return TrackingIdentity.load(run_dir)


def test_configuration_plan_and_readme_are_artifacts_and_the_readme_is_the_description(uri, client, tmp_path):
    run_id = start_with_files(uri, tmp_path).run_id
    assert {one.path for one in client.list_artifacts(run_id)} == set(FILES)
    path = client.download_artifacts(run_id, "plan.txt", tmp_path)
    assert Path(path).read_text() == FILES["plan.txt"]
    assert client.get_run(run_id).data.tags["mlflow.note.content"] == "# demo"
    client.set_tag(run_id, "mlflow.note.content", "the one for the paper")
    start_with_files(uri, tmp_path)
    assert client.get_run(run_id).data.tags["mlflow.note.content"] == "the one for the paper"


def test_a_failing_artifact_store_does_not_block_metrics(uri, client, tmp_path, caplog, monkeypatch):
    from mlflow import MlflowClient

    monkeypatch.setattr(MlflowClient, "log_text", Mock(side_effect=PermissionError("no credentials")))
    identity = start_with_files(uri, tmp_path)
    assert curve(client, identity.run_id) == expected(range(1, 3))
    assert "no credentials" in caplog.text


def test_an_outage_during_an_artifact_upload_is_retried(uri, client, tmp_path, monkeypatch):
    from mlflow import MlflowClient

    failures = ["log_text", "get_run"]

    def failing(name):
        method = getattr(MlflowClient, name)

        def call(self, *arguments):
            if failures[:1] == [name]:
                failures.remove(name)
                raise ConnectionError("away")
            return method(self, *arguments)

        return call

    for name in (*failures,):
        monkeypatch.setattr(MlflowClient, name, failing(name))
    identity = start_with_files(uri, tmp_path)
    assert failures == []
    assert {one.path for one in client.list_artifacts(identity.run_id)} == set(FILES)


PAGE = "/#/experiments/7/runs/abc/model-metrics?workflowType=machine_learning"


@pytest.mark.parametrize(
    ("uri", "known", "command", "url"),
    [
        ("http://mlflow:5000/", True, None, f"http://mlflow:5000{PAGE}"),
        ("https://me:secret@m", True, None, f"https://***@m{PAGE}"),
        ("http://mlflow:5000", False, None, "http://mlflow:5000"),
        ("sqlite:////a b/m.db", False, "mlflow ui --backend-store-uri 'sqlite:////a b/m.db'", None),
        ("sqlite:////m.db", True, "mlflow ui --backend-store-uri sqlite:////m.db", f"http://127.0.0.1:5000{PAGE}"),
        ("databricks", True, None, "databricks"),
    ],
)
def test_the_page_of_a_run_depends_on_its_tracker(tmp_path, uri, known, command, url):
    if known:
        TrackingIdentity(uri=uri, experiment="e", key="k", run_id="abc", experiment_id="7").save(tmp_path)
    page = mlflow_page(uri, tmp_path)
    assert (page.command, page.url) == (command, url)
    assert page.is_run == (url is not None and "abc" in url)


def test_an_unreadable_tracking_json_is_not_an_error(tmp_path):
    (tmp_path / "tracking.json").mkdir()
    assert mlflow_page("http://mlflow:5000", tmp_path).url == "http://mlflow:5000"
    assert not is_tracked(tmp_path)


def test_failure_tags_are_removed_when_the_run_resumes(uri, client, tmp_path):
    tracker = make_tracker(uri, tmp_path)
    tracker.start({}, {})
    assert tracker.drain()
    told = {"failure.reason": "lost worker 0 (killed by signal 9)", "failure.rank": "0"}
    later = make_tracker(uri, tmp_path)
    later.tail.start()
    later.finish("failed", tags=told)
    run = mlflow_run(client, tmp_path)
    assert run.info.status == "FAILED"
    assert told.items() <= run.data.tags.items()
    run_attempt(uri, tmp_path, [1], status="finished")
    run = mlflow_run(client, tmp_path)
    assert run.info.status == "FINISHED"
    assert not any(tag.startswith("failure.") for tag in run.data.tags)


def test_a_changed_parameter_becomes_a_tag(uri, client, tmp_path):
    run_attempt(uri, tmp_path, [1], params={"a": 1, "b": 2})
    run_id = run_attempt(uri, tmp_path, [2], params={"a": 1, "b": 3, "c": 4}).run_id
    run = client.get_run(run_id)
    assert run.data.params == {"a": "1", "b": "2", "c": "4"}
    assert run.data.tags["changed.b"] == "3"
    assert curve(client, run_id) == expected([1, 2])


def test_many_parameters_and_long_values_are_logged(uri, client, tmp_path):
    params = {f"section.name_{n}": n for n in range(230)} | {"long": "x" * 10_000}
    run_id = run_attempt(uri, tmp_path, [1], params=params, tags={f"t{n}": n for n in range(130)}).run_id
    run = client.get_run(run_id)
    assert len(run.data.params) == 231
    assert run.data.params["long"] == "x" * 6000
    assert run.data.tags["t129"] == "129"


def test_a_death_before_the_id_is_stored_creates_no_second_run(uri, client, tmp_path):
    first = run_attempt(uri, tmp_path, [1])
    TrackingIdentity(uri=first.uri, experiment=first.experiment, key=first.key).save(tmp_path)
    assert run_attempt(uri, tmp_path, [2]).run_id == first.run_id


def test_an_mlflow_run_of_another_run_is_not_continued(uri, client, tmp_path, caplog):
    other = client.create_run(client.create_experiment(f"other of {tmp_path.name}")).info.run_id
    replace(run_attempt(uri, tmp_path, [1]), run_id=other).save(tmp_path)
    assert run_attempt(uri, tmp_path, [2]).run_id != other
    assert client.get_run(other).data.metrics == {}
    assert f"MLflow run {other} belongs to another run" in caplog.text


def test_a_deleted_mlflow_run_is_replaced_completely(uri, client, tmp_path):
    tracker = make_tracker(uri, tmp_path)
    tracker.start({"optimizer.lr": 0.1}, {"world_size": 4}, FILES)
    for step in (2, 3):
        tracker.log(committed(step))
    tracker.log(committed(6, attempt=2))
    tracker.log_step(6, {"loss": 4.4})
    wait_until(lambda: is_tracked(tmp_path) and curve(client, TrackingIdentity.load(tmp_path).run_id), "a point")
    first = TrackingIdentity.load(tmp_path)
    client.delete_run(first.run_id)
    tracker.log_step(7, {"loss": 4.3})
    wait_until(lambda: TrackingIdentity.load(tmp_path).run_id != first.run_id, "another run")
    second = TrackingIdentity.load(tmp_path).run_id
    wait_until(lambda: curve(client, second) == expected([6, 7]), "its points")
    run = client.get_run(second)
    assert run.info.status == "RUNNING"
    assert run.data.params == {"optimizer.lr": "0.1"}
    assert (run.data.tags["state"], run.data.tags["world_size"]) == ("running", "4")
    assert {one.path for one in client.list_artifacts(second)} == set(FILES)
    found = tracked_checkpoints(client, first.experiment_id, second)
    assert {(one.step, one.state) for one in found} == {(2, "committed"), (3, "committed"), (6, "committed")}
    assert run.data.tags["checkpoint.step"] == "6"
    tracker.finish("finished")


def test_updates_wait_until_a_deleted_experiment_is_restored(uri, client, tmp_path, caplog):
    experiment = client.create_experiment("gone")
    client.delete_experiment(experiment)
    begin = time.monotonic()
    assert run_attempt(uri, tmp_path, [1], experiment="gone") is None
    assert time.monotonic() - begin < 30, "the end does not wait for somebody to act"
    assert "tracking.experiment='gone'" in caplog.text
    assert f"mlflow experiments restore --experiment-id {experiment}" in caplog.text
    assert "is unavailable" not in caplog.text and "could not be reached" not in caplog.text
    client.restore_experiment(experiment)
    assert make_tracker(uri, tmp_path, experiment="gone").catch_up()
    assert curve(client, TrackingIdentity.load(tmp_path).run_id) == expected([1])


def test_a_refused_metric_does_not_block_others(uri, client, tmp_path, caplog):
    tracker = make_tracker(uri, tmp_path)
    tracker.start({}, {})
    tracker.log_step(1, {"loss": 4.9})
    tracker.log(committed(1))
    tracker.log_step(1, {"a bad name \n?": 1.0})
    tracker.log_step(2, {"loss": 4.8})
    tracker.finish("finished")
    # The batch is sent again update by update, without duplicates or further refusals.
    assert caplog.text.count("refused an update") == 1
    assert curve(client, TrackingIdentity.load(tmp_path).run_id) == expected([1, 2])


def test_artifacts_are_stored_next_to_the_database(uri, client, tmp_path):
    run_id = run_attempt(uri, tmp_path, [1]).run_id
    directory = os.path.dirname(uri.removeprefix("sqlite:///"))
    assert client.get_run(run_id).info.artifact_uri.startswith(f"file://{directory}/mlartifacts/")


@pytest.mark.parametrize(
    "text", ['{"uri": "sqlite:///a", "experiment": "e", "key": "k", "run_id": 5}', "[]", "{", "{}"]
)
def test_a_damaged_identity_is_none(tmp_path, text):
    (tmp_path / "tracking.json").write_text(text)
    assert TrackingIdentity.load(tmp_path) is None


def test_existing_marks_do_not_fetch_metric_histories(uri, client, tmp_path, monkeypatch):
    run_id = run_attempt(uri, tmp_path, range(1, 6)).run_id
    for number, step in enumerate((9, 4)):
        client.log_metric(run_id, "loss", float(number), timestamp=2_000_000_000_000 + number, step=step)
    sink = make_sink(uri, tmp_path)
    sink.connect()
    monkeypatch.setattr(sink._client, "get_metric_history", lambda *_: pytest.fail("asked for a whole curve"))
    assert sink.existing_marks() == {"loss": 9, "tokens_per_s": 5}
