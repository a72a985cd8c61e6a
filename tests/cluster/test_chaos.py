"""One run through many deaths: of the command, its whole group, a worker, the raylet and Ray Train's controller, while
it starts, trains, saves and resumes, at other layouts from command to command; nothing of it may show in the end.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest

from ray_ulysses.config import Config
from ray_ulysses.tracking.events import AttemptStarted, Event, StepDone
from ray_ulysses.tracking.history import read_history
from tests.cluster.commands import TIMEOUT_S, Command, check_against_unbroken, check_inspect, start
from tests.distributed.run_case import make_config, make_corpus
from tests.polling import wait_until
from tests.result_table import ResultTable
from tests.unit.tracking.journals import read_events

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(5400)]

SEED = 20261122
DEATHS = 14
VICTIMS = {
    "command": None,
    "group": None,
    "worker": "RayTrainWorker",
    "raylet": "/raylet ",
    "controller": "SupervisedController",
}
MOMENTS = ("start-up", "step", "save", "resume")
LAYOUTS = ((1, 1), (2, 1), (2, 2), (3, 1), (3, 3), (4, 2), (4, 4))
"""Workers and sp size; each gives six rows per step to whole groups."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Death:
    """A kill, and what the run had by then."""

    victim: str
    moment: str
    workers: int
    sp_size: int
    step: int
    attempt: int
    time: float
    ended: bool


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Chaos:
    """A run whose processes die."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.random = folder, random.Random(seed)
        self.corpus = make_corpus(folder)
        self.deaths: list[Death] = []
        self.layout = self.random.choice(LAYOUTS)
        self.commands: list[Command] = []
        self.left: list[psutil.Process] = []
        self.command = self.begin(400)

    def config(self, stop_step: int, **changes: object) -> Config:
        workers, sp_size = self.layout
        settings = {
            "run__stop_step": stop_step, "parallel__sp_size": sp_size, "cluster__workers": workers,
            "data__epochs": 3, "data__engine": "ray", "cluster__cpus_per_worker": 0.25, "checkpoint__every_steps": 4,
            "schedule__horizon_steps": 400, "elastic__max_failures": DEATHS,
            # By default the first command's own decides how rows are padded, and the unbroken run has another one.
            "parallel__allowed_sp": sorted({sp_size for _, sp_size in LAYOUTS}),
        }  # fmt: skip
        return make_config(self.folder / "runs", self.corpus, **settings | changes)

    def begin(self, stop_step: int) -> Command:
        """Start the command; its workers may be others than before."""
        self.command = start(self.config(stop_step), self.folder / f"command-{len(self.commands)}")
        self.commands.append(self.command)
        return self.command

    def events(self) -> tuple[Event, ...]:
        return tuple(read_events(self.folder / "runs/run"))

    def newest_attempt(self) -> int:
        return max((one.attempt for one in self.events() if isinstance(one, AttemptStarted)), default=0)

    def step(self) -> int:
        return read_history(self.folder / "runs/run").step

    def processes(self, mark: str | None) -> list[psutil.Process]:
        found = []
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self.command.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    if mark is None or mark in " ".join(process.cmdline()) + " ":
                        found.append(process)
        return found

    def wait_for(self, is_so: Callable[[], object], seconds: float = TIMEOUT_S) -> bool:
        """Wait until something is so; returns False where the command ended or time is up before."""
        deadline = time.monotonic() + seconds
        while not is_so():
            if self.command.process.poll() is not None or time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True

    def uncommitted(self) -> set[str]:
        steps = (self.folder / "runs/run/checkpoints").glob("step-*")
        return {step.name for step in steps if not (step / "manifest.json").exists()}

    def wait_for_moment(self, victim: str, moment: str) -> None:
        """Wait until the victim is there and the moment has come."""
        mark = VICTIMS[victim]
        if moment == "start-up":
            if mark is None:
                time.sleep(self.random.uniform(1, 20))
            else:
                assert self.wait_for(lambda: self.processes(mark)), f"no {victim} was started\n{self.command.text}"
            return
        before = self.newest_attempt() if self.deaths else 0
        attempt = max(before, self.deaths[-1].attempt + 1 if self.deaths else 1)
        assert self.wait_for(lambda: self.newest_attempt() >= attempt), f"no attempt {attempt}\n{self.command.text}"
        if moment == "resume":
            return
        goal = self.step() + self.random.randint(3, 9)
        assert self.wait_for(lambda: self.step() >= goal), f"step {goal} was not reached\n{self.command.text}"
        if moment == "save":
            # The dead leave uncommitted checkpoints behind.
            known = self.uncommitted()
            assert self.wait_for(lambda: self.uncommitted() - known), f"nothing was saved\n{self.command.text}"

    def kill(self, victim: str, moment: str) -> None:
        """Kill a process at a moment; where the command ends by it, start it anew with other workers."""
        self.wait_for_moment(victim, moment)
        mark, descendants = VICTIMS[victim], self.processes(None)
        trainers = self.processes("RayTrainWorker") + self.processes("SupervisedController")
        death = Death(
            victim=victim, moment=moment, workers=self.layout[0], sp_size=self.layout[1], step=self.step(),
            attempt=self.newest_attempt(), time=time.time(), ended=False,
        )  # fmt: skip
        if mark is None:
            victims = [psutil.Process(self.command.process.pid), *(descendants if victim == "group" else ())]
        else:
            victims = self.processes(mark)[:1]
        assert victims, f"there is no {victim} to kill\n{self.command.text}"
        for process in victims:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if mark is None:
            # Before psutil collects the exit code of this child: Popen would take it for 0 then.
            self.command.process.wait(timeout=30)
        # A parent may never collect a zombie.
        wait_until(lambda: not any(map(is_alive, victims)), f"the death of {victims}", timeout_s=30)
        self.wait_for(lambda: self.newest_attempt() > death.attempt)
        ended = self.command.process.poll() is not None
        self.deaths.append(replace(death, ended=ended))
        self.left += descendants
        if ended:
            assert self.command.process.returncode != 0, self.command.text
            # Agents of a raylet that was killed may live on for a while; what trains may not.
            trained = [one for one in descendants if one in trainers]
            wait_until(lambda: not any(map(is_alive, trained)), f"the end of {trained}", timeout_s=60)
            self.layout = self.random.choice(LAYOUTS)
            self.begin(400)

    def finish(self) -> None:
        """Let the run go on undisturbed for some steps more."""
        goal = self.step() + 6
        self.wait_for(lambda: self.step() >= goal)
        self.command.process.terminate()
        assert self.command.wait() == 0, self.command.text
        self.begin(self.step() + 5)
        assert self.command.wait() == 0, self.command.text

    def end(self) -> None:
        self.left += self.processes(None)
        self.command.kill()
        for process in self.left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def row_of(number: int, death: Death, events: tuple[Event, ...]) -> dict[str, str]:
    starts = [one for one in events if isinstance(one, AttemptStarted) and one.attempt > death.attempt]
    steps = [one for one in events if isinstance(one, StepDone) and one.attempt > death.attempt]
    resumed = min(starts, key=lambda one: one.attempt).resumed_step
    # Not the step of the kill: workers of a raylet that was killed, for one, train on for a while.
    trained = (one.step for one in events if isinstance(one, StepDone) and one.attempt == death.attempt)
    return {
        "death": str(number),
        "of": death.victim,
        "while": death.moment,
        "workers x sp": f"{death.workers} x {death.sp_size}",
        "step": str(death.step),
        "resumed from": str(resumed),
        "steps lost": str(max(trained, default=resumed) - resumed),
        "command": "started anew" if death.ended else "went on",
        "seconds to the next step": f"{min(one.time for one in steps) - death.time:.0f}",
    }


def test_a_run_survives_the_death_of_each_of_its_processes(tmp_path: Path, result_table: ResultTable) -> None:
    cases = [(victim, moment) for victim in VICTIMS for moment in MOMENTS]
    chaos = Chaos(tmp_path, SEED)
    chosen = chaos.random.sample(cases, DEATHS)
    assert {victim for victim, _ in chosen} == set(VICTIMS) and {moment for _, moment in chosen} == set(MOMENTS)
    try:
        for victim, moment in chosen:
            chaos.kill(victim, moment)
            print(chaos.deaths[-1], flush=True)
        chaos.finish()
    finally:
        chaos.end()
    for command in chaos.commands:
        assert "Traceback" not in command.text, command.text
    ours = read_history(tmp_path / "runs/run")
    assert ours.status == "finished" and ours.missing_steps == () and ours.damaged_records == ()
    events = chaos.events()
    for number, death in enumerate(chaos.deaths, start=1):
        result_table.add(row_of(number, death, events))
    chaos.layout = (1, 1)
    check_against_unbroken(ours, chaos.config(ours.step, run__name="unbroken", data__engine="local"))
    check_inspect(chaos.config(ours.step), tmp_path)
    result_table.write(
        "chaos", "One run through the deaths of its processes; rows, digest and losses are those of an unbroken one"
    )
