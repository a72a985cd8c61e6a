"""One MLflow run for the life of a run: a curve without repeated steps, whatever died in between."""

import os
import socket
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ray_ulysses.tracking.mlflow_models import tracked_checkpoints
from ray_ulysses.tracking.mlflow_tracker import MlflowSink, TrackingIdentity, is_tracked, mlflow_page
from tests.polling import wait_until
from tests.unit.tracking.checkpoints import STORE, committed
from tests.unit.tracking.tails import ScriptedTracker

REPOSITORY = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(__file__))))


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


def test_a_resumed_run_runs_and_a_stopped_one_is_no_failure(uri, client, tmp_path):
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


def test_the_numbers_of_an_end_are_shown_although_the_step_has_some_already(uri, client, tmp_path):
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


def test_a_store_that_takes_no_artifacts_keeps_no_point_from_its_curve(uri, client, tmp_path, caplog, monkeypatch):
    from mlflow import MlflowClient

    def refuse(*_):
        raise PermissionError("no credentials")

    monkeypatch.setattr(MlflowClient, "log_text", refuse)
    identity = start_with_files(uri, tmp_path)
    assert curve(client, identity.run_id) == expected(range(1, 3))
    assert "no credentials" in caplog.text


def test_an_outage_while_artifacts_are_sent_is_waited_for(uri, client, tmp_path, monkeypatch):
    from mlflow import MlflowClient

    calls, log_text, get_run = [], MlflowClient.log_text, MlflowClient.get_run

    def break_down(self, *arguments):
        calls.append(arguments)
        if len(calls) == 1:
            raise ConnectionError("away")
        return log_text(self, *arguments)

    def answer(self, run_id):
        if len(calls) == 1:
            calls.append(run_id)
            raise ConnectionError("away")
        return get_run(self, run_id)

    monkeypatch.setattr(MlflowClient, "log_text", break_down)
    monkeypatch.setattr(MlflowClient, "get_run", answer)
    identity = start_with_files(uri, tmp_path)
    assert {one.path for one in client.list_artifacts(identity.run_id)} == set(FILES)


def test_the_page_of_a_run_is_known_once_it_is_made(uri, client, tmp_path):
    identity = run_attempt(uri, tmp_path, range(1, 2))
    experiment = client.get_experiment_by_name("tests")
    page = mlflow_page(uri, tmp_path)
    assert page.command == f"mlflow ui --backend-store-uri {uri}"
    assert f"/experiments/{experiment.experiment_id}/runs/{identity.run_id}/" in page.url


PAGE = "/#/experiments/7/runs/abc/model-metrics?workflowType=machine_learning"


@pytest.mark.parametrize(
    ("uri", "known", "command", "url"),
    [
        ("http://mlflow:5000/", True, None, f"http://mlflow:5000{PAGE}"),
        ("https://me:secret@m", True, None, f"https://***@m{PAGE}"),
        ("http://mlflow:5000", False, None, "http://mlflow:5000"),
        ("sqlite:////a b/m.db", False, "mlflow ui --backend-store-uri 'sqlite:////a b/m.db'", None),
        ("databricks", True, None, "databricks"),
    ],
)
def test_the_page_of_a_run_is_told_by_its_tracker(tmp_path, uri, known, command, url):
    if known:
        TrackingIdentity(uri=uri, experiment="e", key="k", run_id="abc", experiment_id="7").save(tmp_path)
    page = mlflow_page(uri, tmp_path)
    assert (page.command, page.url) == (command, url)
    assert page.is_run == (url is not None and "abc" in url)


def test_a_page_that_can_not_be_looked_up_now_is_no_error(tmp_path):
    (tmp_path / "tracking.json").mkdir()
    assert mlflow_page("http://mlflow:5000", tmp_path).url == "http://mlflow:5000"
    assert not is_tracked(tmp_path)


def test_what_ended_a_run_is_told_after_its_workers_and_goes_when_it_goes_on(uri, client, tmp_path):
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


