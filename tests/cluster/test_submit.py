"""``ray-ulysses submit``, ``status``, ``logs`` and ``stop``, and ``ray job submit``, against a head with a token."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from ray.job_submission import JobStatus, JobSubmissionClient

from ray_ulysses.cli import app, run
from ray_ulysses.tracking.history import read_history
from tests.cluster.strangers import WRONG, answers
from tests.distributed.harness import free_port
from tests.distributed.run_case import make_config
from tests.docs_commands import clone, commands
from tests.polling import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(900)]
TIMEOUT_S = 240.0
TOKEN = secrets.token_hex(32)
REPOSITORY = Path(__file__).parents[2]
END = (JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.STOPPED)


def client_of(address: str) -> JobSubmissionClient:
    return JobSubmissionClient(address, headers={"Authorization": f"Bearer {TOKEN}"})


@pytest.fixture(scope="module")
def head() -> Iterator[str]:
    """The address of the dashboard of ``ray start --head``, which requires `TOKEN`."""
    # Short: a Unix socket's path has at most 107 characters.
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    dashboard = free_port()
    ray = Path(sys.executable).with_name("ray")
    options = ["--num-cpus=4", f"--port={free_port()}", f"--dashboard-port={dashboard}", "--include-dashboard=true"]
    # Its agent takes jobs, and has a port of its own, which another Ray on this machine may hold.
    options += [f"--dashboard-agent-listen-port={free_port()}"]
    environment = {**os.environ, "RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0"}
    environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
    # Workers that nobody has asked for start a Python each.
    environment["RAY_prestart_worker_first_driver"] = "0"
    environment["PATH"] = f"{ray.parent}:{environment['PATH']}"  # the `python` of a job
    with (Path(folder) / "head.log").open("w") as log:
        process = subprocess.Popen(
            [ray, "start", "--head", "--block", "--disable-usage-stats", f"--temp-dir={folder}/s", *options],
            stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True,
        )  # fmt: skip
    try:
        address = f"http://127.0.0.1:{dashboard}"
        wait_until(lambda: _takes_a_job(address, process), "the head takes a job", timeout_s=TIMEOUT_S, every_s=0.5)
        yield address
    finally:
        # Told to end, it waits half a minute for its parts; nothing of them is needed any more.
        parts = psutil.Process(process.pid).children(recursive=True)
        for one in (process, *parts):
            with contextlib.suppress(psutil.Error):
                one.kill()
        process.wait()
        psutil.wait_procs(parts, timeout=30)
        shutil.rmtree(folder, ignore_errors=True)


def _takes_a_job(address: str, head: subprocess.Popen[bytes]) -> bool:
    """The dashboard answers before there is an agent that could start a job."""
    assert head.poll() is None, "the head ended"
    try:
        client_of(address).submit_job(entrypoint="true")
    except Exception:
        return False
    return True


@pytest.fixture(autouse=True)
def _address(head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", head)
    # The mode is that of the cluster, which the commands find out.
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)


def test_a_stranger_gets_no_job_started_by_the_dashboard(head: str) -> None:
    said = dict(answers("127.0.0.1", int(head.rpartition(":")[2])))
    assert (said["/api/jobs/ None"], said[f"/api/jobs/ {WRONG}"]) == ("401", "403")
    assert not [answer for answer in said.values() if answer == "OK" or answer.startswith("2")]


def test_a_job_is_followed_and_found_by_its_runs_name_and_a_refusal_is_the_users_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tmp_path / "runs", tmp_path / "no-corpus", run__name="first")
    elsewhere = tmp_path / "my laptop"
    elsewhere.mkdir()
    (elsewhere / "my config.yaml").write_text(config.to_yaml())
    monkeypatch.chdir(elsewhere)  # which no node reads

    assert run(app, ["submit", "my config.yaml"]) == 2
    out, err = capfd.readouterr()
    assert "no-corpus" in out
    assert err.splitlines()[0] == "connecting to the Ray cluster"
    assert "submitted run 'first' as job first-001\n" in err
    assert "error: job first-001 was refused for its configuration or options; see the job's log" in err

    assert run(app, ["status"]) == 0
    line = next(line for line in capfd.readouterr().out.splitlines() if line.split()[:1] == ["first"])
    assert line.split()[1] == "FAILED" and line.split()[-2:] == ["1", str(config.run_dir)]
    assert run(app, ["status", "first"]) == 0
    assert "no-corpus" in capfd.readouterr().out
    assert run(app, ["logs", "first"]) == 0
    assert capfd.readouterr().out.strip() == out.strip()
    assert run(app, ["stop", "first"]) == 2
    assert "the newest job first-001 has ended (FAILED)" in capfd.readouterr().err
    assert run(app, ["logs", "second"]) == 2
    assert "no run with this name was submitted to this cluster (submitted runs: first" in capfd.readouterr().err


def test_a_submitted_run_trains_by_the_overrides_of_the_command_and_by_its_source(
    corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = make_config(
        tmp_path / "runs", corpus, run__name="short", run__stop_step=9, cluster__workers=1,
        cluster__cpus_per_worker=0.25, parallel__sp_size=1,
    )  # fmt: skip
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    assert run(app, ["submit", str(tmp_path / "config.yaml"), "--set", "run.stop_step=2", "--upload-package"]) == 0
    out, err = capfd.readouterr()
    assert out.count("step=2/2 loss=") == 1 and "step=3" not in out
    assert "job short-001 succeeded" in err
    assert [step.step for step in read_history(config.run_dir).steps] == [1, 2]
    assert run(app, ["status", "short"]) == 0
    assert "step=2/2 loss=" in capfd.readouterr().out


def test_a_run_survives_its_followers_interrupt_its_drivers_kill_and_a_stop_and_goes_on_by_name(
    head: str, corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = make_config(
        tmp_path / "runs", corpus, run__name="long", run__stop_step=4000, data__epochs=25,
        cluster__workers=2, cluster__cpus_per_worker=0.25, checkpoint__every_steps=20,
    )  # fmt: skip
    path = tmp_path / "config.yaml"
    path.write_text(config.to_yaml())
    client = client_of(head)

    def trains(attempts: int, steps: int) -> bool:
        found = [one for one in read_history(config.run_dir).attempts if one.first_step is not None]
        return len(found) >= attempts and (found[-1].last_step or 0) >= (found[-1].first_step or 0) + steps

    def log() -> str:
        return str(client.get_job_logs(client.list_jobs()[0].submission_id or ""))

    follower = subprocess.Popen(
        [sys.executable, "-m", "ray_ulysses", "submit", str(path)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ), start_new_session=True,
    )  # fmt: skip
    try:
        wait_until(lambda: trains(1, 25), "training", timeout_s=TIMEOUT_S, said=log)
        os.kill(follower.pid, signal.SIGINT)
        out, err = follower.communicate(timeout=60)
    finally:
        follower.kill()
    assert follower.returncode == 130 and "step=5/" in out
    assert "job long-001 goes on; `ray-ulysses logs long --follow` follows it again" in err and "Traceback" not in err
    assert client.get_job_status("long-001") == JobStatus.RUNNING

    assert run(app, ["submit", str(path)]) == 2
    refusal = capfd.readouterr().err
    assert (
        "run.name='long': job long-001 of this run, in " in refusal
        and " is RUNNING; " in refusal
        and "`ray-ulysses stop long`" in refusal
    )

    command = ["python", "-m", "ray_ulysses", "train", "config.yaml"]
    (driver,) = [one for one in psutil.process_iter(["cmdline"]) if one.info["cmdline"] == command]
    driver.kill()
    assert run(app, ["logs", "long", "--follow"]) == 1
    assert "error: job long-001 was killed by signal 9; look at" in capfd.readouterr().err

    assert run(app, ["submit", str(path), "--no-follow"]) == 0
    assert "submitted run 'long' as job long-002, which resumes it" in capfd.readouterr().err
    wait_until(lambda: trains(2, 5), "training again", timeout_s=TIMEOUT_S, said=log)
    assert run(app, ["stop", "long"]) == 0
    out, err = capfd.readouterr()
    assert "saving after this step, then stopping" in out and "step=5/" not in out
    assert "asked job long-002 to save and stop" in err and "job long-002: STOPPED" in err
    history = read_history(config.run_dir)
    assert history.status == "stopped" and history.missing_steps == ()
    assert [one.step for one in history.checkpoints if one.committed][-1] == history.step


def test_a_job_with_relative_paths_is_refused_with_the_paths_to_write(head: str, tmp_path: Path) -> None:
    """Its working directory is unpacked elsewhere whenever a file of it changes: the run would begin anew."""
    client = client_of(head)
    shutil.copy(REPOSITORY / "configs" / "llama-tiny_cpu_sp2-dp2_8k.yaml", tmp_path / "demo.yaml")
    entry = f"{sys.executable} {REPOSITORY / 'jobs' / 'train.py'} demo.yaml"
    job = client.submit_job(entrypoint=entry, runtime_env={"working_dir": str(tmp_path)})
    wait_until(lambda: client.get_job_status(job) in END, "the job ends", timeout_s=TIMEOUT_S, every_s=0.5)
    logs = client.get_job_logs(job)
    assert client.get_job_info(job).driver_exit_code == 2, logs
    assert "run.storage='runs': is relative, but a Ray job has a new working directory at each submission" in logs
    assert "such as /mnt/shared/runs" in logs and "such as /mnt/shared/runs/corpus-stdlib" in logs


def test_readmes_submission_runs_in_a_fresh_clone(head: str, corpus: Path, tmp_path: Path) -> None:
    """The command as it stands there, but for the address; a small configuration lies in the place of the large one."""
    command = next(one.text for one in commands(REPOSITORY / "README.md") if one.text.startswith("ray job submit"))
    folder = clone(tmp_path / "clone")
    config = make_config(
        tmp_path / "runs", corpus, run__stop_step=2, run__self_test=False, cluster__workers=2,
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
