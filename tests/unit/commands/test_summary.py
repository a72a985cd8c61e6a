"""The summary at the end of a run: results, places, and the command that goes on."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from ray_ulysses.commands.train import render_summary
from ray_ulysses.run.early_stopping import EarlyStop
from ray_ulysses.tracking.mlflow_tracker import TrackingIdentity
from ray_ulysses.tracking.steps import Steps, step_rows
from tests.unit.commands.histories import make_history, make_step


def summary_of(history=None, *, overrides=(), planned_steps=12, gpus=0, unigram_nats=3.25, **changes):
    prepared = SimpleNamespace(
        config=SimpleNamespace(
            run_dir=changes.pop("run_dir", Path("/runs/demo")),
            tracking_uri=changes.pop("tracking_uri", "sqlite:////runs/mlflow.db"),
            trackers=(),
            cluster=SimpleNamespace(gpus_per_worker=gpus),
        ),
        run=SimpleNamespace(location=changes.pop("location", "/runs/demo")),
        plan=SimpleNamespace(num_steps=planned_steps),
        report=SimpleNamespace(
            corpus=SimpleNamespace(unigram_nats=unigram_nats), memory=SimpleNamespace(device_bytes=58 << 30)
        ),
    )
    command = ("configs/demo.yaml", overrides)
    return render_summary(history or make_history(), prepared, command=command, elapsed_s=300.0, **changes)


def test_the_summary_says_what_came_out_and_where_it_is():
    assert summary_of().splitlines() == [
        "run 'demo': finished",
        "  steps            12 of 12 planned",
        "  final loss       3.8000 nats",
        "  mean of last 10  4.2500 nats",
        "  byte entropy     3.2500 nats (the corpus's unigram entropy)",
        "  tokens           12.0k (12,000)",
        "  time             5m00s",
        "  goodput          81.25% of 32s: steps that count 26s, start-up 3s, lost steps 1s, saves 2s",
        "  checkpoint       /runs/demo/checkpoints/step-00000010",
        "  see the curves   mlflow ui --backend-store-uri sqlite:////runs/mlflow.db",
        "  continue         all planned rows are done; start a new run.name with more data or epochs",
    ]


@pytest.mark.parametrize(
    ("location", "shown"),
    [
        ("/elsewhere/demo", "/elsewhere/demo/checkpoints/step-00000010"),
        ("s3://bucket/runs/demo?region=eu", "s3://bucket/runs/demo/checkpoints/step-00000010?region=eu"),
    ],
)
def test_the_checkpoint_is_shown_where_it_lies(location, shown):
    assert f"  checkpoint       {shown}\n" in summary_of(location=location)


def test_a_loss_that_is_unknown_is_left_out_of_the_mean():
    losses = [3.0, float("nan"), 2.0, float("nan")]
    steps = Steps(step_rows([make_step(n, loss) for n, loss in enumerate(losses, start=1)]))
    text = summary_of(make_history(4, steps=steps))
    assert "  final loss      2.0000 nats\n  mean of last 2  2.5000 nats\n" in text


@pytest.mark.parametrize(
    ("status", "overrides", "command"),
    [
        ("interrupted", ("run.storage=/a b", "cluster.workers=2"), "--set 'run.storage=/a b' --set cluster.workers=2"),
        ("finished", (), "--set run.stop_step=40"),
        (
            "finished",
            ("run.stop_step=12", "cluster.workers=4", "cluster.workers=2"),
            "--set cluster.workers=2 --set run.stop_step=40",
        ),
    ],
)
def test_the_command_that_goes_on_gives_each_setting_once(status, overrides, command):
    text = summary_of(make_history(status=status), planned_steps=40, overrides=overrides)
    assert text.splitlines()[-1].endswith(f" ray-ulysses train configs/demo.yaml {command}")


def test_a_run_that_ended_early_says_why_and_how_to_go_on():
    early = EarlyStop(step=12, best_step=8, best_loss=2.0, patience=3, min_delta=0.0)
    lines = summary_of(early=early, planned_steps=40).splitlines()
    ended = "  ended early      the validation loss was 2.0000 at step 8 and not lower in the next 3 evaluations"
    assert ended in lines
    assert lines[-1] == "  continue         ray-ulysses train configs/demo.yaml --set run.early_stopping=null"


def test_a_run_without_steps_or_tracking_says_so():
    text = summary_of(make_history(0, status="failed", checkpoints=()), tracking_uri=None, unigram_nats=None)
    assert "loss" not in text and "mlflow" not in text and "none committed" in text


@pytest.mark.parametrize(
    ("uri", "line"),
    [
        ("sqlite:////runs/mlflow.db", "  then open        http://127.0.0.1:5000/#/experiments/3/runs/r/model-metrics"),
        ("http://mlflow", "  see the curves   http://mlflow/#/experiments/3/runs/r/model-metrics"),
    ],
)
def test_the_page_of_the_curves_is_named_once_there_is_one(tmp_path, uri, line):
    TrackingIdentity(uri=uri, experiment="e", key="k", run_id="r", experiment_id="3").save(tmp_path)
    assert f"{line}?workflowType=machine_learning\n" in summary_of(run_dir=tmp_path, tracking_uri=uri)


def test_curves_of_a_tracker_that_heard_nothing_are_not_promised():
    text = summary_of(is_heard=False)
    assert "see the curves" not in text and "has received nothing yet" in text
    assert "MLflow" not in summary_of(tracking_uri=None, is_heard=False)


@pytest.mark.parametrize(
    ("gpus", "said"), [(1, "peak 61.25 GiB allocated on the GPU"), (0, "peak 61.25 GiB resident in rank 0's process")]
)
def test_the_peak_of_memory_is_said_beside_the_planned_one(gpus, said):
    text = summary_of(peak_gib=61.25, gpus=gpus)
    assert said in text and "58.0 GiB planned" in text
    assert "memory" not in summary_of(gpus=gpus)
