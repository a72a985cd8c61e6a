"""Time from a fault to the first step after it, and steps lost: ours beside Ray Train's defaults with the same loop.

A cluster of three raylets on this machine trains a small model on 4 workers of two nodes. Then a node is killed without
notice (all its processes at once), or one training process is. The timeline comes from the run's journal.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import yaml

from benchmarks.runner import REPOSITORY, Benchmark, Record, columns, header, main, met, say, spread

if TYPE_CHECKING:
    from ray_ulysses.cluster.local_cluster import LocalCluster
    from ray_ulysses.config import Config

TIMEOUT_S = 300.0
SIDES = {"ours": "ours", "ray": "Ray Train's defaults"}
FAULTS = {"node": "a node is killed without notice", "process": "a training process is killed (SIGKILL)"}
PARTS = ("detected", "formed", "loaded", "first step")
GOAL_S, GOAL_RATIO, GOAL_STEPS = 5.0, 15.0, 1


def config_of(folder: Path, address: str) -> Config:
    """Return a run's configuration: a small model, a checkpoint on storage every 20 steps."""
    from tests.distributed.run_case import make_config, make_corpus

    return make_config(
        folder / "runs", make_corpus(folder), run__stop_step=20_000, data__epochs=4000, data__context_tokens=2048,
        cluster__workers={"min": 2, "max": 4}, cluster__cpus_per_worker=1.0, cluster__address=address,
        checkpoint__every_steps=20, elastic__grow_interval_s=3600.0,
    )  # fmt: skip


@contextmanager
def cluster_of_three() -> Iterator[tuple[LocalCluster, str]]:
    """Start a head without CPUs and two nodes of two; yield the cluster, and the node that may be killed."""
    from ray_ulysses.cluster.local_cluster import LocalCluster

    cluster = LocalCluster(cpus_per_node=2)
    try:
        cluster.add_node()
        yield cluster, cluster.add_node()
    finally:
        cluster.shutdown()


def recover(side: str, fault: str) -> dict[str, Any]:
    """Train, inflict a fault, and return the timeline in seconds after it."""
    from ray_ulysses.tracking.events import AttemptEnded, AttemptStarted, PhaseStarted, StartFailed, StepDone
    from tests.unit.tracking.journals import read_events

    with tempfile.TemporaryDirectory(prefix="bench-recovery-") as temporary, cluster_of_three() as (cluster, node):
        folder, address = Path(temporary), cluster.address
        config = config_of(folder, address)
        path = folder / "config.yaml"
        path.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_unset=True)))
        arguments = ["-m", "ray_ulysses", "train", str(path)]
        if side == "ray":
            arguments = ["-m", "benchmarks.runner", "benchmarks.bench_recovery:train_on_ray", json.dumps([str(path)])]
        with (folder / "log.txt").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, *arguments], stdout=log, stderr=log, start_new_session=True, cwd=REPOSITORY,
                env={**os.environ, "PYTHONPATH": str(REPOSITORY), "RAY_ADDRESS": address},
            )  # fmt: skip

        def newest() -> int:
            if process.poll() is not None:
                sys.exit(f"{side}: the command ended:\n{(folder / 'log.txt').read_text()[-3000:]}")
            steps = [event.step for event in events() if isinstance(event, StepDone)]
            return steps[-1] if steps else 0

        def events() -> list[Any]:
            return read_events(config.run_dir) if config.run_dir.is_dir() else []

        try:
            # Between two checkpoints, so that what is lost shows.
            wait(lambda: newest() % 20 >= 12 and newest() > 20, f"{side} trains")
            step = newest()
            killed_at = time.time()
            kill(fault, cluster, node)
            before = {event.attempt for event in events() if isinstance(event, AttemptStarted)}
            wait(lambda: any(isinstance(e, StepDone) and e.attempt not in before for e in events()), "it recovers")
            after = [event for event in events() if event.time >= killed_at or event.attempt not in before]
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        new = [event for event in after if event.attempt not in before]
        first = next(event for event in new if isinstance(event, StepDone))
        started = next(event for event in new if isinstance(event, AttemptStarted))
        ended = [event for event in after if isinstance(event, AttemptEnded | StartFailed)]
        last = max(event.step for event in events() if isinstance(event, StepDone) and event.attempt in before)
        times = {
            "detected": min((getattr(event, "detected_at", None) or event.time for event in ended), default=None),
            "formed": min((event.time for event in new if isinstance(event, PhaseStarted)), default=started.time),
            "loaded": started.time,
            "first step": first.time,
        }
        return {
            "side": side, "fault": fault, "step": step, "resumed_step": started.resumed_step, "last_step": last,
            "lost_steps": last - started.resumed_step, "workers": started.world_size, "step_s": first.seconds,
            "times": {name: None if at is None else at - killed_at for name, at in times.items()},
        }  # fmt: skip


def train_on_ray(path: str) -> None:
    """Train the run of a configuration under Ray Train: elastic scaling, its own failure policy and health checks."""
    import ray
    import ray.train
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from ray_ulysses.config.loading import load_config
    from tests.distributed.run_case import prepare_attempt

    config = load_config(Path(path))
    prepare_attempt(config, "peer")
    ray.init(address=config.cluster.address, log_to_driver=False)
    limits = config.cluster.workers
    TorchTrainer(
        _attempt,
        train_loop_config={"config": config.model_dump(mode="json")},
        scaling_config=ScalingConfig(num_workers=(limits.min, limits.max), resources_per_worker={"CPU": 1.0}),
        run_config=RunConfig(
            name="peer", storage_path=str(config.run_dir / "ray"), failure_config=FailureConfig(max_failures=5)
        ),
    ).fit()


