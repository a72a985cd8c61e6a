"""Starts ``ray start --head`` with a token on free ports, and ends it by its own process id."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from ray.job_submission import JobSubmissionClient

from tests.distributed.harness import free_port

TOKEN = secrets.token_hex(32)
_START_S = 240.0


def client_of(address: str) -> JobSubmissionClient:
    return JobSubmissionClient(address, headers={"Authorization": f"Bearer {TOKEN}"})


@contextmanager
def running_head() -> Iterator[str]:
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
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    try:
        _connect(f"http://127.0.0.1:{dashboard}", process)
        yield f"http://127.0.0.1:{dashboard}"
    finally:
        # Told to end, it waits half a minute for its parts; nothing of them is needed any more.
        parts = psutil.Process(process.pid).children(recursive=True)
        for one in (process, *parts):
            with contextlib.suppress(psutil.Error):
                one.kill()
        process.wait()
        psutil.wait_procs(parts, timeout=30)
        shutil.rmtree(folder, ignore_errors=True)


def _connect(address: str, head: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        assert head.poll() is None, "the head ended"
        try:
            # Its dashboard answers before there is an agent that could start a job.
            client_of(address).submit_job(entrypoint="true")
        except Exception:
            assert time.monotonic() < deadline, "the head takes no job"
            time.sleep(0.5)
        else:
            return
