"""Checkpoints in a real MLflow database: one model each, idempotent updates, their states, and how they are found."""

from __future__ import annotations

import json
import socket
import time
import uuid
from unittest.mock import Mock

import pytest

from ray_ulysses.errors import RunError, UserError
from ray_ulysses.run.origin import choose_tracked, find_tracked
from ray_ulysses.tracking.mlflow_models import DESCRIPTION, CheckpointModels, tracked_checkpoints
from ray_ulysses.tracking.mlflow_tracker import MlflowSink, TrackingIdentity
from ray_ulysses.tracking.updates import GoneCheckpoint
from tests.unit.tracking.checkpoints import STORE, committed, tracked
from tests.unit.tracking.tails import ScriptedTracker


class Demo:
    """One MLflow run and its checkpoints."""

    def __init__(self, client):
        self.client = client
        found = client.get_experiment_by_name("models")
        self.experiment = found.experiment_id if found else client.create_experiment("models")
        self.run_id = client.create_run(self.experiment, run_name=f"demo-{uuid.uuid4().hex[:6]}").info.run_id
        tags = {"run_name": "demo.1", "run_dir": "/runs/demo", "store": STORE}
        self.models = CheckpointModels(client, experiment_id=self.experiment, run_id=self.run_id, run_tags=tags)

    def states(self):
        found = tracked_checkpoints(self.client, self.experiment, self.run_id)
        return sorted((one.step, one.attempt, one.state) for one in found)

    def logged(self):
        return self.client.search_logged_models([self.experiment], filter_string=f"source_run_id='{self.run_id}'")

    def tags(self):
        return self.client.get_run(self.run_id).data.tags


@pytest.fixture
def demo(client):
    return Demo(client)


def test_a_committed_checkpoint_has_all_tags_params_and_metrics(demo):
    fields = {"reason": "minutes", "parent": "checkpoints/step-00000010", "zero_stage": 3}
    checkpoint = committed(20, 2, cursor={"plan_id": "0123abcd"}, tokens=99, **fields)
    demo.models.commit(checkpoint)
    (model,) = demo.logged()
    assert (model.name, model.model_type, model.status) == ("demo-1-step-00000020", "checkpoint", "READY")
    tags = dict(model.tags)
    described = tags.pop(DESCRIPTION)
    assert f"`{STORE}/checkpoints/step-00000020`" in described
    assert f"`model.resume_from: mlflow:{demo.run_id}/20`" in described
    assert "`ray-ulysses export /runs/demo --step 20`" in described
    common = {"step": "20", "attempt": "2", "plan_id": "0123abcd", **fields, "zero_stage": "3"}
    sizes = {"world_size": 4, "sp_size": 2, "ring_size": 1, "dp_size": 2}
    assert model.params == {**common, **{name: str(size) for name, size in sizes.items()}, "tokens": "99"}
    assert tags == {
        **common, "path": f"{STORE}/checkpoints/step-00000020", "store": STORE, "topology": json.dumps(sizes),
        "cursor": json.dumps({"plan_id": "0123abcd"}), "digest": f"{20:016x}", "run_name": "demo.1",
        "run_dir": "/runs/demo", "state": "committed",
    }  # fmt: skip
    assert [(metric.key, metric.value) for metric in model.metrics] == [("checkpoint/loss", 4.8)]
    (point,) = demo.client.get_metric_history(demo.run_id, "checkpoint/loss")
    assert (point.step, point.timestamp) == (20, 1_700_000_020_000)
    assert demo.tags()["checkpoint.step"] == "20" and demo.tags()["checkpoint.attempt"] == "2"
    (back,) = tracked_checkpoints(demo.client, demo.experiment, demo.run_id)
    assert (back.step, back.attempt, back.store, back.metrics) == (20, 2, STORE, {"loss": 4.8})
    assert back.cursor == checkpoint.cursor


def marked(demo, mark):
    query = f"source_run_id='{demo.run_id}' AND tags.{mark} = 'true'"
    return [model.name for model in demo.client.search_logged_models([demo.experiment], filter_string=query)]


