"""``ray-ulysses train`` on an embedded Ray, as a user runs it: finish, resubmit, stop, kill, resume elsewhere."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
import ray

from ray_ulysses.config import Config
from ray_ulysses.run.ownership import claim_checkpoints
from ray_ulysses.run.settings import resolve_run
from ray_ulysses.tracking.events import CheckpointCommitted
from ray_ulysses.tracking.history import RunHistory, read_history
from tests.cluster.planted_secrets import files_with, plant
from tests.cluster.strangers import WRONG, answers, listening
from tests.distributed.harness import run_ranks
from tests.distributed.run_case import assert_same_run, make_config, make_corpus, prepare_attempt, run_worker
from tests.polling import wait_until
from tests.unit.tracking.journals import read_events

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
TIMEOUT_S = 240.0
CONTRACT = {
    "name", "status", "step", "tokens", "steps", "attempts", "checkpoints", "rows_consumed", "data_digest",
    "lost_steps", "goodput", "time_spent", "damaged_records",
}  # fmt: skip


class Command:
    """One ``ray-ulysses`` process in a session of its own, ended whatever happens."""

    def __init__(self, *arguments: object, log: Path, environment: Mapping[str, str] | None = None) -> None:
        self.log = log
        with log.open("w") as stream:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "ray_ulysses", *map(str, arguments)],
                stdout=stream, stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, "RAY_ADDRESS": "", **(environment or {})},
            )  # fmt: skip

    def wait(self) -> int:
        try:
            return self.process.wait(TIMEOUT_S)
        finally:
            self.kill()

    def kill(self) -> None:
        """SIGKILL the command; Ray ties the life of its own processes to it."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    @property
    def text(self) -> str:
        return self.log.read_text()


def train(config: Config, folder: Path, environment: Mapping[str, str] | None = None) -> tuple[int, str]:
    command = start(config, folder, environment)
    return command.wait(), command.text


def start(config: Config, folder: Path, environment: Mapping[str, str] | None = None) -> Command:
    folder.mkdir(exist_ok=True)
    path = folder / "config.yaml"
    path.write_text(config.to_yaml())
    return Command("train", path, log=folder / "log.txt", environment=environment)


def wait_for_step(config: Config, step: int) -> None:
    wait_until(lambda: read_history(config.run_dir).step >= step, f"step {step}", timeout_s=TIMEOUT_S, every_s=0.1)


def saved_for(config: Config) -> set[str]:
    return {event.reason for event in read_events(config.run_dir) if isinstance(event, CheckpointCommitted)}


def worker_processes(config: Config) -> list[psutil.Process]:
    found = psutil.Process().children(recursive=True)
    return [process for process in found if "RayTrainWorker" in " ".join(_cmdline(process))]


def training_processes(config: Config) -> list[psutil.Process]:
    launchers = [launcher for worker in worker_processes(config) for launcher in worker.children()]
    return [child for launcher in launchers for child in launcher.children()]


def _cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("data"))


def test_a_run_goes_on_over_a_lost_rank_a_stop_and_another_size(
    corpus: Path, tmp_path: Path, ray_folder: Path, mlflow_tables: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs").mkdir()
    shutil.copy(mlflow_tables, tmp_path / "runs/mlflow.db")
    secrets = plant()
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)

    def config_for(workers: int, sp_size: int, stop_step: int, name: str = "run", engine: str = "local") -> Config:
        return make_config(
            tmp_path / "runs", corpus, run__name=name, run__stop_step=stop_step, parallel__sp_size=sp_size,
            cluster__workers=workers, cluster__cpus_per_worker=0.25, data__engine=engine,
            tracking__enabled=name == "run", checkpoint__every_steps=4, data__rows_per_step=3,
        )  # fmt: skip

    # One rank is killed and the run recovers by itself, on the same workers; then a signal stops it.
    config = config_for(2, 2, 80, engine="ray")
    command = start(config, tmp_path / "first")
    try:
        wait_for_step(config, 6)
        before = {process.pid for process in worker_processes(config)}
        check_strangers(command, training_processes(config))
        training_processes(config)[0].kill()
        command.process.send_signal(signal.SIGUSR1)
        wait_for_step(config, 11)
        wait_until(lambda: {"steps", "request"} <= saved_for(config), "both checkpoints", timeout_s=TIMEOUT_S)
        assert {process.pid for process in worker_processes(config)} == before, "Ray has restarted nothing"
        command.process.send_signal(signal.SIGTERM)
        assert command.wait() == 0, command.text
    finally:
        command.kill()
    phases = re.findall(r"^elapsed=\S+ phase: (.*?)(?:, for \S+)?$", command.text, flags=re.MULTILINE)
    # Those that last longer than the half second between two looks.
    expected = [
        "loading libraries",
        "starting Ray",
        "waiting for 2 workers (0 started)",
        "loading libraries on 2 workers",
    ]
    assert [phase for phase in dict.fromkeys(phases) if phase in expected] == expected, command.text
    stopped = read_history(config.run_dir)
    assert stopped.status == "stopped"
    assert stopped.checkpoints[-1].step == stopped.step and stopped.checkpoints[-1].committed
    assert [attempt.world_size for attempt in stopped.attempts] == [2, 2]
    assert "stop" in saved_for(config)

    last = read_history(config.run_dir).step + 3

    # To the end, on one worker.
    code, text = train(config_for(1, 1, last), tmp_path / "third")
    assert code == 0, text
    assert f"step={last}/{last} loss=" in text
    assert "mlflow ui" in text and "mean of last" in text
    assert "raylet" not in text and "Dataset" not in text and "Progress bars" not in text

    ours = read_history(config.run_dir)
    unbroken = config_for(1, 1, last, name="unbroken")
    check_against_unbroken(ours, unbroken)
    check_inspect(config, tmp_path)
    check_mlflow(config, ours)
    # All of them were in the environment of the commands, and an embedded Ray inherits it.
    assert list(ray_folder.rglob("runtime_env_agent.log")), "Ray's logs are not where they are looked for"
    assert files_with(secrets, tmp_path, ray_folder) == {}


