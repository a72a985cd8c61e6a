"""Checkpoints are found through MLflow, or an error lists the available ones."""

from __future__ import annotations

import socket
import time

import pytest

from ray_ulysses.errors import RunError, UserError
from ray_ulysses.run.origin import choose_tracked, find_tracked
from ray_ulysses.tracking.mlflow_tracker import MlflowSink, TrackingIdentity
from ray_ulysses.tracking.updates import GoneCheckpoint
from tests.unit.tracking.checkpoints import STORE, committed, tracked
from tests.unit.tracking.tails import ScriptedTracker

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
