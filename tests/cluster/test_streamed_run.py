"""Runs whose rows come through Ray Data are the runs whose workers read them, bit for bit, kills included."""

from __future__ import annotations

import json
import random
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from ray_ulysses.config import Config
from ray_ulysses.tracking.events import AttemptStarted, StepDone, StreamStarted
from ray_ulysses.tracking.history import read_history
from tests.cluster.test_train_job import TIMEOUT_S, Command, _cmdline, start
from tests.distributed.run_case import MORE_FILES, make_config, make_corpus
from tests.polling import wait_until
from tests.unit.tracking.journals import read_events

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(3000)]
ENGINES = ("local", "ray")
ENDS = (75, 175, 250)
"""Last steps of the first stage, of the second before its branch, and of the run."""


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    folder = tmp_path_factory.mktemp("data")
    parts = (("first", ("ast.py", "argparse.py", "calendar.py")), ("more", MORE_FILES), ("last", ("csv.py", "dis.py")))
    first, more, last = (make_corpus(folder / name, files) for name, files in parts)
    return first, more, last


def config_of(folder: Path, corpora: tuple[Path, ...], workers: int, engine: str, *, branches: bool) -> Config:
    """A mixture in two stages, of which the second has longer rows; its branch, other weights and a third corpus."""
    before, after = (
        [{"path": str(path), "weight": weight} for path, weight in zip(corpora, weights, strict=False)]
        for weights in ((0.7, 0.3), (0.3, 0.5, 0.2))
    )
    stages = [
        {
            "name": "short",
            "steps": ENDS[0],
            "context_tokens": 128,
            "rows_per_step": 8,
            "sp_size": 1,
            "sources": before,
        },
        {"name": "long"},
    ]
    return make_config(
        folder / engine, corpora[0], stages, run__stop_step=ENDS[1 + branches],
        data__path=None, data__engine=engine, data__context_tokens=256, data__rows_per_step=6, data__epochs=6,
        data__sources=after if branches else before, parallel__sp_size=min(2, workers),
        cluster__workers=workers, cluster__cpus_per_worker=0.25, cluster__data_cpus=0.25,
        checkpoint__every_steps=50, schedule__horizon_steps=ENDS[-1],
    )  # fmt: skip


def trained(config: Config, folder: Path, *, branch: bool) -> None:
    folder.mkdir(parents=True)
    path = folder / "config.yaml"
    path.write_text(config.to_yaml())
    command = Command("train", path, *["--branch"] * branch, log=folder / "log.txt")
    try:
        assert command.process.wait(3 * TIMEOUT_S) == 0, command.text
    finally:
        command.kill()
    assert "Traceback" not in command.text, command.text


def inspected(config: Config, folder: Path) -> dict[str, Any]:
    command = Command("inspect", config.run_dir, "--json", "--quiet", log=folder / "inspect.json")
    assert command.wait() == 0, command.text
    found: dict[str, Any] = json.loads(command.text)
    return found


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_stages_of_a_mixture_and_a_branch_are_the_same_run(
    corpora: tuple[Path, Path, Path], tmp_path: Path, ray_folder: Path, workers: int
) -> None:
    found = {}
    for engine in ENGINES:
        for branch in (False, True):
            config = config_of(tmp_path, corpora, workers, engine, branches=branch)
            trained(config, tmp_path / f"{engine}-{branch}", branch=branch)
        found[engine] = inspected(config, tmp_path)
    local, streamed = (found[engine] for engine in ENGINES)
    attempts = [(one["stage"], one["first_step"], one["last_step"]) for one in streamed["attempts"]]
    assert attempts == [
        ("short", 1, ENDS[0]), ("long", ENDS[0] + 1, ENDS[1]), ("long", ENDS[1] + 1, ENDS[2])
    ]  # fmt: skip
    print(f"{workers} workers:", [(one["stream_step"], one["direct_rows"]) for one in streamed["attempts"]])
    assert all(one["stream_step"] is not None for one in streamed["attempts"]), "each attempt has streamed rows"
    assert sum(one["direct_rows"] for one in streamed["attempts"]) < streamed["rows_consumed"] / 2, "most of them"
    same = ("loss", "rows", "tokens", "step", "grad_norm", "learning_rate")
    for ours, theirs in zip(streamed["steps"], local["steps"], strict=True):
        assert [ours[name] for name in same] == [theirs[name] for name in same]
    for name in ("rows_consumed", "data_digest", "tokens", "plan", "lost_steps"):
        assert streamed[name] == local[name], name
    assert len(local["plan"]) == 3 and local["step"] == ENDS[-1]


KILLS = 30


