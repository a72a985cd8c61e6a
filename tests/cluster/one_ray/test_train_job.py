"""``ray-ulysses train`` as a user runs it: a lost rank, a stop, and a resume on another Ray at another size."""

from __future__ import annotations

import re
import signal
import tempfile
from pathlib import Path

import psutil
import pytest
import ray

from ray_ulysses.config import Config
from ray_ulysses.tracking.events import CheckpointCommitted
from ray_ulysses.tracking.history import read_history
from tests.cluster.commands import (
    TIMEOUT_S,
    Command,
    check_against_unbroken,
    check_inspect,
    command_of,
    start,
    train,
    training_processes,
    wait_for_step,
    worker_processes,
)
from tests.cluster.planted_secrets import files_with, plant
from tests.cluster.strangers import WRONG, answers, listening
from tests.distributed.run_case import make_config
from tests.polling import wait_until
from tests.unit.tracking.journals import read_events

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(2400)]


def saved_for(config: Config) -> set[str]:
    return {event.reason for event in read_events(config.run_dir) if isinstance(event, CheckpointCommitted)}


def steps_of(config: Config, attempt: int) -> int:
    return sum(step.attempt == attempt for step in read_history(config.run_dir).steps)


def test_a_run_goes_on_over_a_lost_rank_a_stop_and_another_size(cluster: None, corpus: Path, tmp_path: Path) -> None:
    def config_for(workers: int, sp_size: int, stop_step: int, name: str = "run", engine: str = "local") -> Config:
        return make_config(
            tmp_path / "runs", corpus, run__name=name, run__stop_step=stop_step, parallel__sp_size=sp_size,
            cluster__workers=workers, cluster__cpus_per_worker=0.25, data__engine=engine, checkpoint__every_steps=4,
            data__rows_per_step=3, elastic__cloud_notices="none",
        )  # fmt: skip

    config = config_for(2, 2, 80, engine="ray")
    check_embedded(config, tmp_path)
    stopped = read_history(config.run_dir)
    assert stopped.status == "stopped"
    assert stopped.checkpoints[-1].step == stopped.step and stopped.checkpoints[-1].committed
    assert [attempt.world_size for attempt in stopped.attempts] == [2, 2]
    assert "stop" in saved_for(config)

    # To the end on one worker, on the Ray of the other tests.
    last = stopped.step + 3
    address = ray.get_runtime_context().gcs_address
    code, text = train(config_for(1, 1, last), tmp_path / "second", {"RAY_ADDRESS": address})
    assert code == 0, text
    assert f"step={last}/{last} loss=" in text and "mean of last" in text
    assert "raylet" not in text and "Dataset" not in text and "Progress bars" not in text

    check_against_unbroken(read_history(config.run_dir), config_for(1, 1, last, name="unbroken"))
    check_inspect(config, tmp_path)


def check_embedded(config: Config, folder: Path) -> None:
    """Train on an embedded Ray: one rank is killed, the run recovers on the same workers, and a signal stops it."""
    secrets = plant()
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as ray_folder:
        environment = {**secrets, "RAY_TMPDIR": ray_folder, "RAY_prestart_worker_first_driver": "0"}
        command = start(config, folder / "first", environment)
        try:
            wait_for_step(config, 6)
            before = {process.pid for process in worker_processes(command)}
            check_strangers(command, training_processes(command), secrets["RAY_AUTH_TOKEN"])
            training_processes(command)[0].kill()
            command.process.send_signal(signal.SIGUSR1)
            # The command looks at the journal every half second, and a step takes a fifth of one on a fast machine.
            wait_until(lambda: steps_of(config, 2) >= 15, "steps of the second attempt", timeout_s=TIMEOUT_S)
            wait_until(lambda: {"steps", "request"} <= saved_for(config), "both checkpoints", timeout_s=TIMEOUT_S)
            assert {process.pid for process in worker_processes(command)} == before, "Ray has restarted nothing"
            command.process.send_signal(signal.SIGTERM)
            assert command.wait() == 0, command.text
        finally:
            command.kill()
        # All of them were in the environment of the command, and an embedded Ray inherits it.
        assert list(Path(ray_folder).rglob("runtime_env_agent.log")), "Ray's logs are not where they are looked for"
        assert files_with(secrets, folder, Path(ray_folder)) == {}
    phases = re.findall(r"^elapsed=\S+ phase: (.*?)(?:, for \S+)?$", command.text, flags=re.MULTILINE)
    # The command looks twice a second. On a fast machine, the workers load their libraries between two looks.
    expected = [
        "loading libraries", "starting Ray", "waiting for 2 workers (0 started)", "loading libraries on 2 workers",
    ]  # fmt: skip
    shown = [phase for phase in dict.fromkeys(phases) if phase in expected]
    assert shown in (expected, expected[:-1]), command.text


def check_strangers(command: Command, trains: list[psutil.Process], token: str) -> None:
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
    assert refused >= {f"{request} {given}" for request in asked for given in (None, WRONG)}, said
    assert not [one for one in processes.children(recursive=True) if token in command_of(one)]
    assert trains and not [one for one in trains if "RAY_AUTH_TOKEN" in one.environ()]