def _attempt(job: dict[str, Any]) -> None:
    """Run one attempt in a Ray Train worker, whose process group Ray has set up."""
    import ray
    import ray.train
    import torch

    from ray_ulysses.config.loading import parse_config
    from ray_ulysses.data.read.row_source import DirectSource
    from ray_ulysses.trainer.loop import run_attempt
    from ray_ulysses.trainer.worker import Worker

    def make_source(plan: Any, reader: Any, layout: Any, rank: int) -> DirectSource:
        place = (layout.dp_rank(rank), layout.dp_size, layout.sp_rank(rank), layout.sp_size)
        return DirectSource(reader, plan, *place, ring_size=layout.ring_size)

    context = ray.train.get_context()
    worker = Worker(
        rank=context.get_world_rank(), local_rank=context.get_local_rank(), world_size=context.get_world_size(),
        node=ray.util.get_node_ip_address(), device=torch.device("cpu"), session="peer", make_source=make_source,
    )  # fmt: skip
    run_attempt(parse_config(job["config"]), worker)


def wait(holds: Callable[[], bool], what: str) -> None:
    """Wait until something holds.

    Raises:
        SystemExit: It did not in time.
    """
    deadline = time.monotonic() + TIMEOUT_S
    while not holds():
        if time.monotonic() > deadline:
            sys.exit(f"not within {TIMEOUT_S:g} s: {what}")
        time.sleep(0.1)


def kill(fault: str, cluster: LocalCluster, node: str) -> None:
    """Kill a node with all that runs on it, or one training process there."""
    if fault == "node":
        cluster.kill_node(node)
        return
    workers = [one for one in cluster.processes(node) if "RayTrainWorker" in " ".join(one.cmdline())]
    children = [child for launcher in workers[0].children() for child in launcher.children()]
    (children or workers)[0].kill()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Inflict each fault on each side in turn."""
    runs = []
    for _ in range(options.repeat):
        for side in options.sides:
            for fault in FAULTS:
                runs.append(recover(side, fault))
                say(str(runs[-1]))
    return {"runs": runs}


def page(record: Record) -> str:
    """Return the page."""
    text = (
        "Seconds from the kill. **detected**: the failure is recorded (by rank 0 with Ray Train, which records "
        "nothing itself). **formed**: the ranks of the next attempt have joined one another. **loaded**: their state "
        "is complete. **first step**: that step has ended. **lost** steps had ended and were trained again. Both "
        "sides run the same loop, model, rows and checkpoints (every 20 steps; the kill comes between two) on the "
        "same raylets of one machine; ours also keeps its state in peer memory. Ray Train has "
        "`ScalingConfig(num_workers=(2, 4))` and `FailureConfig`, everything else by default."
    )
    found = {
        (fault, side): [run for run in record["runs"] if (run["fault"], run["side"]) == (fault, side)]
        for fault in FAULTS
        for side in SIDES
    }

    def part(name: str) -> Callable[[Any], str]:
        def cell(runs: list[Record]) -> str:
            values = [run["times"][name] for run in runs if run["times"][name] is not None]
            return f"{spread(values, '{:.1f}')} s" if values else "not recorded"

        return lambda line: cell(line[1])

    lines = [(key, runs) for key, runs in found.items() if runs]
    runs = columns(
        lines,
        fault=lambda line: FAULTS[line[0][0]],
        side=lambda line: SIDES[line[0][1]],
        **{name.replace(" ", "_"): part(name) for name in PARTS},
        lost_steps=lambda line: spread([run["lost_steps"] for run in line[1]], "{:.0f}"),
        workers_after_it=lambda line: ", ".join(sorted({str(run["workers"]) for run in line[1]})),
    )
    ours, theirs = found["node", "ours"], found["node", "ray"]
    verdict = ""
    if ours and theirs:
        first = [median(run["times"]["first step"] for run in side) for side in (ours, theirs)]
        lost = max(run["lost_steps"] for run in ours)
        is_met = first[0] <= GOAL_S and first[1] >= GOAL_RATIO * first[0] and lost <= GOAL_STEPS
        verdict = (
            f"After a lost node Ray Train's defaults take {first[1] / first[0]:.1f} times as long. The goal (at most "
            f"{GOAL_S:g} s, {GOAL_RATIO:g} times faster, at most {GOAL_STEPS} step lost): {met(is_met)}."
        )
    return "\n\n".join([header("From a fault to the next step", record, text), runs, verdict])


BENCHMARK = Benchmark(
    name="recovery",
    about="Time from a fault to the first step after it.",
    measure=measure,
    page=page,
    packages=("ray", "torch", "deepspeed"),
    hardware="three raylets on one machine",
    options={"sides": (list(SIDES), "ours, ray"), "repeat": (2, "how often")},
    quick={"sides": ["ours"], "repeat": 1},
)

if __name__ == "__main__":
    main(BENCHMARK)