def test_one_usable_checkpoint_each_is_the_latest_and_the_best(demo):
    for step, loss in ((10, 4.0), (20, 3.0), (30, 3.5)):
        demo.models.update(committed(step, metrics={"eval_loss": loss}))
    assert (marked(demo, "latest"), marked(demo, "best")) == (["demo-1-step-00000030"], ["demo-1-step-00000020"])
    tags = demo.tags()
    assert (tags["checkpoint.best.step"], tags["checkpoint.best.eval_loss"]) == ("20", "3")
    demo.models.update(GoneCheckpoint(step=20, attempt=1, state="deleted"))
    demo.models.update(GoneCheckpoint(step=30, attempt=1, state="damaged"))
    assert (marked(demo, "latest"), marked(demo, "best")) == (["demo-1-step-00000010"], ["demo-1-step-00000010"])
    assert demo.tags()["checkpoint.best.step"] == "10"


def test_a_mark_is_set_before_it_is_removed_elsewhere(demo, monkeypatch):
    from mlflow import MlflowClient

    demo.models.update(committed(10))

    with monkeypatch.context() as broken:
        broken.setattr(MlflowClient, "delete_logged_model_tag", Mock(side_effect=ConnectionError("away")))
        with pytest.raises(ConnectionError):
            demo.models.update(committed(20))
    assert sorted(marked(demo, "latest")) == ["demo-1-step-00000010", "demo-1-step-00000020"]
    # The update is sent again, as after a lost response.
    demo.models.update(committed(20))
    assert marked(demo, "latest") == ["demo-1-step-00000020"]


def test_repeated_updates_change_nothing(demo):
    gone = GoneCheckpoint(step=10, attempt=1, state="deleted", reason="keep_last")
    for _ in range(3):
        demo.models.commit(committed(10))
        demo.models.take_away(gone)
    assert demo.states() == [(10, 1, "deleted")]
    assert len(demo.client.get_metric_history(demo.run_id, "checkpoint/loss")) == 1
    assert len(demo.client.get_run(demo.run_id).outputs.model_outputs) == 1


def test_an_incomplete_model_is_completed_and_not_duplicated(demo):
    demo.client.create_logged_model(
        demo.experiment, name="demo-1-step-00000010", source_run_id=demo.run_id, tags={"step": "10", "attempt": "1"}
    )
    assert not tracked_checkpoints(demo.client, demo.experiment, demo.run_id)[0].is_complete
    demo.models.commit(committed(10))
    (model,) = demo.logged()
    assert (model.status, [metric.value for metric in model.metrics]) == ("READY", [4.9])


def test_a_later_attempts_commit_supersedes_an_earlier_one(demo):
    for step, attempt in ((10, 1), (20, 1), (15, 2), (20, 2)):
        demo.models.commit(committed(step, attempt))
    assert demo.states() == [(10, 1, "committed"), (15, 2, "committed"), (20, 1, "superseded"), (20, 2, "committed")]
    # A late delivery from the first attempt does not affect the second attempt's checkpoint.
    demo.models.commit(committed(20, 1))
    demo.models.commit(committed(15, 1))
    assert (15, 1, "superseded") in demo.states() and (15, 2, "committed") in demo.states()
    assert (demo.tags()["checkpoint.attempt"], demo.tags()["checkpoint.step"]) == ("2", "20")


def test_damaged_and_deleted_checkpoints_are_distinguished(demo):
    for step in (10, 20):
        demo.models.commit(committed(step))
    demo.models.take_away(GoneCheckpoint(step=20, attempt=None, state="damaged", reason="a flipped byte"))
    demo.models.take_away(GoneCheckpoint(step=10, attempt=1, state="deleted"))
    demo.models.take_away(GoneCheckpoint(step=99, attempt=1, state="deleted"))
    demo.models.commit(committed(20, 2))
    assert demo.states() == [(10, 1, "deleted"), (20, 1, "damaged"), (20, 2, "committed")]
    by_state = {model.tags["state"]: model for model in demo.logged()}
    assert by_state["damaged"].tags["state_reason"] == "a flipped byte"
    statuses = {state: str(model.status) for state, model in by_state.items()}
    assert statuses == {"committed": "READY", "damaged": "FAILED", "deleted": "UNSPECIFIED"}
    assert by_state["damaged"].tags[DESCRIPTION].startswith("⚠ **Damaged, do not load**: a flipped byte\n\n")


