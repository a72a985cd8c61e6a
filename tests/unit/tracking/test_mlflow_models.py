"""Checkpoints in a real MLflow database: one model each, idempotent updates, and their states."""

from __future__ import annotations

import json
import uuid
from unittest.mock import Mock

import pytest

from ray_ulysses.tracking.mlflow_models import DESCRIPTION, CheckpointModels, tracked_checkpoints
from ray_ulysses.tracking.updates import GoneCheckpoint
from tests.unit.tracking.checkpoints import STORE, committed


class Demo:
    """One MLflow run and its checkpoints."""

    def __init__(self, client):
        self.client = client
        found = client.get_experiment_by_name("models")
        self.experiment = found.experiment_id if found else client.create_experiment("models")
        self.run_id = client.create_run(self.experiment, run_name=f"demo-{uuid.uuid4().hex[:6]}").info.run_id
        tags = {"run_name": "demo", "run_dir": "/runs/demo", "store": STORE}
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
    assert (model.name, model.model_type, model.status) == ("step-00000020", "checkpoint", "READY")
    tags = dict(model.tags)
    described = tags.pop(DESCRIPTION)
    assert f"`{STORE}/checkpoints/step-00000020`" in described
    assert f"`model.resume_from: mlflow:{demo.run_id}/20`" in described
    common = {"step": "20", "attempt": "2", "plan_id": "0123abcd", **fields, "zero_stage": "3"}
    sizes = {"world_size": 4, "sp_size": 2, "ring_size": 1, "dp_size": 2}
    assert model.params == {**common, **{name: str(size) for name, size in sizes.items()}, "tokens": "99"}
    assert tags == {
        **common, "path": f"{STORE}/checkpoints/step-00000020", "store": STORE, "topology": json.dumps(sizes),
        "cursor": json.dumps({"plan_id": "0123abcd"}), "digest": f"{20:016x}", "run_name": "demo",
        "run_dir": "/runs/demo", "state": "committed",
    }  # fmt: skip
    assert [(metric.key, metric.value) for metric in model.metrics] == [("checkpoint_loss", 4.8)]
    (point,) = demo.client.get_metric_history(demo.run_id, "checkpoint_loss")
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
    assert (marked(demo, "latest"), marked(demo, "best")) == (["step-00000030"], ["step-00000020"])
    tags = demo.tags()
    assert (tags["checkpoint.best.step"], tags["checkpoint.best.eval_loss"]) == ("20", "3")
    demo.models.update(GoneCheckpoint(step=20, attempt=1, state="deleted"))
    demo.models.update(GoneCheckpoint(step=30, attempt=1, state="damaged"))
    assert (marked(demo, "latest"), marked(demo, "best")) == (["step-00000010"], ["step-00000010"])
    assert demo.tags()["checkpoint.best.step"] == "10"


def test_a_mark_is_set_before_it_is_removed_elsewhere(demo, monkeypatch):
    from mlflow import MlflowClient

    demo.models.update(committed(10))

    with monkeypatch.context() as broken:
        broken.setattr(MlflowClient, "delete_logged_model_tag", Mock(side_effect=ConnectionError("away")))
        with pytest.raises(ConnectionError):
            demo.models.update(committed(20))
    assert sorted(marked(demo, "latest")) == ["step-00000010", "step-00000020"]
    # The update is sent again, as after a lost response.
    demo.models.update(committed(20))
    assert marked(demo, "latest") == ["step-00000020"]


def test_repeated_updates_change_nothing(demo):
    gone = GoneCheckpoint(step=10, attempt=1, state="deleted", reason="keep_last")
    for _ in range(3):
        demo.models.commit(committed(10))
        demo.models.take_away(gone)
    assert demo.states() == [(10, 1, "deleted")]
    assert len(demo.client.get_metric_history(demo.run_id, "checkpoint_loss")) == 1
    assert len(demo.client.get_run(demo.run_id).outputs.model_outputs) == 1


def test_an_incomplete_model_is_completed_and_not_duplicated(demo):
    demo.client.create_logged_model(
        demo.experiment, name="step-00000010", source_run_id=demo.run_id, tags={"step": "10", "attempt": "1"}
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
