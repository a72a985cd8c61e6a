"""Failures of a command's workers, of Ray and of its claim: on the screen, in the journal and in MLflow."""

from __future__ import annotations

import hashlib
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray.train.v2._internal.execution.callback import WorkerGroupCallback
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from ray_ulysses.checkpoint.choice import committed_steps
from ray_ulysses.checkpoint.fence import read_lineage
from ray_ulysses.config import Config
from ray_ulysses.storage import LocalStore
from ray_ulysses.tracking.events import AttemptEnded, AttemptStarted, BadStep, RowsSkipped, RunFailed
from ray_ulysses.tracking.history import read_history
from tests.cluster.commands import (
    TIMEOUT_S,
    start,
    started_below,
    train,
    training_processes,
    wait_for_step,
    worker_processes,
)
from tests.distributed.run_case import make_config, make_corpus
from tests.polling import wait_until
from tests.unit.tracking.journals import read_events

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(2400)]

RAYS_OWN = "ea57ec4498323973ffa0e70ad9c03641465b32b420381e791abd5fa8082d09e8"
"""Of the source of what `WatchedTrainer` overrides."""


def test_the_seams_of_ray_train_are_there() -> None:
    """A canary of Ray Train 2.60: where `cluster.failures` takes its place, and what it does in Ray's stead."""
    source = inspect.getsource(DataParallelTrainer._initialize_and_run_controller)
    assert hashlib.sha256(source.encode()).hexdigest() == RAYS_OWN, f"bring WatchedTrainer's own up to Ray's:\n{source}"
    assert hasattr(WorkerGroupCallback, "after_worker_group_poll_status")


def _events(config: Config, kind: type[Any]) -> list[Any]:
    return [event for event in read_events(config.run_dir) if isinstance(event, kind)]


def _kill(process: psutil.Process, config: Config, count: int) -> None:
    """Kill a process with SIGKILL, and wait until the journal says so."""
    process.kill()
    wait_until(lambda: len(_events(config, AttemptEnded)) >= count, "the failure is recorded", timeout_s=TIMEOUT_S)