def test_the_users_description_is_kept(demo):
    demo.models.commit(committed(10))
    (model,) = demo.logged()
    demo.client.set_logged_model_tags(model.model_id, {DESCRIPTION: "the one for the paper"})
    for state in ("damaged", "deleted"):
        demo.models.take_away(GoneCheckpoint(step=10, attempt=1, state=state))
    (model,) = demo.logged()
    assert model.tags[DESCRIPTION] == "⚠ **Deleted, do not load**\n\nthe one for the paper"


def test_models_logged_by_the_user_are_ignored(demo):
    demo.client.create_logged_model(demo.experiment, name="exported", source_run_id=demo.run_id)
    demo.models.update(GoneCheckpoint(step=10, attempt=1, state="deleted"))
    assert demo.states() == []


def test_all_pages_of_checkpoints_are_read(demo, monkeypatch):
    monkeypatch.setattr("ray_ulysses.tracking.mlflow_models._MODELS_PER_PAGE", 2)
    for step in range(1, 6):
        demo.models.commit(committed(step))
    assert [step for step, _, _ in demo.states()] == [1, 2, 3, 4, 5]


ASKED = "model.resume_from='mlflow:demo/x'"


def evaluated(*losses, **changes):
    return [tracked(10 * number, metrics={"eval_loss": loss}, **changes) for number, loss in losses]


STAGES = [*evaluated((1, 3.0), (2, 1.0), stage="short"), *evaluated((3, 2.0), (4, 2.5), stage="long")]
DATA = [*evaluated((1, 2.0), (2, 2.2), measured="one"), *evaluated((3, 3.0), measured="other")]
TRAINED = [tracked(step, metrics={"loss": loss}) for step, loss in ((10, 3.0), (20, 1.0), (30, 2.0))]


@pytest.mark.parametrize(
    ("have", "which", "chosen"),
    [
        # Attempt 2 resumed before step 30, which is no longer part of the run.
        ([tracked(10), tracked(30), tracked(20, 2), tracked(15, 2), tracked(40, 2, "damaged")], "latest", (20, 2)),
        ([tracked(20, 1, "superseded"), tracked(20, 2), tracked(10)], 20, (20, 2)),
        (STAGES, "best", (30, 1)),
        (DATA[:2], "best", (10, 1)),
        (DATA, "best", (30, 1)),
        (TRAINED, "best", (20, 1)),
        ([*TRAINED[:2], tracked(30, metrics={"loss": 2.0, "eval_loss": 5.0})], "best", (30, 1)),
        ([tracked(10, metrics={"loss": float("nan")}), tracked(20, metrics={"loss": 9.0})], "best", (20, 1)),
        ([tracked(10, metrics={"loss": 1.0}), tracked(20, metrics={"loss": 1.0})], "best", (20, 1)),
        *(
            ([tracked(10), tracked(20, 2, state, metrics={"loss": 0.1})], which, (10, 1))
            for state in ("deleted", "damaged", "superseded")
            for which in ("latest", "best")
        ),
    ],
)
def test_a_usable_checkpoint_is_chosen(have, which, chosen):
    one = choose_tracked(have, which, reference=ASKED)
    assert (one.step, one.attempt) == chosen


@pytest.mark.parametrize(
    ("have", "which", "said"),
    [
        ([], "latest", "no usable checkpoint"),
        ([tracked(10, 1, "deleted")], "latest", "all 1 of its checkpoints are deleted or damaged"),
        ([tracked(10, is_complete=False)], "best", "no usable checkpoint"),
        ([tracked(10), tracked(20)], 15, "no checkpoint of step 15; available steps: 10, 20"),
        ([tracked(10), tracked(20, 1, "damaged")], 20, "step 20 is damaged; available steps: 10"),
        ([tracked(10, metrics={}), tracked(20, metrics={})], "best", "specify a step: 10, 20"),
    ],
    ids=["none", "deleted", "incomplete", "absent", "damaged", "no-loss"],
)
def test_an_error_lists_the_available_checkpoints(have, which, said):
    with pytest.raises(UserError, match=f"^{ASKED}: .*{said}"):
        choose_tracked(have, which, reference=ASKED)


