"""All attempts share one MLflow run, whose curves have no repeated steps; evaluations are added to it."""

from __future__ import annotations

import errno
import os
import shutil
import time
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import mlflow
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ray_ulysses.errors import UserError
from ray_ulysses.tracking.journal_lines import encode_event, with_checksum
from ray_ulysses.tracking.mlflow_client import open_client
from ray_ulysses.tracking.mlflow_models import KEY_TAG, tracked_checkpoints
from ray_ulysses.tracking.mlflow_results import register_model, track_evaluation
from ray_ulysses.tracking.mlflow_tracker import MlflowSink, TrackingIdentity, is_tracked, mlflow_page
from ray_ulysses.tracking.updates import AttemptBegan, AttemptOver, StepMetrics, Translation
from tests.polling import wait_until
from tests.unit.tracking import journals
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


def test_a_resumed_run_is_running_and_a_stopped_run_is_killed(uri, client, tmp_path):
    def state():
        run = mlflow_run(client, tmp_path)
        return run.info.status, run.data.tags["state"]

    run_attempt(uri, tmp_path, range(1, 3), status="stopped")
    assert state() == ("KILLED", "stopped")
    tracker = make_tracker(uri, tmp_path)
    tracker.start({}, {})
    wait_until(lambda: state() == ("RUNNING", "running"), "the run is running again")
    tracker.finish("failed", 7)
    assert state() == ("FAILED", "failed at step 7")


def test_a_run_has_its_own_start_and_end_its_user_its_source_and_its_corpora(uri, client, tmp_path, monkeypatch):
    monkeypatch.setenv("LOGNAME", "ada")
    (tmp_path / "journal").mkdir()
    first = with_checksum(encode_event({**journals.started(), "time": 1.7e9, "attempt": 1}))
    (tmp_path / "journal/attempt-0001.jsonl").write_bytes(first + b"\n")
    tracker = make_tracker(uri, tmp_path, experiment="corpora")
    corpora = {"corpora": ("s3://bucket/code/corpus", "/data/corpus"), "validation": ("/data/books",)}
    tracker.log(AttemptBegan(time=1.7e9, **corpora, plan_id="0123abcd"))
    losses = {"eval/loss": 4.0, "eval/books/loss": 3.0, "eval/b/c.d-e_f/loss": 5.0}
    tracker.log(StepMetrics(time=1.7e9, step=0, metrics=losses))
    tracker.log(AttemptOver(time=1.7e9 + 60, status="finished"))
    assert tracker.catch_up()
    run = mlflow_run(client, tmp_path)
    assert (run.info.start_time, run.info.end_time) == (1_700_000_000_000, 1_700_000_060_000)
    tags = {"mlflow.user": "ada", "mlflow.source.name": "ray-ulysses train", "mlflow.source.type": "LOCAL"}
    assert tags.items() <= run.data.tags.items()
    inputs = run.inputs.dataset_inputs
    assert {(one.dataset.name, one.dataset.digest, one.dataset.source) for one in inputs} == {
        (path, "0123abcd", f'{{"uri": "{path}"}}') for paths in corpora.values() for path in paths
    }  # fmt: skip
    contexts = {one.dataset.name: tag.value for one in inputs for tag in one.tags}
    assert contexts["/data/books"] == "evaluation" and [*contexts.values()].count("training") == 2
    assert losses.items() <= run.data.metrics.items()
    kind = client.get_experiment(run.info.experiment_id).tags["mlflow.experimentKind"]
    assert kind == "custom_model_development"
    tracker.log(AttemptBegan(time=1.7e9, corpora=("/data/corpus",), plan_id="0123abcd"))
    assert make_tracker(uri, tmp_path, experiment="corpora").catch_up()
    assert len(mlflow_run(client, tmp_path).inputs.dataset_inputs) == 3


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


