"""Strangers on the network change nothing of a run on an embedded Ray, and cost it no attempt."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from ray_ulysses.config import Config
from ray_ulysses.tracking.history import RunHistory, read_history
from tests.cluster.test_train_job import start, train
from tests.distributed.run_case import make_config, make_corpus
from tests.polling import wait_until
from tests.stranger import disturbing, listening

SECONDS = int(os.environ.get("GARBAGE_S", "20"))
"""How long a run is disturbed."""
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1500 + 3 * SECONDS)]


@pytest.mark.slow
def test_garbage_on_every_port_changes_nothing_of_a_run(tmp_path: Path, ray_folder: Path) -> None:
    corpus = make_corpus(tmp_path)

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