@pytest.mark.slow
def test_killed_workers_are_named_as_the_cause_until_no_more_are_allowed(corpus: Path, tmp_path: Path) -> None:
    config = make_config(
        tmp_path / "runs", corpus, run__stop_step=400, data__epochs=3, parallel__sp_size=2,
        cluster__workers=2, cluster__cpus_per_worker=0.25, checkpoint__every_steps=5, tracking__enabled=True,
        elastic__max_failures=0, elastic__peer_memory=False,
    )  # fmt: skip
    command = start(config, tmp_path / "run")
    try:
        # The first failure follows a checkpoint, and costs nothing.
        wait_for_step(config, 7)
        workers = {process.pid for process in worker_processes(command)}
        _kill(training_processes(command)[0], config, 1)
        # No checkpoint is committed in between: the second failure counts, and is one too many.
        wait_until(lambda: len(_events(config, AttemptStarted)) >= 2, "the second attempt starts", timeout_s=TIMEOUT_S)
        assert {process.pid for process in worker_processes(command)} == workers, "Ray has restarted nothing"
        wait_until(lambda: len(training_processes(command)) == 2, "the second attempt trains", timeout_s=TIMEOUT_S)
        _kill(worker_processes(command)[0], config, 2)
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
    first, second = _events(config, AttemptEnded)
    assert first.restarts is True and second.restarts is False
    assert first.rank == int(told[1]) and first.node and first.lost_steps == int(told[3])
    # Its import takes seconds.
    from mlflow.tracking import MlflowClient

    client = MlflowClient(config.tracking_uri)
    experiment = client.get_experiment_by_name(config.tracking.experiment)
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FAILED"
    assert "the process is gone" in run.data.tags["failure.reason"]


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["start", "step"])
@pytest.mark.parametrize("victim", ["SupervisedController", "/raylet/raylet"])
def test_a_command_survives_the_death_of_its_controller_and_raylet(
    corpus: Path, tmp_path: Path, ray_folder: Path, victim: str, moment: str
) -> None:
    config = make_config(
        tmp_path / "runs", corpus, run__stop_step=30, parallel__sp_size=2, cluster__workers=2,
        cluster__cpus_per_worker=0.25, checkpoint__every_steps=5, elastic__max_failures=3,
    )  # fmt: skip
    command = start(config, tmp_path / "run")
    try:
        if moment == "step":
            wait_until(lambda: committed_steps(LocalStore(config.run_dir)), "a checkpoint", timeout_s=TIMEOUT_S)
        wait_until(lambda: started_below(command, victim), f"{victim} is there", timeout_s=TIMEOUT_S)
        started_below(command, victim)[0].kill()
        assert command.process.wait(2 * TIMEOUT_S) == 0, command.text
    finally:
        command.kill()
    text = command.text
    assert "Traceback" not in text and "StackTrace" not in text, text
    if victim == "SupervisedController":
        # More steps are saved until it is gone.
        steps = "0" if moment == "start" else "5|10|15|20|25"
        lost = (
            rf"Ray Train's controller was lost \(killed by signal 9\); restarting from step ({steps}); .*failure 1 of 3"
        )
        assert re.search(lost, text), text
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
def test_nothing_waits_for_ray_train_when_the_connection_ends(corpus: Path, tmp_path: Path) -> None:
    """A call to Ray that is under way while its connection is shut down crashes the process, at times."""
    config = make_config(
        tmp_path / "runs", corpus, run__stop_step=4, cluster__workers=2, parallel__sp_size=2,
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


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_a_run_that_is_not_finite_ends_after_the_steps_that_it_may_leave_out(tmp_path: Path, policy: str) -> None:
    # Finite after its first step, and in none after it.
    config = make_config(
        tmp_path / "runs", make_corpus(tmp_path, ("bisect.py", "cmd.py")), run__stop_step=6, parallel__sp_size=1,
        cluster__workers=2, cluster__cpus_per_worker=0.5, optimizer__lr=1e30, schedule__warmup_steps=0,
        checkpoint__every_steps=1, elastic__bad_steps=policy, elastic__max_skipped_steps=1,
    )  # fmt: skip
    code, said = train(config, tmp_path)
    assert code == 1, said
    bad, skipped = _events(config, BadStep), _events(config, RowsSkipped)
    ends = [event for event in _events(config, AttemptEnded) if event.restarts is not None]
    num_attempts = 1 if policy == "stop" else 2
    assert [event.step for event in bad] == [2] * num_attempts and len(skipped) == num_attempts - 1
    # Final, and not counted among the failures of which a run survives some.
    assert [(event.restarts, event.failure) for event in ends] == [(False, None)] * num_attempts
    (failed,) = _events(config, RunFailed)
    assert "BadStepError: step 2: " in failed.reason and "is not finite" in failed.reason
    assert ("of bad step 2: the run continues from step 1" in said) == (policy == "skip")


@pytest.mark.slow
def test_a_command_whose_run_was_taken_over_ends_with_its_workers_and_says_by_whom(
    corpus: Path, tmp_path: Path
) -> None:
    config = make_config(
        tmp_path / "runs", corpus, run__stop_step=3000, run__self_test=False, data__epochs=20, parallel__sp_size=1,
        cluster__workers=1, cluster__cpus_per_worker=0.25, checkpoint__every_steps=4,
    )  # fmt: skip
    command = start(config, tmp_path / "command")
    try:
        wait_for_step(config, 5)
        assert command.process.poll() is None, command.text
        workers = worker_processes(command)
        assert workers
        # As when another host has seen no sign of life of this one.
        (config.run_dir / "lock/holder-0000002.json").write_text('{"host": "other", "pid": 7, "since": 1700000000.0}')
        assert command.wait() == 1, command.text
    finally:
        command.kill()
    _, alive = psutil.wait_procs(workers, timeout=30)
    assert not alive
    text = " ".join(command.text.split())
    assert "taken over by process 7 on host other since 2023-11-14 22:13:20 UTC; this command ends immediately" in text
    assert "All committed checkpoints are kept" in text
    # Nobody tried again, and the other's note is untouched.
    assert read_lineage(LocalStore(config.run_dir)).newest_attempt == 1
    assert '"other"' in (config.run_dir / "lock/holder-0000002.json").read_text()
