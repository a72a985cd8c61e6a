"""From the kill of a training process on a GPU to the next step, with a model of 1B, by ``train`` on one machine."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

if str(Path(__file__).resolve().parents[2]) not in sys.path:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu.bench_step import LLAMA_1B

if TYPE_CHECKING:
    from ray_ulysses.config import Config

_FIRST_COPY_S = 60.0
_LAUNCHER, _IMAGE = "ray_ulysses.supervision.launcher", "ray_ulysses.supervision.image"


def config_of(folder: Path, is_tiny: bool) -> Config:
    """Return the run's configuration: no checkpoint on storage, so that the state comes from peer memory."""
    from tests.distributed.run_case import make_config, make_corpus

    sizes: dict[str, Any] = {"cluster__gpus_per_worker": 0 if is_tiny else 1}
    if not is_tiny:
        sizes |= {"model__config": LLAMA_1B, "model__dtype": "bf16", "data__context_tokens": 8192}
    return make_config(
        folder / "runs", make_corpus(folder), run__stop_step=100_000, data__epochs=4000, parallel__sp_size=1,
        cluster__workers=1, cluster__cpus_per_worker=1.0, data__rows_per_step=1, checkpoint__every_steps=100_000,
        **sizes,
    )  # fmt: skip


def training_process(command: int) -> tuple[psutil.Process, bool] | None:
    """Return the process that trains below a command, and whether a warm launcher has forked it.

    A launcher that must not fork trains by itself, and its successor imports everything again. A launcher is executed
    by its supervisor, or forked from the warm image. Forked processes keep the command line of their parent.
    """
    found = {one.pid: one for one in psutil.Process(command).children(recursive=True) if _LAUNCHER in one.cmdline()}

    def depth(process: psutil.Process) -> int:
        return 1 + depth(found[process.ppid()]) if process.ppid() in found else 0

    for launcher in found.values():
        if depth(launcher) == (1 if _IMAGE in launcher.cmdline() else 0):
            children = [one for one in found.values() if one.ppid() == launcher.pid]
            return (children[0], True) if children else (launcher, False)
    return None


def timeline(events: Sequence[Any], killed_at: float) -> dict[str, Any]:
    """Return seconds from a kill to the end of the next step, and the steps that were trained again (pure)."""
    from ray_ulysses.tracking.events import AttemptStarted, StepDone

    old = max((e.attempt for e in events if isinstance(e, AttemptStarted) and e.time < killed_at), default=0)
    started = next(e for e in events if isinstance(e, AttemptStarted) and e.attempt > old)
    first = next(e for e in events if isinstance(e, StepDone) and e.attempt > old)
    last = max(e.step for e in events if isinstance(e, StepDone) and e.attempt == old)
    return {
        "loaded_s": started.time - killed_at,
        "next_step_s": first.time - killed_at,
        "step_s": first.seconds,
        "resumed_step": started.resumed_step,
        "lost_steps": last - started.resumed_step,
    }


def recover(is_tiny: bool, limit_s: float) -> dict[str, Any]:
    """Train, kill the training process, and return what followed.

    Raises:
        TimeoutError: It took longer than the limit.
    """
    from ray_ulysses.cluster.rehearsal import TrainCommand
    from ray_ulysses.tracking.events import StepDone
    from tests.unit.tracking.journals import read_events

    os.environ["RAY_ADDRESS"] = ""
    began = time.monotonic()

    def wait(holds: Callable[[], bool], what: str) -> None:
        while not holds():
            if time.monotonic() - began > limit_s:
                raise TimeoutError(f"not within {limit_s:.0f} s: {what}")
            time.sleep(0.1)

    with tempfile.TemporaryDirectory(prefix="recovery-", ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary)
        config = config_of(folder, is_tiny)
        (folder / "config.yaml").write_text(config.to_yaml())
        command = TrainCommand(folder / "config.yaml", folder / "log.txt")

        def steps() -> list[StepDone]:
            if not command.is_running:
                raise RuntimeError(f"the command ended:\n{command.last_lines}")
            found = read_events(config.run_dir) if config.run_dir.is_dir() else []
            return [event for event in found if isinstance(event, StepDone)]

        command.start()
        try:
            # The first copy to peer memory reserves and fills the memory of the state: 15 GB with the large model.
            first_s = 0.0 if is_tiny else _FIRST_COPY_S
            wait(lambda: len(done := steps()) >= 20 and done[-1].time - done[0].time >= first_s, "it trains")
            found = training_process(command.pid)
            if found is None:
                raise RuntimeError("no process trains below a launcher")
            process, is_forked = found
            launcher = process.parent()
            attempt, killed_at = steps()[-1].attempt, time.time()
            process.kill()
            wait(lambda: steps()[-1].attempt > attempt, "it recovers")
            events, survived = read_events(config.run_dir), launcher is not None and launcher.is_running()
        finally:
            command.stop(20.0)
    return {"is_forked": is_forked, "launcher_survived": survived, **timeline(events, killed_at)}
