"""``ray job submit -- python jobs/train.py CONFIG`` against a head of its own, as on a cluster."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray.job_submission import JobStatus, JobSubmissionClient

from ray_ulysses.tracking.history import read_history
from tests.distributed.harness import free_port
from tests.distributed.run_case import make_config, make_corpus

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
TIMEOUT_S = 240.0
REPOSITORY = Path(__file__).parents[2]
END = (JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.STOPPED)


@pytest.fixture
def client() -> Iterator[JobSubmissionClient]:
    """A client of ``ray start --head`` on free ports; the head is ended by its own process id."""
    # Short: a Unix socket's path has at most 107 characters.
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    dashboard = free_port()
    ray = Path(sys.executable).with_name("ray")
    options = ["--num-cpus=4", f"--port={free_port()}", f"--dashboard-port={dashboard}", "--include-dashboard=true"]
    environment = {**os.environ, "RAY_TMPDIR": folder, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    with (Path(folder) / "head.log").open("w") as log:
        head = subprocess.Popen(
            [ray, "start", "--head", "--block", "--disable-usage-stats", f"--temp-dir={folder}/s", *options],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    try:
        yield _connect(f"http://127.0.0.1:{dashboard}", head)
    finally:
        head.terminate()
        try:
            head.wait(30)
        except subprocess.TimeoutExpired:
            head.kill()
            head.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _connect(address: str, head: subprocess.Popen[bytes]) -> JobSubmissionClient:
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        assert head.poll() is None, "the head ended"
        try:
            client = JobSubmissionClient(address)
            client.list_jobs()
        except Exception:
            assert time.monotonic() < deadline, "the head's dashboard does not answer"
            time.sleep(0.5)
        else:
            return client


def submit(client: JobSubmissionClient, config: Path, *options: str) -> tuple[JobStatus, str]:
    job = client.submit_job(
        entrypoint=" ".join([sys.executable, str(REPOSITORY / "jobs/train.py"), str(config), *options])
    )
    deadline = time.monotonic() + TIMEOUT_S
    while (status := client.get_job_status(job)) not in END:
        assert time.monotonic() < deadline, client.get_job_logs(job)
        time.sleep(0.5)
    return status, client.get_job_logs(job)


def test_a_submitted_job_trains_says_when_it_is_complete_and_goes_on(
    client: JobSubmissionClient, tmp_path: Path
) -> None:
    config = make_config(
        tmp_path / "runs", make_corpus(tmp_path), run__stop_step=3, cluster__workers=2, cluster__cpus_per_worker=0.25,
        data__engine="ray",
    )  # fmt: skip
    path = tmp_path / "config.yaml"
    path.write_text(config.to_yaml())

    status, logs = submit(client, path)
    assert status == JobStatus.SUCCEEDED, logs
    assert "step=3/3 loss=" in logs

    status, logs = submit(client, path)
    assert status == JobStatus.SUCCEEDED, logs
    assert "complete at step 3" in logs

    status, logs = submit(client, path, "--set", "run.stop_step=5")
    assert status == JobStatus.SUCCEEDED, logs
    assert "step=5/5 loss=" in logs and "resumed_step=3" in logs
    history = read_history(config.run_dir)
    assert [step.rows[0] for step in history.steps] == [6 * index for index in range(5)]
