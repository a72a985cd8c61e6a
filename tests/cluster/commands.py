"""Commands in processes of their own, what they started, and what must hold of a run that was disturbed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import psutil

from ray_ulysses.config import Config
from ray_ulysses.tracking.history import RunHistory, read_history
from tests.distributed.harness import run_ranks
from tests.distributed.run_case import assert_same_run, prepare_attempt, run_worker
from tests.polling import wait_until

TIMEOUT_S = 600.0
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


def started_below(command: Command | None, *names: str) -> list[psutil.Process]:
    """Return the processes below a command, or below this process, with one of these names in their command line."""
    root = psutil.Process(None if command is None else command.process.pid)
    return [one for one in root.children(recursive=True) if any(name in command_of(one) for name in names)]


def worker_processes(command: Command) -> list[psutil.Process]:
    return started_below(command, "RayTrainWorker")


def training_processes(command: Command) -> list[psutil.Process]:
    image = started_below(command, "ray_ulysses.supervision.image")[:1]
    launchers = [launcher for parent in (*worker_processes(command), *image) for launcher in parent.children()]
    return [child for launcher in launchers for child in launcher.children()]


def command_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


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
    grown = {"plan", "failure", "missing_steps", "diagnostics", "evaluation", "samples"}
    assert set(printed) == CONTRACT | grown, "the contract, and what grew"
    assert [segment["base_row"] for segment in printed["plan"]] == [0]
    rows = [step["rows"] for step in printed["steps"]]
    assert all(before[1] == after[0] for before, after in pairwise(rows))
    assert rows[0][0] == 0 and rows[-1][1] == printed["rows_consumed"]
    assert printed["status"] == "finished"