def track(uri, run_dir, name, *checkpoints):
    run_dir.mkdir()
    sink = MlflowSink(uri=uri, experiment="lookup", run_name=name, run_dir=run_dir, location=STORE)
    tracker = ScriptedTracker(sink, run_dir)
    tracker.start({}, {})
    for news in checkpoints:
        tracker.log(news)
    tracker.finish("finished")
    return TrackingIdentity.load(run_dir).run_id


def test_a_run_is_found_by_its_name_and_by_its_id(uri, tmp_path):
    commits = [committed(step, metrics={"loss": step / 10}) for step in (10, 20, 30)]
    gone = GoneCheckpoint(step=30, attempt=1, state="damaged", reason="x")
    run_id = track(uri, tmp_path / "a", "by-name", *commits, gone)
    for run in ("by-name", run_id):
        found = find_tracked(run, "latest", uri=uri)
        assert (found.step, found.store, found.attempt) == (20, STORE, 1)
        assert (found.path, found.cursor) == (f"{STORE}/checkpoints/step-00000020", {"next_row": 120})
        assert find_tracked(run, "best", uri=uri).step == 10
        assert find_tracked(run, 10, uri=uri).metrics == {"loss": 1.0}
        with pytest.raises(UserError, match="step 30 is damaged; available steps: 10, 20"):
            find_tracked(run, 30, uri=uri)


def test_an_ambiguous_name_is_refused_with_the_ids(uri, tmp_path):
    ids = [track(uri, tmp_path / name, "twice", committed(step)) for name, step in (("a", 10), ("b", 20))]
    with pytest.raises(UserError, match="2 MLflow runs have that name") as caught:
        find_tracked("twice", "latest", uri=uri)
    assert all(f"mlflow:{run_id}/latest" in str(caught.value) for run_id in ids)


def test_a_ray_ulysses_run_takes_precedence_over_foreign_runs(uri, client, tmp_path):
    track(uri, tmp_path / "a", "shared", committed(10))
    client.create_run(client.get_experiment_by_name("lookup").experiment_id, run_name="shared")
    assert find_tracked("shared", "latest", uri=uri).step == 10


@pytest.mark.parametrize("name", ["nobody", 'it\'s "both"', "f0" * 16])
def test_an_unknown_name_is_refused_with_the_newest_runs(uri, tmp_path, name):
    run_id = track(uri, tmp_path / "a", "somebody", committed(10))
    with pytest.raises(UserError, match=f"its newest runs are:(?s:.*)somebody  {run_id}"):
        find_tracked(name, "latest", uri=uri)


def test_a_deleted_run_is_not_found(uri, client, tmp_path):
    run_id = track(uri, tmp_path / "a", "thrown-away", committed(10))
    client.delete_run(run_id)
    for run in (run_id, "thrown-away"):
        with pytest.raises(UserError, match="has no run with that id or name"):
            find_tracked(run, "latest", uri=uri)


def test_an_unreachable_server_is_reported_without_its_password():
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        uri = f"http://me:secret@127.0.0.1:{reserved.getsockname()[1]}"
        begin = time.monotonic()
        with pytest.raises(RunError, match=r"^model\.resume_from='mlflow:demo/latest': .*tracking\.uri") as caught:
            find_tracked("demo", "latest", uri=uri)
        assert time.monotonic() - begin < 30
    assert "secret" not in str(caught.value)


def test_a_missing_database_is_refused_and_not_created(tmp_path):
    with pytest.raises(UserError, match=r"tracking\.uri"):
        find_tracked("demo", "latest", uri=f"sqlite:///{tmp_path}/mlflow.db")
    assert list(tmp_path.iterdir()) == []
