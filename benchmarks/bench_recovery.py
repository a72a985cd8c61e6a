"""Time from a fault to the first step after it, and steps lost: ours beside Ray Train's defaults with the same loop.

A cluster of three raylets on this machine trains a small model on 4 workers of two nodes. Then a node is killed without
notice (all its processes at once), or one training process is. The timeline comes from the run's journal.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if str(Path(__file__).resolve().parents[1]) not in sys.path:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.recovery_report import markdown
from benchmarks.stored_result import REPOSITORY, RESULTS, command, provenance, say, store

if TYPE_CHECKING:
    from ray_ulysses.cluster.local_cluster import LocalCluster
    from ray_ulysses.config import Config

TIMEOUT_S = 300.0
SIDES = ("ours", "before", "ray")
FAULTS = {"ours": ("node", "process"), "before": ("node", "process"), "ray": ("node", "process")}
"""The same faults on every side; a training process is a Ray worker where there are no supervisors."""


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


def recover(side: str, fault: str, tree: Path) -> dict[str, Any]:
    """Train, inflict a fault, and return the timeline in seconds after it."""
    from ray_ulysses.tracking.events import AttemptEnded, AttemptStarted, PhaseStarted, StartFailed, StepDone
    from tests.unit.tracking.journals import read_events

    with tempfile.TemporaryDirectory(prefix="bench-recovery-") as temporary, cluster_of_three() as (cluster, node):
        folder, address = Path(temporary), cluster.address
        config = config_of(folder, address)
        path = folder / "config.yaml"
        # An older tree knows fewer settings.
        path.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_unset=True)))
        arguments = ["-m", "ray_ulysses", "train", str(path)]
        if side == "ray":
            arguments = [str(Path(__file__).with_name("recovery_peer.py")), str(path)]
        with (folder / "log.txt").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, *arguments], stdout=log, stderr=log, start_new_session=True, cwd=tree,
                env={**os.environ, "PYTHONPATH": f"{tree}{os.pathsep}{REPOSITORY}", "RAY_ADDRESS": address},
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


def main() -> None:
    """Run the benchmark, show its page and store it."""
    parser = argparse.ArgumentParser(
        description="Time from a fault to the first step after it.",
        epilog="Example: git worktree add ../before 088f65c; python benchmarks/bench_recovery.py --before ../before",
    )
    parser.add_argument("--before", type=Path, help="a tree of this project from before workers had supervisors")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES), help="what is measured")
    parser.add_argument("--repeat", type=int, default=2, help="how often (default: 2)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for recovery.md and .json (default: results)")
    options = parser.parse_args()
    record = {
        **provenance(("ray", "torch", "deepspeed"), "three raylets on one machine"),
        "command": command("bench_recovery.py"),
        "load_before": os.getloadavg(),
        "runs": [],
    }
    trees = {"ours": REPOSITORY, "ray": REPOSITORY, "before": options.before and options.before.resolve()}
    for _ in range(options.repeat):
        for side in options.sides:
            for fault in FAULTS[side]:
                if trees[side] is not None:
                    record["runs"].append(recover(side, fault, trees[side]))
                    say(str(record["runs"][-1]))
    record |= {"load_average": os.getloadavg()}
    say(markdown(record))
    say("\n".join(f"written: {path.name}" for path in store("recovery", markdown(record), record, options.out)))


if __name__ == "__main__":
    main()