def check_strangers(command: Command, trains: list[psutil.Process]) -> None:
    """Ask Ray's ports for jobs, tasks and actors without the token; processes that need no Ray don't have it either."""
    processes = psutil.Process(command.process.pid)
    said = {
        (process, port, request): answer
        for port, process in listening(processes).items()
        for request, answer in answers(ray.util.get_node_ip_address(), port)
    }
    taken = {one: answer for one, answer in said.items() if answer == "OK" or answer.startswith("2")}
    assert taken == {}
    refused = {request for (*_, request), answer in said.items() if answer in ("UNAUTHENTICATED", "401", "403")}
    asked = ("a driver", "an actor", "a worker", "/get_or_create_runtime_env")
    assert refused >= {f"{request} {token}" for request in asked for token in (None, WRONG)}, said
    token = os.environ["RAY_AUTH_TOKEN"]
    assert not [one for one in processes.children(recursive=True) if token in " ".join(_cmdline(one))]
    assert trains and not [one for one in trains if "RAY_AUTH_TOKEN" in one.environ()]


def check_against_unbroken(ours: RunHistory, config: Config) -> None:
    """Hold rows, digest and losses to one process that nothing disturbed, without Ray."""
    prepare_attempt(config, "unbroken")
    run_ranks(run_worker, 1, config, "unbroken", timeout_s=TIMEOUT_S, environment=dict(os.environ))
    assert_same_run(ours, read_history(config.run_dir))


def check_inspect(config: Config, folder: Path) -> None:
    """``inspect --json`` prints the contract's object, its rows contiguous."""
    command = Command("inspect", config.run_dir, "--json", "--quiet", log=folder / "inspect.json")
    assert command.wait() == 0
    printed = json.loads(command.text)
    assert set(printed) == CONTRACT | {"plan", "failure", "missing_steps", "diagnostics"}, "the contract, and what grew"
    assert [segment["base_row"] for segment in printed["plan"]] == [0]
    rows = [step["rows"] for step in printed["steps"]]
    assert all(before[1] == after[0] for before, after in pairwise(rows))
    assert rows[0][0] == 0 and rows[-1][1] == printed["rows_consumed"]
    assert printed["status"] == "finished"


def check_mlflow(config: Config, ours: RunHistory) -> None:
    """MLflow shows one run, each step once."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(config.tracking_uri)
    experiment = client.get_experiment_by_name(config.tracking.experiment)
    runs = client.search_runs([experiment.experiment_id], filter_string="tags.mlflow.runName = 'run'")
    assert len(runs) == 1
    points = client.get_metric_history(runs[0].info.run_id, "loss")
    # Steps of a lost attempt beyond the end stay: they were trained, and trained again they would be the same.
    steps = sorted(point.step for point in points)
    assert steps == sorted(set(steps))
    assert steps[: ours.step] == [step.step for step in ours.steps]
    by_step = {point.step: point.value for point in points}
    assert all(abs(by_step[step.step] - step.loss) <= 1e-5 * step.loss for step in ours.steps)
    models = client.search_logged_models([experiment.experiment_id])
    assert {int(model.tags["step"]) for model in models if model.source_run_id == runs[0].info.run_id}
    stored = {file.path for file in client.list_artifacts(runs[0].info.run_id)}
    assert {"README.md", "config.yaml", "plan.txt", "report.html"} <= stored


@pytest.mark.slow
def test_a_second_directory_of_the_same_checkpoints_is_refused_before_a_worker_starts(
    corpus: Path, tmp_path: Path
) -> None:
    def config_in(storage: str) -> Config:
        return make_config(
            tmp_path / storage, corpus, run__stop_step=2, cluster__workers=2, cluster__cpus_per_worker=0.25,
            checkpoint__storage=str(tmp_path / "place"),
        )  # fmt: skip

    first, second = config_in("a"), config_in("b")
    prepare_attempt(first, "first")
    claim_checkpoints(resolve_run(first))
    run_ranks(run_worker, 2, first, "first", timeout_s=TIMEOUT_S)
    code, text = train(second, tmp_path / "second")
    assert code == 2, text
    assert f"belong to the run directory {first.run_dir} of host " in text and "Set another run.name" in text
    assert "starting Ray" not in text and not read_events(second.run_dir)