def test_what_the_model_wrote_is_an_artifact_of_its_step(uri, client, tmp_path):
    sample = {"prompt": "Once", "text": " upon\na time", "tokens": 4}
    event = journals.event({"event": "samples", "step": 8, "samples": [sample], "seconds": 0.5})
    (update,) = Translation(run_dir="", location="").updates(event)
    tracker = make_tracker(uri, tmp_path)
    tracker.start({}, {})
    tracker.log(update)
    tracker.finish("finished")
    run_id = TrackingIdentity.load(tmp_path).run_id
    path = client.download_artifacts(run_id, "samples/step-00000008.md", tmp_path)
    assert Path(path).read_text() == "> Once\n\n upon\na time\n"


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
    tracker.start()
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
EVALUATED = {"evaluation/step-00000004/evaluation.json": "{}\n", "evaluation/step-00000004/retrieval.svg": "<svg/>"}


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
    assert track_evaluation(way_there, 4, METRICS, EVALUATED) == ""
    run = client.get_run(run_id)
    assert run.data.metrics == METRICS
    assert [point.step for point in client.get_metric_history(run_id, "evaluation/loss")] == [4]
    assert run.info.status == "FINISHED"
    for name, text in EVALUATED.items():
        assert (run_dir.parent / "mlartifacts" / run_id / "artifacts" / name).read_text() == text


def test_a_database_elsewhere_is_changed_only_if_the_run_is_trusted(uri: str, client: Any, tmp_path: Path) -> None:
    run_id = _tracked(client, tmp_path, uri, tmp_path / "artifacts")
    said = track_evaluation(tmp_path, 4, METRICS, EVALUATED)
    assert "only the run's files specify the server" in said and "--trust-run" in said
    assert client.get_run(run_id).data.metrics == {}
    assert track_evaluation(tmp_path, 4, METRICS, EVALUATED, trust_run=True) == ""
    assert client.get_run(run_id).data.metrics == METRICS


def test_an_exported_model_is_registered_with_its_run_and_loads(uri: str, client: Any, run_dir: Path) -> None:
    run_id = _tracked(client, run_dir, uri)
    config = LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.save_pretrained(run_dir / "hf")
    words = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="a").save_pretrained(run_dir / "hf")
    name = f"registered {run_dir.name}"
    assert register_model(run_dir, 4, run_dir / "hf", name) == f"models:/{name}/1"
    assert register_model(run_dir, 8, run_dir / "hf", name) == f"models:/{name}/2"
    made = client.get_model_version(name, "2")
    assert (made.run_id, made.tags) == (run_id, {"step": "8"})
    loaded = mlflow.transformers.load_model(made.source, return_type="components")["model"]
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize("theirs", ["key", "artifacts", "dots"])
def test_an_mlflow_run_of_another_run_is_not_changed(
    uri: str, client: Any, run_dir: Path, tmp_path: Path, theirs: str
) -> None:
    artifacts = {"artifacts": tmp_path, "dots": run_dir.parent / "mlartifacts" / ".." / "elsewhere"}.get(theirs)
    run_id = _tracked(client, run_dir, uri, artifacts, key="another" if theirs == "key" else "k")
    assert "belongs to another run" in track_evaluation(run_dir, 4, METRICS, EVALUATED)
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
        assert track_evaluation(run_dir, 4, METRICS, EVALUATED) != ""
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
    assert "only the run's files specify the server" in track_evaluation(tmp_path / "run", 4, METRICS, EVALUATED)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_no_database_is_created_and_no_link_is_followed(uri: str, tmp_path: Path) -> None:
    run_dir, database = tmp_path / "run", tmp_path / "mlflow.db"
    run_dir.mkdir()
    for _ in range(2):
        _identify(run_dir, f"sqlite:///{database}")
        assert "only the run's files specify the server" in track_evaluation(run_dir, 4, METRICS, EVALUATED)
        assert not database.is_file() or database.is_symlink()
        database.unlink(missing_ok=True)
        database.symlink_to(uri.removeprefix("sqlite:///"))


def test_an_outage_is_reported_without_the_password(tmp_path: Path) -> None:
    assert track_evaluation(tmp_path, 4, METRICS, EVALUATED) == "", "the run is not tracked"
    _identify(tmp_path, "http://user:secret@127.0.0.1:9", experiment_id="0")
    said = track_evaluation(tmp_path, 4, METRICS, EVALUATED, trust_run=True)
    assert said and "secret" not in said
    said = track_evaluation(tmp_path, 4, METRICS, EVALUATED)
    assert "only the run's files specify" in said and "secret" not in said
