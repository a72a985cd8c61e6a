"""Outages of a real MLflow server: nothing waits for the server, and nothing is lost."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

from ray_ulysses.errors import RunError
from ray_ulysses.run.origin import find_tracked
from ray_ulysses.tracking.mlflow_tracker import MlflowSink, TrackingIdentity
from ray_ulysses.tracking.updates import GoneCheckpoint
from tests.distributed.harness import free_port
from tests.polling import wait_until
from tests.unit.tracking.checkpoints import STORE, committed
from tests.unit.tracking.tails import ScriptedTracker

pytestmark = pytest.mark.slow
_START_S = 120.0


class Server:
    """An MLflow server with a SQLite file, which can be stopped and restarted."""

    def __init__(self, folder, port):
        self.uri = f"http://127.0.0.1:{port}"
        self._folder, self._port = folder, port
        self._process = None

    def start(self):
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self._port)]
        command += ["--workers", "1", "--backend-store-uri", f"sqlite:///{self._folder}/mlflow.db"]
        command += ["--artifacts-destination", str(self._folder / "artifacts")]
        quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}
        environment = {**os.environ, **quiet, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        with open(self._folder / "server.log", "ab") as log:
            self._process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        log_text = (self._folder / "server.log").read_text

        def answers() -> bool:
            assert self._process.poll() is None, log_text()[-2000:]
            return self._answers()

        wait_until(answers, "the server answers", timeout_s=_START_S, every_s=0.2, said=log_text)

    def stop(self):
        if self._process is not None:
            os.killpg(self._process.pid, 15)
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, 9)
                self._process.wait(20)
            self._process = None

    def _answers(self):
        try:
            with urllib.request.urlopen(f"{self.uri}/health", timeout=2) as answer:
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            return False


@pytest.fixture
def server(tmp_path):
    folder = tmp_path / "server"
    folder.mkdir()
    server = Server(folder, free_port())
    yield server
    server.stop()


def make_tracker(server, run_dir, drain_s):
    sink = MlflowSink(uri=server.uri, experiment="away", run_name="demo", run_dir=run_dir, location=STORE)
    return ScriptedTracker(sink, run_dir, retry_s=(0.1, 0.5), drain_s=drain_s)


def track(server, run_dir, attempt, *news, drain_s):
    tracker = make_tracker(server, run_dir, drain_s)
    begin = time.monotonic()
    tracker.start({"lr": 0.1}, {"attempt": attempt})
    for one in news:
        tracker.log_step(getattr(one, "step", 0) or 1, {"loss": 1.0})
        tracker.log(one)
    # A request to an unreachable server takes up to 3 s, and importing MLflow holds the GIL.
    assert time.monotonic() - begin < 10
    return tracker


def test_updates_are_delivered_after_an_outage(server, tmp_path):
    run_dir = tmp_path / "demo"
    run_dir.mkdir()
    # The first attempt ends before the server has ever run.
    track(server, run_dir, 1, committed(10), committed(20), drain_s=0.5).finish("failed")
    with pytest.raises(RunError, match="does not respond"):
        find_tracked("demo", "latest", uri=server.uri)
    # The server starts in the middle of the second attempt.
    gone = GoneCheckpoint(step=10, attempt=1, state="deleted")
    tracker = track(server, run_dir, 2, committed(30, 2), gone, drain_s=60.0)
    server.start()
    tracker.finish("failed")
    found = find_tracked("demo", "latest", uri=server.uri)
    assert (found.step, found.attempt, found.store) == (30, 2, STORE)
    # It is down again at the end of the third attempt, which completes the run.
    server.stop()
    track(server, run_dir, 3, committed(40, 3), drain_s=0.5).finish("finished")
    assert not make_tracker(server, run_dir, drain_s=0.5).catch_up()
    server.start()
    assert make_tracker(server, run_dir, drain_s=60.0).catch_up()
    assert find_tracked("demo", "latest", uri=server.uri).step == 40

    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=server.uri)
    run = client.get_run(TrackingIdentity.load(run_dir).run_id)
    models = client.search_logged_models([run.info.experiment_id])
    # A deleted checkpoint has no status over HTTP either.
    states = [(model.name, model.tags["attempt"], model.tags["state"], str(model.status)) for model in models]
    assert sorted(states) == [
        ("demo-step-00000010", "1", "deleted", "UNSPECIFIED"),
        ("demo-step-00000020", "1", "committed", "READY"),
        ("demo-step-00000030", "2", "committed", "READY"),
        ("demo-step-00000040", "3", "committed", "READY"),
    ]
    assert (run.info.status, run.data.tags["state"]) == ("FINISHED", "finished")
    assert len(client.search_runs([run.info.experiment_id])) == 1