class Killed:
    """A run on an engine, whose children are killed one after the other."""

    def __init__(self, folder: Path, corpus: Path, engine: str) -> None:
        self.config = make_config(
            folder / "runs", corpus, run__name=engine, run__stop_step=100_000, data__epochs=650, data__engine=engine,
            cluster__workers=2, parallel__sp_size=1, cluster__cpus_per_worker=0.25, cluster__data_cpus=0.25,
            elastic__max_failures=2 * KILLS, checkpoint__every_steps=1000,
        )  # fmt: skip
        self.command = start(self.config, folder / engine)
        self.gaps_s: list[float] = []

    def events(self, kind: type[Any]) -> list[Any]:
        return [one for one in read_events(self.config.run_dir) if isinstance(one, kind)]

    def trains(self) -> list[psutil.Process]:
        """Return its children that train."""
        root = psutil.Process(self.command.process.pid)
        launchers = [one for worker in self.workers() for one in worker.children()]
        assert root.is_running(), self.command.text
        return [child for launcher in launchers for child in launcher.children()]

    def workers(self) -> list[psutil.Process]:
        found = psutil.Process(self.command.process.pid).children(recursive=True)
        return [one for one in found if "RayTrainWorker" in " ".join(_cmdline(one))]

    def steps_after(self, attempt: int) -> list[StepDone]:
        return [one for one in self.events(StepDone) if one.attempt > attempt]

    def kill_one(self, chance: random.Random) -> None:
        """Kill a child at a random moment, and note how long it takes until the next step is done."""
        time.sleep(chance.uniform(0.0, 4.0))
        attempt = max(one.attempt for one in self.events(AttemptStarted))
        chance.choice(self.trains()).kill()
        killed_at = time.time()
        self.wait(lambda: self.steps_after(attempt), f"a step after attempt {attempt}")
        self.gaps_s.append(min(one.time for one in self.steps_after(attempt)) - killed_at)

    def wait(self, is_so: Any, what: str) -> None:
        def holds() -> bool:
            assert self.command.process.poll() is None, self.command.text
            return bool(is_so())

        wait_until(holds, what, timeout_s=TIMEOUT_S, every_s=0.1, said=lambda: self.command.text[-3000:])

    def held(self) -> tuple[int, int]:
        """Return descriptors and threads of its workers, which serve the streams."""
        workers = self.workers()
        return sum(one.num_fds() for one in workers), sum(one.num_threads() for one in workers)

    def wait_for_stream(self) -> None:
        """Wait until the newest attempt is past the start of its stream and has trained on for a while."""
        if self.config.data.engine == "ray":
            self.wait(
                lambda: (
                    self.events(StreamStarted)[-1:]
                    and self.events(StreamStarted)[-1].attempt
                    == max(one.attempt for one in self.events(AttemptStarted))
                ),
                "the stream",
            )


def test_children_killed_at_random_moments_recover_as_soon_as_with_the_direct_reader(
    tmp_path: Path, ray_folder: Path
) -> None:
    """The runs live beside one another and are struck in turn, so that both meet the same load."""
    corpus, chance = make_corpus(tmp_path), random.Random(43)
    runs = [Killed(tmp_path, corpus, engine) for engine in ENGINES]
    held = []
    try:
        for run in runs:
            run.wait(
                lambda run=run: run.config.run_dir.is_dir() and read_history(run.config.run_dir).step >= 8, "step 8"
            )
        for number in range(KILLS):
            for run in runs:
                run.kill_one(chance)
            if number in (2, KILLS - 1):
                # By then each part that lasts has started.
                for run in runs:
                    run.wait_for_stream()
                held.append([run.held() for run in runs])
        for run in runs:
            run.command.process.terminate()
            assert run.command.wait() == 0, run.command.text
    finally:
        for run in runs:
            run.command.kill()
    for run in runs:
        medians = statistics.median(run.gaps_s)
        streams = Counter(one.attempt for one in run.events(StreamStarted))
        print(
            f"{run.config.run.name}: median {medians:.2f} s, most {max(run.gaps_s):.2f} s, {len(streams)} streams came"
        )
        assert "Traceback" not in run.command.text, run.command.text
    print("descriptors and threads of the workers, local and ray, after 3 kills and at the end:", held)
    local, streamed = (statistics.median(run.gaps_s) for run in runs)
    assert streamed <= local + 0.3
    # A stream that is left by each child would hold several of each.
    for (fds, threads), (fds_after, threads_after) in zip(*held, strict=True):
        assert fds_after - fds < KILLS and threads_after - threads < KILLS
    for run in runs:
        history = read_history(run.config.run_dir)
        assert history.status == "stopped" and len(history.attempts) >= KILLS + 1
        assert [step.step for step in history.steps] == list(range(1, history.step + 1))
    first, other = (read_history(run.config.run_dir) for run in runs)
    for ours, theirs in zip(first.steps, other.steps, strict=False):
        assert (ours.rows, ours.digest, ours.tokens) == (theirs.rows, theirs.digest, theirs.tokens)