def test_a_changed_parameter_becomes_a_tag_and_stops_nothing(uri, client, tmp_path):
    run_attempt(uri, tmp_path, [1], params={"a": 1, "b": 2})
    run_id = run_attempt(uri, tmp_path, [2], params={"a": 1, "b": 3, "c": 4}).run_id
    run = client.get_run(run_id)
    assert run.data.params == {"a": "1", "b": "2", "c": "4"}
    assert run.data.tags["changed.b"] == "3"
    assert curve(client, run_id) == expected([1, 2])


def test_more_parameters_than_a_batch_takes_and_long_values_are_kept(uri, client, tmp_path):
    params = {f"section.name_{n}": n for n in range(230)} | {"long": "x" * 10_000}
    run_id = run_attempt(uri, tmp_path, [1], params=params, tags={f"t{n}": n for n in range(130)}).run_id
    run = client.get_run(run_id)
    assert len(run.data.params) == 231
    assert run.data.params["long"] == "x" * 6000
    assert run.data.tags["t129"] == "129"


def test_a_committed_checkpoint_can_be_found_by_its_loss(uri, client, tmp_path):
    tracker = make_tracker(uri, tmp_path)
    tracker.start({}, {})
    for step in (5, 10):
        log_steps(tracker, range(step - 4, step + 1))
        tracker.log_checkpoint(committed(step, metrics={"loss": 5.0 - step / 10}, path=f"/runs/c/{step}"))
    tracker.finish("finished")
    run = mlflow_run(client, tmp_path)
    (found,) = client.search_logged_models(
        [run.info.experiment_id], filter_string=f"source_run_id='{run.info.run_id}' AND metrics.checkpoint_loss < 4.2"
    )
    assert (found.name, found.model_type) == ("step-00000010", "checkpoint")
    assert len(run.outputs.model_outputs) == 2
    assert found.tags["path"] == run.data.tags["checkpoint.path"] == "/runs/c/10"
    assert found.tags["digest"] == run.data.tags["checkpoint.digest"] == f"{10:016x}"
    assert curve(client, run.info.run_id) == expected(range(1, 11))


def test_what_a_killed_process_left_is_delivered_by_the_next_start(uri, client, tmp_path):
    code = f"""
        import os, sys
        sys.path.insert(0, {REPOSITORY!r})
        from pathlib import Path
        from tests.unit.tracking.test_mlflow_tracker import make_tracker
        tracker = make_tracker({uri!r}, Path({str(tmp_path)!r}))
        tracker.start({{"optimizer.lr": 0.1}}, {{}})
        for step in range(1, 51):
            tracker.log_step(step, {{"loss": 5.0 - step / 10, "tokens_per_s": 1000.0}})
        os.kill(os.getpid(), 9)
    """
    died = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], timeout=60, check=False)
    assert died.returncode == -9
    run_id = run_attempt(uri, tmp_path, range(41, 61), status="finished").run_id
    assert curve(client, run_id) == expected(range(1, 61))


def test_a_death_before_the_id_was_written_makes_no_second_run(uri, client, tmp_path):
    first = run_attempt(uri, tmp_path, [1])
    TrackingIdentity(uri=first.uri, experiment=first.experiment, key=first.key).save(tmp_path)
    assert run_attempt(uri, tmp_path, [2]).run_id == first.run_id


def test_an_mlflow_run_of_another_run_is_not_continued(uri, client, tmp_path, caplog):
    other = client.create_run(client.create_experiment(f"other of {tmp_path.name}")).info.run_id
    replace(run_attempt(uri, tmp_path, [1]), run_id=other).save(tmp_path)
    assert run_attempt(uri, tmp_path, [2]).run_id != other
    assert client.get_run(other).data.metrics == {}
    assert f"MLflow run {other} belongs to another run" in caplog.text


def test_the_run_that_follows_a_deleted_one_has_the_whole_run(uri, client, tmp_path):
    tracker = make_tracker(uri, tmp_path)
    tracker.start({"optimizer.lr": 0.1}, {"world_size": 4}, FILES)
    for step in (2, 3):
        tracker.log_checkpoint(committed(step))
    tracker.log_checkpoint(committed(6, attempt=2))
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


