"""A driver of somebody else on the network runs nothing on the Ray of a command that trains here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from ray_ulysses.tracking.history import read_history
from tests.cluster.planted_secrets import files_with
from tests.cluster.strangers import WRONG, address_of, drive, heads_of, job_answers
from tests.distributed.run_case import make_config, make_corpus
from tests.polling import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1200)]
TIMEOUT_S = 400.0


@pytest.mark.parametrize("command", ["train", "rehearse"])
def test_a_strangers_job_task_and_actor_are_refused_while_a_run_trains(
    command: str, tmp_path: Path, ray_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, canaries, log, path = (tmp_path / name for name in ("home", "canaries", "log.txt", "config.yaml"))
    home.mkdir()
    canaries.mkdir()
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    config = make_config(
        tmp_path / "runs", make_corpus(tmp_path), run__stop_step=None, data__epochs=4000, cluster__workers=2,
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

    def runs(condition: Callable[[], object]) -> object:
        assert process.poll() is None, log.read_text()
        return condition()

    def step() -> int:
        (run,) = [one.parent.parent for one in (tmp_path / "runs").rglob("attempt-0001.jsonl")] or [config.run_dir]
        return read_history(run).step

    try:
        wait_until(lambda: runs(lambda: step() >= 3), "training", timeout_s=TIMEOUT_S, said=log.read_text)
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
        wait_until(lambda: runs(lambda: step() > reached), "training", timeout_s=TIMEOUT_S, said=log.read_text)
        if command == "train":
            process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()
    assert files_with({"token": token}, tmp_path, ray_folder) == {}
    assert not (home / ".ray").exists()
