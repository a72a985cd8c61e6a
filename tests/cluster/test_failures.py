"""Failures of workers as a person meets them: on the screen, in the journal, in ``inspect`` and in MLflow."""

from __future__ import annotations

import hashlib
import inspect
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from ray.train.v2._internal.execution.callback import WorkerGroupCallback
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from ray_ulysses.checkpoint.choice import committed_steps
from ray_ulysses.config import Config
from ray_ulysses.storage import LocalStore
from ray_ulysses.tracking.events import AttemptEnded, AttemptStarted
from ray_ulysses.tracking.history import read_history
from tests.cluster.test_train_job import (
    TIMEOUT_S,
    _cmdline,
    start,
    training_processes,
    wait_for_step,
    worker_processes,
)
from tests.distributed.run_case import make_config, make_corpus
from tests.polling import wait_until
from tests.unit.tracking.journals import read_events

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

RAYS_OWN = "ea57ec4498323973ffa0e70ad9c03641465b32b420381e791abd5fa8082d09e8"
"""Of the source of what `WatchedTrainer` overrides."""


def test_the_seams_of_ray_train_are_there() -> None:
    """A canary of Ray Train 2.60: where `cluster.failures` takes its place, and what it does in Ray's stead."""
    source = inspect.getsource(DataParallelTrainer._initialize_and_run_controller)
    assert hashlib.sha256(source.encode()).hexdigest() == RAYS_OWN, f"bring WatchedTrainer's own up to Ray's:\n{source}"
    assert hasattr(WorkerGroupCallback, "after_worker_group_poll_status")


def _failures(config: Config) -> list[AttemptEnded]:
    return [event for event in read_events(config.run_dir) if isinstance(event, AttemptEnded)]


def _starts(config: Config) -> int:
    return sum(isinstance(event, AttemptStarted) for event in read_events(config.run_dir))


def _kill(process: psutil.Process, config: Config, count: int) -> float:
    """Kill a process with SIGKILL; returns how long it took until the journal said so."""
    process.kill()
    killed_at = time.monotonic()
    wait_until(lambda: len(_failures(config)) >= count, "the journal tells the failure", timeout_s=TIMEOUT_S)
    return time.monotonic() - killed_at


@pytest.mark.slow
def test_killed_workers_are_told_as_the_cause_until_no_more_are_allowed(tmp_path: Path) -> None:
    config = make_config(
        tmp_path / "runs", make_corpus(tmp_path), run__stop_step=400, data__epochs=3, parallel__sp_size=2,
        cluster__workers=2, cluster__cpus_per_worker=0.25, checkpoint__every_steps=5, tracking__enabled=True,
        elastic__max_failures=0, elastic__peer_memory=False,
    )  # fmt: skip
    command = start(config, tmp_path / "run")
    try:
        # The first failure follows a checkpoint, and costs nothing.
        wait_for_step(config, 7)
        workers = {process.pid for process in worker_processes(config)}
        seconds = _kill(training_processes(config)[0], config, 1)
        # No checkpoint is committed in between: the second failure counts, and is one too many.
        wait_until(lambda: _starts(config) >= 2, "the second attempt starts", timeout_s=TIMEOUT_S)
        assert {process.pid for process in worker_processes(config)} == workers, "Ray has restarted nothing"
        wait_until(lambda: len(training_processes(config)) == 2, "the second attempt trains", timeout_s=TIMEOUT_S)
        _kill(worker_processes(config)[0], config, 2)
        assert command.wait() == 1, command.text
    finally:
        command.kill()
    text = command.text
    told = re.search(
        r"lost worker (\d) \(killed by signal 9\); restarting from step (\d+); (\d+) steps? lost; not counted", text
    )
    assert told, text
    assert "raylet" not in text and "gloo" not in text and "Traceback" not in text, text
    assert re.search(r"run 'run' failed: lost worker \d \(the process is gone\)", text), text
    assert len(text.splitlines()) < 120
    print(f"the journal had it {seconds:.1f} s after the kill")
    first, second = _failures(config)
    assert first.restarts is True and second.restarts is False
    assert first.rank == int(told[1]) and first.node and first.lost_steps == int(told[3])
    check_mlflow(config)


def check_mlflow(config: Config) -> None:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(config.tracking_uri)
    experiment = client.get_experiment_by_name(config.tracking.experiment)
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FAILED"
    assert "the process is gone" in run.data.tags["failure.reason"]


def _kill_controller() -> None:
    """Kill the controller of the command's own Ray Train with SIGKILL."""
    found = psutil.Process().children(recursive=True)
    (controller,) = [process for process in found if "SupervisedController" in " ".join(_cmdline(process))]
    os.kill(controller.pid, signal.SIGKILL)


@pytest.mark.slow
def test_the_death_of_ray_trains_controller_is_survived_by_the_command(tmp_path: Path) -> None:
    config = make_config(
        tmp_path / "runs", make_corpus(tmp_path), run__stop_step=30, parallel__sp_size=2, cluster__workers=2,
        cluster__cpus_per_worker=0.25, checkpoint__every_steps=5, elastic__max_failures=1,
    )  # fmt: skip
    command = start(config, tmp_path / "run")
    try:
        wait_until(lambda: committed_steps(LocalStore(config.run_dir)), "a checkpoint", timeout_s=TIMEOUT_S)
        _kill_controller()
        assert command.wait() == 0, command.text
    finally:
        command.kill()
    text = command.text
    # More steps are saved until it is gone.
    lost = r"Ray Train's controller was lost \(killed by signal 9\); restarting from step (5|10|15|20|25)\b"
    assert re.search(lost, text), text
    assert "failure 1 of 1" in text and "Traceback" not in text and "StackTrace" not in text, text
    history = read_history(config.run_dir)
    assert history.status == "finished" and history.step == 30 and history.missing_steps == ()


TRAIN_AND_TELL = """
import sys
import threading
import traceback

import ray

from ray_ulysses.cli import main

shut_down = ray.shutdown


def tell_and_shut_down():
    for thread in threading.enumerate():
        stack = traceback.extract_stack(sys._current_frames()[thread.ident])
        if thread is not threading.main_thread() and any("/ray/train/" in frame.filename for frame in stack):
            print(f"{thread.name} is in {stack[-1].filename}", flush=True)
    print("the connection ends", flush=True)
    shut_down()


ray.shutdown = tell_and_shut_down
main()
"""


@pytest.mark.slow
def test_nothing_waits_for_ray_train_any_more_when_the_connection_ends(tmp_path: Path) -> None:
    """A call to Ray that is under way while its connection is shut down crashes the process, at times."""
    config = make_config(
        tmp_path / "runs", make_corpus(tmp_path), run__stop_step=4, cluster__workers=2, parallel__sp_size=2,
        cluster__cpus_per_worker=0.25, elastic__worker_start_timeout_s=0.5,
    )  # fmt: skip
    path = tmp_path / "config.yaml"
    path.write_text(config.to_yaml())
    command = [sys.executable, "-c", TRAIN_AND_TELL, "train", str(path)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=TIMEOUT_S, env={**os.environ, "RAY_ADDRESS": ""}
    )
    said = done.stdout + done.stderr
    assert done.returncode == 1 and "of cluster.workers=2 workers started within 0.5 s" in said, said
    assert said.count("the connection ends") == 1 and " is in " not in said, said