def test_the_points_of_an_experiment_that_was_deleted_wait_until_it_is_restored(uri, client, tmp_path, caplog):
    experiment = client.create_experiment("gone")
    client.delete_experiment(experiment)
    begin = time.monotonic()
    assert run_attempt(uri, tmp_path, [1], experiment="gone") is None
    assert time.monotonic() - begin < 30, "the end does not wait for somebody to act"
    assert "tracking.experiment='gone'" in caplog.text
    assert f"mlflow experiments restore --experiment-id {experiment}" in caplog.text
    assert "does not answer" not in caplog.text and "could not be reached" not in caplog.text
    client.restore_experiment(experiment)
    assert make_tracker(uri, tmp_path, experiment="gone").catch_up()
    assert curve(client, TrackingIdentity.load(tmp_path).run_id) == expected([1])


def test_a_metric_that_mlflow_refuses_costs_only_itself(uri, client, tmp_path, caplog):
    tracker = make_tracker(uri, tmp_path)
    tracker.start({}, {})
    tracker.log_step(1, {"loss": 4.9})
    tracker.log_checkpoint(committed(1))
    tracker.log_step(1, {"a bad name \n?": 1.0})
    tracker.log_step(2, {"loss": 4.8})
    tracker.finish("finished")
    # Its batch is sent again one by one: what had arrived is neither doubled nor refused.
    assert caplog.text.count("refuses an update") == 1
    assert curve(client, TrackingIdentity.load(tmp_path).run_id) == expected([1, 2])


def test_a_run_that_ended_while_the_server_was_away_is_caught_up_without_an_attempt(uri, client, tmp_path):
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        away = f"http://127.0.0.1:{reserved.getsockname()[1]}"
        tracker = make_tracker(away, tmp_path, drain_s=0.2)
        tracker.start({}, {"world_size": 4})
        log_steps(tracker, range(1, 4))
        tracker.log_checkpoint(committed(3))
        tracker.finish("finished")
        assert not make_tracker(away, tmp_path, drain_s=0.2).catch_up()
    assert not is_tracked(tmp_path)
    assert make_tracker(uri, tmp_path).catch_up()
    assert is_tracked(tmp_path)
    run = mlflow_run(client, tmp_path)
    assert (run.info.status, run.data.tags["world_size"]) == ("FINISHED", "4")
    assert curve(client, run.info.run_id) == expected(range(1, 4))
    models = client.search_logged_models([run.info.experiment_id], filter_string=f"source_run_id='{run.info.run_id}'")
    assert [model.name for model in models] == ["step-00000003"]
    # Whatever is asked of an address where nobody answers would be left over.
    assert make_tracker(away, tmp_path).catch_up()


def test_artifacts_stay_beside_the_database(uri, client, tmp_path):
    run_id = run_attempt(uri, tmp_path, [1]).run_id
    directory = os.path.dirname(uri.removeprefix("sqlite:///"))
    assert client.get_run(run_id).info.artifact_uri.startswith(f"file://{directory}/mlartifacts/")


@pytest.mark.parametrize(
    "text", ['{"uri": "sqlite:///a", "experiment": "e", "key": "k", "run_id": 5}', "[]", "{", "{}"]
)
def test_a_damaged_identity_is_none(tmp_path, text):
    (tmp_path / "tracking.json").write_text(text)
    assert TrackingIdentity.load(tmp_path) is None


def test_what_the_run_already_has_is_asked_of_mlflow_without_its_curves(uri, client, tmp_path, monkeypatch):
    run_id = run_attempt(uri, tmp_path, range(1, 6)).run_id
    for number, step in enumerate((9, 4)):
        client.log_metric(run_id, "loss", float(number), timestamp=2_000_000_000_000 + number, step=step)
    sink = make_sink(uri, tmp_path)
    sink.connect()
    monkeypatch.setattr(sink._client, "get_metric_history", lambda *_: pytest.fail("asked for a whole curve"))
    assert sink.existing_marks() == {"loss": 9, "tokens_per_s": 5}
