"""Strangers on the network run nothing on a command's Ray and change nothing of its run; secrets stand in no file."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from ray.cluster_utils import Cluster

from ray_ulysses.cluster.ray_access import private_session
from ray_ulysses.config import Config
from ray_ulysses.tracking.history import RunHistory, read_history
from tests.cluster.commands import start, train
from tests.cluster.planted_secrets import NAMES, files_with, plant
from tests.cluster.strangers import WRONG, address_of, drive, heads_of, job_answers
from tests.distributed.run_case import make_config
from tests.polling import wait_until
from tests.s3_server import serve_s3
from tests.stranger import disturbing, listening

SECONDS = int(os.environ.get("GARBAGE_S", "20"))
"""How long a run is disturbed."""
pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1500 + 3 * SECONDS)]
TIMEOUT_S = 400.0


@pytest.mark.parametrize("command", ["train", "rehearse"])
def test_a_strangers_job_task_and_actor_are_refused_while_a_run_trains(
    command: str, corpus: Path, tmp_path: Path, ray_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, canaries, log, path = (tmp_path / name for name in ("home", "canaries", "log.txt", "config.yaml"))
    home.mkdir()
    canaries.mkdir()
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    config = make_config(
        tmp_path / "runs", corpus, run__stop_step=None, data__epochs=4000, cluster__workers=2,
        cluster__cpus_per_worker=0.5, checkpoint__every_steps=4000,
    )  # fmt: skip
    path.write_text(config.to_yaml())
    options = [] if command == "train" else ["--faults", "150s kill-worker", "--compare", "0"]
    with log.open("w") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "ray_ulysses", command, str(path), *options],
            stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, "HOME": str(home), "RAY_ADDRESS": ""},
        )  # fmt: skip

    def step() -> int:
        assert process.poll() is None, log.read_text()
        (run,) = [one.parent.parent for one in (tmp_path / "runs").rglob("attempt-0001.jsonl")] or [config.run_dir]
        return read_history(run).step

    try:
        wait_until(lambda: step() >= 3, "training", timeout_s=TIMEOUT_S, said=log.read_text)
        (head,) = heads_of(psutil.Process(process.pid))
        token, address = head.environ()["RAY_AUTH_TOKEN"], address_of(head)
        jobs = job_answers(psutil.Process(process.pid), address.partition(":")[0])
        assert jobs >= {"401", "403"} and not [one for one in jobs if one.startswith("2")], jobs
        for wrong in (None, WRONG):
            refused = drive(address, canaries / "canary", wrong)
            assert refused.returncode != 0 and "AuthenticationError" in refused.stderr, refused.stderr
            assert list(canaries.glob("canary*")) == []
        allowed = drive(address, canaries / "canary", token)
        assert allowed.returncode == 0, allowed.stderr
        assert {one.name for one in canaries.glob("canary*")} == {"canary.task", "canary.actor"}
        commands = [" ".join(one.cmdline()) for one in psutil.process_iter(["cmdline"]) if one.info["cmdline"]]
        assert commands and not [one for one in commands if token in one]
        reached = step()
        wait_until(lambda: step() > reached, "training", timeout_s=TIMEOUT_S, said=log.read_text)
        if command == "train":
            process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()
    assert files_with({"token": token}, tmp_path, ray_folder) == {}
    assert not (home / ".ray").exists()


def test_garbage_on_every_port_changes_nothing_of_a_run(corpus: Path, tmp_path: Path, ray_folder: Path) -> None:
    def config_for(name: str, stop_step: int) -> Config:
        return make_config(
            tmp_path / "runs", corpus, run__name=name, run__stop_step=stop_step, data__epochs=25, parallel__sp_size=1,
            cluster__workers={"min": 1, "max": 2}, checkpoint__every_steps=100,
        )  # fmt: skip

    disturbed = _disturbed(config_for("disturbed", 4000), tmp_path / "first")
    config = config_for("undisturbed", disturbed.step)
    code, text = train(config, tmp_path / "second")
    assert code == 0, text
    undisturbed = read_history(config.run_dir)
    assert len(disturbed.attempts) == 1
    assert disturbed.steps and [step.loss for step in disturbed.steps] == [step.loss for step in undisturbed.steps]
    assert disturbed.data_digest == undisturbed.data_digest
    assert disturbed.rows_consumed == undisturbed.rows_consumed


def _disturbed(config: Config, folder: Path) -> RunHistory:
    """Train with garbage on all ports, Ray's and PyTorch's too, and stop the run in good order when the time is up."""
    command = start(config, folder)
    try:
        with disturbing(command.process.pid, 3600.0) as accepted:
            wait_until(
                lambda: read_history(config.run_dir).step, "a step", timeout_s=600.0, every_s=0.5,
                said=lambda: command.text,
            )  # fmt: skip
            found = listening(command.process.pid)
            hosts = {host for (host, _), process in found.items() if "supervision.launcher" in process}
            assert hosts == {"127.0.0.1"}, "PyTorch's ports are those of this machine alone"
            time.sleep(SECONDS)
            command.process.send_signal(signal.SIGTERM)
            assert command.wait() == 0, command.text
    finally:
        command.kill()
    assert all(any(kind in one for one in accepted) for kind in ("launcher", "raylet", "gcs_server")), accepted
    return read_history(config.run_dir)


def test_on_a_cluster_secrets_come_from_the_file_and_what_workers_lack_is_said(
    corpus: Path, tmp_path: Path, ray_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets, file = plant(), tmp_path / "apart" / "secrets.env"
    in_file = [name for name in NAMES if name.startswith("AWS_")]
    file.parent.mkdir()
    file.touch(mode=0o600)
    file.write_text("# keys of the storage\n" + "".join(f"{name}='{secrets[name]}'\n" for name in in_file))
    # Without keys, a worker would ask the machine for its role, and fail.
    places = {"AWS_REGION": "us-east-1", "AWS_METADATA_ENDPOINT": "http://127.0.0.1:9"}
    environment = places | {name: value for name, value in secrets.items() if name not in in_file}
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets["RAY_AUTH_TOKEN"])
    with private_session():
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "node_ip_address": "127.0.1.1"})
    with contextlib.ExitStack() as stack:
        stack.callback(cluster.shutdown)
        s3 = stack.enter_context(serve_s3())
        config = make_config(
            tmp_path / "runs", corpus, run__stop_step=2, parallel__sp_size=1, cluster__workers=1,
            cluster__cpus_per_worker=0.25, cluster__address=cluster.address, cluster__secrets_file=str(file),
            tracking__enabled=True, checkpoint__storage=s3.uri("secrets"),
        )  # fmt: skip
        file.chmod(0o640)
        code, text = train(config, tmp_path / "refused", environment)
        assert code == 2
        assert f"cluster.secrets_file='{file}'" in text and "mode 0640" in text
        file.chmod(0o600)
        code, text = train(config, tmp_path / "command", environment)
        assert code == 0, text
        assert read_history(config.run_dir).step == 2
        assert "HF_TOKEN, MLFLOW_TRACKING_PASSWORD, MLFLOW_TRACKING_USERNAME are set for this command" in text
    found = files_with(secrets, tmp_path, ray_folder)
    assert found == {str(file): set(in_file)}
