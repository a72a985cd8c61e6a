"""``ray job submit -- python jobs/train.py CONFIG`` against a head of its own, as on a cluster."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ray.job_submission import JobStatus, JobSubmissionClient

from ray_ulysses.tracking.history import read_history
from tests.cluster.heads import TOKEN, client_of
from tests.distributed.run_case import make_config, make_corpus
from tests.docs_commands import clone, commands
from tests.polling import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
TIMEOUT_S = 240.0
REPOSITORY = Path(__file__).parents[2]
END = (JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.STOPPED)


@pytest.fixture
def client(head: str) -> JobSubmissionClient:
    return client_of(head)


def _wait_for_end(client: JobSubmissionClient, job: str) -> None:
    def logs() -> str:
        return str(client.get_job_logs(job))

    wait_until(lambda: client.get_job_status(job) in END, "the job ends", timeout_s=TIMEOUT_S, every_s=0.5, said=logs)


@pytest.mark.slow
def test_a_job_with_relative_paths_is_refused_with_the_paths_to_write(
    client: JobSubmissionClient, tmp_path: Path
) -> None:
    """Its working directory is unpacked elsewhere whenever a file of it changes: the run would begin anew."""
    shutil.copy(REPOSITORY / "configs" / "llama-tiny_cpu_sp2-dp2_8k.yaml", tmp_path / "demo.yaml")
    entry = f"{sys.executable} {REPOSITORY / 'jobs' / 'train.py'} demo.yaml"
    job = client.submit_job(entrypoint=entry, runtime_env={"working_dir": str(tmp_path)})
    _wait_for_end(client, job)
    logs = client.get_job_logs(job)
    assert client.get_job_info(job).driver_exit_code == 2, logs
    assert "run.storage='runs': is relative, but a Ray job has a new working directory at each submission" in logs
    assert "such as /mnt/shared/runs" in logs and "such as /mnt/shared/runs/corpus-stdlib" in logs


@pytest.mark.slow
def test_readmes_submission_runs_in_a_fresh_clone(head: str, tmp_path: Path) -> None:
    """The command as it stands there, but for the address; a small configuration lies in the place of the large one."""
    command = next(one.text for one in commands(REPOSITORY / "README.md") if one.text.startswith("ray job submit"))
    folder = clone(tmp_path / "clone")
    config = make_config(
        tmp_path / "runs", make_corpus(tmp_path), run__stop_step=2, run__self_test=False, cluster__workers=2,
        cluster__cpus_per_worker=0.25, data__engine="ray",
    )  # fmt: skip
    (folder / command.split()[-1]).write_text(config.to_yaml())
    done = subprocess.run(
        ["bash", "-c", command.replace("http://HEAD:8265", head)],
        cwd=folder, capture_output=True, text=True, timeout=600, check=False,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "RAY_AUTH_MODE": "token",
             "RAY_AUTH_TOKEN": TOKEN},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step=2/2 loss=" in done.stdout
    assert [step.step for step in read_history(config.run_dir).steps] == [1, 2]
