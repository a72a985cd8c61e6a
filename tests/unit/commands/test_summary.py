from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from ray_ulysses.commands.train import render_summary
from ray_ulysses.tracking.mlflow_tracker import TrackingIdentity
from ray_ulysses.tracking.run_time import StartTime, TimeSpent
from ray_ulysses.tracking.steps import Steps, step_rows
from tests.unit.commands.histories import make_history, make_step


def summary_of(history, **changes):
    given = {
        "run_dir": Path("/runs/demo"),
        "location": "/runs/demo",
        "planned_steps": 12,
        "tracking_uri": "sqlite:////runs/mlflow.db",
        "unigram_nats": 3.25,
        "overrides": (),
        "gpus": 0,
    }
    known = {**given, **changes}
    prepared = SimpleNamespace(
        config=SimpleNamespace(
            run_dir=known["run_dir"],
            tracking_uri=known["tracking_uri"],
            trackers=(),
            cluster=SimpleNamespace(gpus_per_worker=known["gpus"]),
        ),
        run=SimpleNamespace(location=known["location"]),
        plan=SimpleNamespace(num_steps=known["planned_steps"]),
        report=SimpleNamespace(
            corpus=SimpleNamespace(unigram_nats=known["unigram_nats"]), memory=SimpleNamespace(device_bytes=58 << 30)
        ),
    )
    options = {name: known[name] for name in ("is_heard", "peak_gib") if name in known}
    command = ("configs/demo.yaml", known["overrides"])
    return render_summary(history, prepared, command=command, elapsed_s=300.0, **options)


def test_the_summary_says_what_came_out_and_where_it_is():
    assert summary_of(make_history()).splitlines() == [
        "run 'demo': finished",
        "  steps            12 of 12 planned",
        "  final loss       3.8000 nats",
        "  mean of last 10  4.2500 nats",
        "  byte entropy     3.2500 nats (unigram, of the corpus)",
        "  tokens           12.0k (12,000)",
        "  time             5m00s",
        "  goodput          81.25% of 32s: steps that count 26s, start-up 3s, lost steps 1s, saves 2s",
        "  checkpoint       /runs/demo/checkpoints/step-00000010",
        "  see the curves   mlflow ui --backend-store-uri sqlite:////runs/mlflow.db",
        "  continue         every planned row is trained; start a new run.name with more data or epochs",
    ]


def test_what_recoveries_went_into_is_told_with_the_goodput():
    recovery = StartTime(cut_off_s=0.9, detect_s=0.4, form_s=8.1, load_s=2.0, build_s=1.6)
    spent = TimeSpent(steps_s=26.0, lost_steps_s=1.0, recovery_s=13.0, recovery=recovery)
    assert (
        "  goodput          65.00% of 40s: steps that count 26s, recovery 13s (cut-off steps 0.9s, detection 0.4s, "
        "workers 8.1s, loading 2.0s, building 1.6s), lost steps 1s\n"
    ) in summary_of(make_history(time_spent=spent))


@pytest.mark.parametrize(
    ("location", "shown"),
    [
        ("/elsewhere/demo", "/elsewhere/demo/checkpoints/step-00000010"),
        ("s3://bucket/runs/demo?region=eu", "s3://bucket/runs/demo/checkpoints/step-00000010?region=eu"),
    ],
)
def test_the_checkpoint_is_shown_where_it_lies(location, shown):
    assert f"  checkpoint       {shown}\n" in summary_of(make_history(), location=location)


def test_the_mean_is_over_the_last_ten_losses():
    mean = sum(5 - n / 10 for n in range(3, 13)) / 10
    assert f"  mean of last 10  {mean:.4f} nats\n" in summary_of(make_history(12))
    assert "  mean of last 3  " in summary_of(make_history(3))


def test_a_loss_that_is_unknown_is_left_out_of_the_mean():
    losses = [3.0, float("nan"), 2.0, float("nan")]
    steps = Steps(step_rows([make_step(n, loss) for n, loss in enumerate(losses, start=1)]))
    text = summary_of(make_history(4, steps=steps))
    assert "  final loss      2.0000 nats\n  mean of last 2  2.5000 nats\n" in text


def test_an_interrupted_run_is_resumed_by_the_same_command():
    summary = summary_of(
        make_history(status="interrupted"), planned_steps=40, overrides=("run.storage=/a b", "cluster.workers=2")
    )
    assert summary.splitlines()[-1].split("  ")[-1].strip() == (
        "ray-ulysses train configs/demo.yaml --set 'run.storage=/a b' --set cluster.workers=2"
    )


def test_a_run_that_reached_its_stop_step_is_told_how_to_go_on():
    last = summary_of(make_history(), planned_steps=40).splitlines()[-1]
    assert last.endswith("ray-ulysses train configs/demo.yaml --set run.stop_step=40")
    assert last.split()[0:2] == ["continue", "ray-ulysses"]


def test_the_command_that_goes_on_gives_each_setting_once():
    given = ("run.stop_step=12", "cluster.workers=4", "cluster.workers=2")
    last = summary_of(make_history(), planned_steps=40, overrides=given).splitlines()[-1]
    assert last.endswith("ray-ulysses train configs/demo.yaml --set cluster.workers=2 --set run.stop_step=40")


def test_a_run_without_steps_or_tracking_says_so():
    history = make_history(0, status="failed", checkpoints=())
    text = summary_of(history, tracking_uri=None, unigram_nats=None)
    assert "loss" not in text
    assert "mlflow" not in text
    assert "none committed" in text


def test_the_page_of_the_curves_is_named_once_there_is_one(tmp_path):
    identity = TrackingIdentity(uri="sqlite:////runs/mlflow.db", experiment="e", key="k", run_id="r", experiment_id="3")
    identity.save(tmp_path)
    lines = summary_of(make_history(), run_dir=tmp_path).splitlines()
    assert "  see the curves   mlflow ui --backend-store-uri sqlite:////runs/mlflow.db" in lines
    assert (
        "  then open        http://127.0.0.1:5000/#/experiments/3/runs/r/model-metrics?workflowType=machine_learning"
        in lines
    )
    identity = replace(identity, uri="http://mlflow")
    identity.save(tmp_path)
    text = summary_of(make_history(), run_dir=tmp_path, tracking_uri="http://mlflow")
    assert (
        "  see the curves   http://mlflow/#/experiments/3/runs/r/model-metrics?workflowType=machine_learning\n" in text
    )


def test_curves_of_a_tracker_that_heard_nothing_are_not_promised():
    text = summary_of(make_history(), is_heard=False)
    assert "see the curves" not in text
    assert "has received nothing yet; the same command sends it what the run's journal holds" in text
    assert "MLflow" not in summary_of(make_history(), tracking_uri=None, is_heard=False)


@pytest.mark.parametrize(
    ("has_gpu", "said"),
    [
        (True, "  memory           peak 61.25 GiB allocated on the GPU of rank 0; 58.0 GiB planned"),
        (
            False,
            "  memory           peak 61.25 GiB resident in rank 0's process, libraries included; 58.0 GiB planned "
            "without them",
        ),
    ],
)
def test_the_peak_of_memory_is_said_beside_the_planned_one(has_gpu, said):
    assert said in summary_of(make_history(), peak_gib=61.25, gpus=int(has_gpu)).splitlines()
    assert "memory" not in summary_of(make_history(), gpus=int(has_gpu))
