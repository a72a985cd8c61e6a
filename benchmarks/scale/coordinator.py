"""The coordinator, the failure policy and the journal with 8 to 1,024 simulated supervisors on real sockets."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.runner import MIB, REPOSITORY, Benchmark, Record, fresh, header, main, measured, met, table
from benchmarks.scale.controller_side import (
    HANG_S,
    JournalOfRank0,
    Nodes,
    controller_side,
    host_of_node,
    node_id,
    poll,
    train,
)
from benchmarks.scale.limits import allow_open_files
from benchmarks.scale.slope import slope
from benchmarks.scale.stubs import STEP_S
from ray_ulysses.cluster.controller import WorkerGroupWatch
from ray_ulysses.cluster.scaling import Seat
from ray_ulysses.elastic import reform
from ray_ulysses.run.requests import clear_stop
from ray_ulysses.run_names import JOURNAL_FOLDER
from ray_ulysses.supervision import coordinator as product
from ray_ulysses.supervision.coordinator import Coordinator
from ray_ulysses.supervision.supervisor import changes

SIZES = [8, 64, 256, 1024]
GOAL_SHARE, GOAL_REFORM_S, GOAL_SLOPE = 0.1, 2.0, 1.1
EVENTS = {
    "join": "all join",
    "loss": "a node is lost",
    "growth": "a node's workers join",
    "drain": "a node drains",
    "hang": "all ranks hang",
}
REFORMS = ("loss", "growth", "drain")
Row = list[float] | tuple[list[float], list[float]]
SENT = ("sent_bytes", "loss")
_EVENT_LOOP = ("/asyncio/base_events.py", "/asyncio/events.py", "/asyncio/selector_events.py", "/selectors.py")
LABELS = {"calls": "calls:", "sent_bytes": "bytes to workers:"}


class Stubs:
    """The process with the supervisors."""

    def __init__(self, *, beats: bool) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.scale.stubs", "beats" if beats else "quiet"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY,
        )  # fmt: skip

    def __call__(self, do: str, *arguments: Any) -> Any:
        """Let the process carry out a command, and return its answer."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([do, arguments]) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


class Calls:
    """Counts the Python functions that each thread calls, and the messages that the coordinator hears.

    The functions of asyncio's event loop are left out: their number depends on how many messages a wake-up brings.
    """

    def __init__(self) -> None:
        self._of_thread: Counter[int] = Counter()
        self.num_heard = 0

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        """Count a call, as `threading.setprofile` wants it."""
        if event == "call" and not frame.f_code.co_filename.endswith(_EVENT_LOOP):
            self._of_thread[threading.get_ident()] += 1

    def of(self, thread: threading.Thread) -> int:
        """Return the calls of a thread that was started while these were counted."""
        return self._of_thread[thread.ident or 0]


class Scenario:
    """A worker group, whose events are measured one after another."""

    def __init__(
        self, watch: WorkerGroupWatch, nodes: Nodes, stubs: Stubs, calls: Calls, workers: int, run_dir: Path
    ) -> None:
        self.run_dir = run_dir
        self.watch, self.nodes, self.stubs, self.calls = watch, nodes, stubs, calls
        self.workers, self.per_node = workers, per_node(workers)
        self.coordinator, self.generation = watch.coordinator, 0
        self.events: dict[str, dict[str, float]] = {}

    def node(self, worker: int) -> str:
        """Return the id of a worker's node."""
        return node_id(worker // self.per_node)

    def totals(self) -> dict[str, float]:
        """Return what was used so far."""
        thread, stubs = self.coordinator._thread, self.stubs("stats")
        return {
            "cpu_s": time.process_time(),
            "thread_s": time.clock_gettime(time.pthread_getcpuclockid(thread.ident or 0)),
            "calls": self.calls.of(thread),
            "sent_bytes": stubs["received"],
            "received_bytes": stubs["sent"],
            "orders_read_s": stubs["orders_read_s"],
            "stubs_s": stubs["cpu_s"],
        }

    def run(self, name: str, cause: Callable[[], float]) -> None:
        """Measure an event, until the last child of the generation after it has been started.

        Args:
            name: Name of the event.
            cause: Causes it, and returns the monotonic time of its beginning.
        """
        before = self.totals()
        began = cause()
        self.generation += 1
        while (group := self.coordinator.group) is None or group.generation < self.generation:
            time.sleep(0.002)
        formed_at = self.stubs("formed", self.generation, len(group.members))
        after = self.totals()
        self.events[name] = {"wall_s": formed_at - began, "members": len(group.members)}
        self.events[name] |= {key: after[key] - before[key] for key in after}

    def join(self) -> float:
        """Let all workers join."""
        places = {worker: self.node(worker) for worker in range(self.workers)}
        self.nodes.workers = Counter(places.values())
        hosts = {node: host_of_node(number) for number, node in enumerate(self.nodes.workers)}
        seats = {worker: Seat(node=node, actor=None, strategy=None) for worker, node in places.items()}
        began = time.monotonic()
        self.announcement = asdict(self.watch.begin(hosts, seats))
        self.stubs("join", self.announcement, places)
        return began

    def loss(self) -> float:
        """Lose the second node."""
        self.nodes.dead.add(self.node(self.per_node))
        return float(self.stubs("lose", list(range(self.per_node, 2 * self.per_node))))

    def join_more(self) -> None:
        """Let a new node's workers join; they train from the next generation on."""
        more = {worker: self.node(worker) for worker in range(self.workers, self.workers + self.per_node)}
        node = self.node(self.workers)
        self.nodes.workers[node] = self.per_node
        self.watch._use_nodes({node: host_of_node(self.workers // self.per_node)})
        self.stubs("join", self.announcement, more)
        while (group := self.coordinator.group) is None or not all(
            worker in group.workers and group.workers[worker].is_there for worker in more
        ):
            time.sleep(0.002)
        self.coordinator.post(reform.MoveAsked())
        while (group := self.coordinator.group) is None or not group.moves:
            time.sleep(0.002)

    def start_to_drain(self) -> None:
        """Announce the end of the first node, and wait until the scaling policy wants to leave it."""
        self.nodes.draining[self.node(0)] = round((time.time() + 600.0) * 1000)
        while (group := self.coordinator.group) is None or not group.moves:
            poll(self.watch, self.workers)
            time.sleep(0.1)

    def end(self) -> float:
        """Let all children end, as they do when they were asked to move."""
        return float(self.stubs("end", "resized"))

    def start_to_hang(self) -> None:
        """Let all children stop moving, and wait for nearly as long as they may."""
        self.hung_at = float(self.stubs("hang")) + max(HANG_S, 5 * STEP_S)
        time.sleep(self.hung_at - time.monotonic() - 0.1)

    def hung_since(self) -> float:
        """Return when the children had hung for as long as they may."""
        return self.hung_at

    def hear(self, num_beats: int) -> int:
        """Let each supervisor beat, and return the calls that the coordinator needed."""
        before = self.totals()
        for _ in range(num_beats):
            heard = self.calls.num_heard + self.workers
            self.stubs("beat")
            while self.calls.num_heard < heard:
                time.sleep(0.01)
        return int(self.totals()["calls"] - before["calls"])


def per_node(workers: int) -> int:
    """Return the number of workers on each node: 8, or half of them."""
    return min(8, workers // 2)


@contextmanager
def scenario(workers: int, *, plant: str, is_counted: bool) -> Iterator[Scenario]:
    """Yield a scenario in which the coordinator's calls are counted, without its timers, or its time is measured."""
    allow_open_files()
    calls = Calls()
    hear, reduce = Coordinator._heard, reform.reduce

    def heard(self: Any, present: Any, worker: int, message: Any) -> None:
        calls.num_heard += 1
        if plant == "messages":
            assert sum(one.is_there for one in present.group.workers.values())
        hear(self, present, worker, message)

    def reduced(group: reform.Group, event: Any, now: float) -> Any:
        assert sum(one.is_there for one in group.workers.values()) >= 0
        return reduce(group, event, now)

    with ExitStack() as ending:
        folder = ending.enter_context(tempfile.TemporaryDirectory())
        if is_counted:
            # Without timers, the same messages cost the same calls.
            ending.enter_context(patch.object(product, "LOOK_EVERY_S", 1e6))
            threading.setprofile(calls)
            ending.callback(threading.setprofile, None)
        if is_counted or plant == "messages":
            ending.enter_context(patch.object(Coordinator, "_heard", heard))
        if plant == "reduce":
            ending.enter_context(patch.object(reform, "reduce", reduced))
        if plant == "orders":
            ending.enter_context(patch.object(product, "changes", lambda before, after: changes([], after)))
        each = per_node(workers)
        watch, nodes, run_dir = ending.enter_context(controller_side(Path(folder), workers + each, each))
        stubs = Stubs(beats=not is_counted)
        # The coordinator closes the connections, which ends its tasks.
        ending.callback(stubs.close)
        yield Scenario(watch, nodes, stubs, calls, workers, run_dir)


def count(sizes: list[int], plant: str) -> list[dict[str, Any]]:
    """Return the coordinator's calls and bytes for some events, nearly the same in every process."""
    found = []
    for workers in sizes:
        with scenario(workers, plant=plant, is_counted=True) as one:
            one.run("join", one.join)
            beats = one.hear(4)
            one.run("loss", one.loss)
            one.join_more()
            one.run("growth", one.end)
            figures = {key: {name: event[key] for name, event in one.events.items()} for key in ("members", *LABELS)}
            figures["calls"]["beats"], figures["members"]["beats"] = beats, workers
            found.append({"workers": workers, **figures})
    return found


def time_size(workers: int, seconds: float, plant: str) -> dict[str, Any]:
    """Return the coordinator's time, bytes, memory and descriptors over the whole scenario."""
    with measured() as used, scenario(workers, plant=plant, is_counted=False) as one:
        one.run("join", one.join)
        run_dir = one.run_dir
        rank_nodes = [f"node-{worker // one.per_node:04d}/{host_of_node(worker)}" for worker in range(workers)]
        journal = JournalOfRank0(run_dir, rank_nodes)
        # The first moments belong to the start.
        train(one.watch, journal, workers, 1.0)
        before, began = one.totals(), time.monotonic()
        polls_s = train(one.watch, journal, workers, seconds)
        after, took_s = one.totals(), time.monotonic() - began
        training = {key: (after[key] - before[key]) / took_s for key in after} | {"polls_s": polls_s / took_s}
        descriptors = len(os.listdir("/proc/self/fd"))
        for name, prepare, cause in (
            ("loss", None, one.loss),
            ("growth", one.join_more, one.end),
            ("drain", one.start_to_drain, one.end),
            ("hang", one.start_to_hang, one.hung_since),
        ):
            if prepare is not None:
                prepare()
            one.run(name, cause)
            # Until the new generation has taken steps.
            train(one.watch, journal, workers, 1.5)
            clear_stop(run_dir)
        journal.close()
        step_bytes = (journal.num_bytes - journal.started_bytes) / journal.num_steps
        files = {path.name: path.stat().st_size for path in (run_dir / JOURNAL_FOLDER).iterdir()}
    return {
        "workers": workers, "events": one.events, "training": training, "descriptors": descriptors,
        "grown_mib": used["grown_bytes"] / MIB, "attempt_bytes": journal.started_bytes,
        "step_bytes": step_bytes, "files": files,
    }  # fmt: skip


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return counts, times and slopes."""
    sizes, plant = options.sizes, options.plant
    counted = fresh(count, sizes, plant)
    timed = [] if options.only == "counts" else [fresh(time_size, one, options.seconds, plant) for one in sizes]
    slopes = {
        f"{kind} per {name}": slope([one["members"][name] for one in counted], [one[kind][name] for one in counted])
        for kind, name in (("calls", "beats"), ("calls", "join"), ("calls", "loss"), ("calls", "growth"), SENT)
    }
    is_linear = all(found <= GOAL_SLOPE for found in slopes.values())
    return {"counted": counted, "timed": timed, "slopes": slopes, "plant": plant, "is_linear": is_linear}


def page(record: Record) -> str:
    """Return the page."""
    counted, timed = record["counted"], record["timed"]
    sizes = [one["workers"] for one in counted]
    text = (
        "The real coordinator, state machine, failure policy, scaling policy and journal of Ray Train's controller, "
        "without Ray, beside simulated supervisors in another process: they authenticate, join, send heartbeats and "
        "report ends and stacks over real sockets of this machine. Workers are 8 per node (4 of 8). A **loss** "
        "closes a node's connections, and the others report that their children ended; **growth** adds a node's "
        "workers, a **drain** leaves a node with a notice; in a **hang** all ranks stop, and each sends 10 kB of "
        "stacks. "
        "Children, the network between machines, Ray and the agents of peer memory are simulated. **slope** is the "
        "exponent of the power law nearest to a row's figures, over the workers that take part: 1 is linear."
    )
    counts = _rows(
        sizes,
        {
            f"{label} {name}": ([one[kind][name] for one in counted], [one["members"][name] for one in counted])
            for kind, label in LABELS.items()
            for name in counted[0][kind]
        },
    )
    verdict = (
        f"Goal: calls and bytes of an event at most linear, slope {GOAL_SLOPE}: {met(record['is_linear'])}. "
        "**join** is the join of all workers; every supervisor's first order lists all nodes (19 kB with 1,024 "
        "workers), so each join costs bytes in proportion to the workers, and all of them together are quadratic. "
        "Later orders name changes only. **beats** is four heartbeats of each worker. Calls of Python functions in the "
        "coordinator's thread, without its timers and asyncio's event loop, do not depend on the machine's load. They "
        "do not include work in C, such as copying the dict of workers at each event; the CPU seconds do."
    )
    parts = [header("Coordinator: 8 to 1,024 workers", record, text), counts, verdict]
    if timed:
        parts += _times(sizes, timed)
    return "\n\n".join(parts)


def _times(sizes: list[int], timed: list[dict[str, Any]]) -> list[str]:
    training, largest = [one["training"] for one in timed], timed[-1]
    rows: dict[str, Row] = {
        "training: cores of the coordinator": [one["thread_s"] for one in training],
        "training: cores of Ray's polls": [one["polls_s"] for one in training],
        "training: kB/s to workers": [one["sent_bytes"] / 1e3 for one in training],
        "training: kB/s from workers": [one["received_bytes"] / 1e3 for one in training],
    }
    for name, title in EVENTS.items():
        events = [one["events"][name] for one in timed]
        members = [one["members"] for one in events]
        rows |= {
            f"{title}: s until formed": ([one["wall_s"] for one in events], members),
            f"{title}: CPU s": ([one["cpu_s"] for one in events], members),
            f"{title}: kB to workers": ([one["sent_bytes"] / 1e3 for one in events], members),
            f"{title}: kB from workers": ([one["received_bytes"] / 1e3 for one in events], members),
            f"{title}: CPU s of the simulated supervisors": ([one["stubs_s"] for one in events], members),
        }
    rows |= {
        "memory grown, MiB": [one["grown_mib"] for one in timed],
        "open descriptors": [one["descriptors"] for one in timed],
        "journal: bytes per attempt": [one["attempt_bytes"] for one in timed],
        "journal: bytes per step": [one["step_bytes"] for one in timed],
        "journal: bytes of a hang and four failures": [
            size for one in timed for name, size in one["files"].items() if "controller" in name
        ],
    }
    cores = training[-1]["cpu_s"]
    slowest = max(largest["events"][name]["wall_s"] for name in REFORMS)
    reforms = [[one["events"][name] for one in timed] for name in REFORMS]
    steepest = max(slope([one["members"] for one in found], [one["cpu_s"] for one in found]) for found in reforms)
    goals = [
        f"at most {GOAL_SHARE:.0%} of a core while {sizes[-1]:,} workers train: {cores:.1%}, "
        f"{met(cores <= GOAL_SHARE)}",
        f"a re-form in at most {GOAL_REFORM_S:g} s: {slowest:.2f} s, {met(slowest <= GOAL_REFORM_S)}",
        f"CPU time of a re-form with a slope of at most {GOAL_SLOPE}: {steepest:.2f}, {met(steepest <= GOAL_SLOPE)}",
    ]
    return [
        _rows(sizes, rows),
        "Goals: " + "; ".join(goals) + ".",
        "Only rank 0 writes an attempt's journal, and the controller one more file per attempt; a hang's record holds "
        "the stacks of all ranks. The run's claim is the command's alone: two requests every five seconds (from the "
        "code). Times until formed include the simulated supervisors' share of the same two cores, "
        "and for a hang up to a second until the next look and the wait for all stacks.",
    ]


def _rows(sizes: list[int], rows: Mapping[str, Row]) -> str:
    """Return a table with a column for each size, and each row's slope over the sizes or over the numbers given."""
    lines = []
    for name, row in rows.items():
        values, over = row if isinstance(row, tuple) else (row, sizes)
        shown = [f"{value:,.4g}" if value < 1000 else f"{value:,.0f}" for value in values]
        lines.append([name, *shown, f"{slope(over, values):.2f}"])
    return table(["workers", *(f"{size:,}" for size in sizes), "slope"], lines)


BENCHMARK = Benchmark(
    name="scale_coordinator",
    about=__doc__ or "",
    measure=measure,
    page=page,
    packages=("ray-ulysses", "ray"),
    hardware="one for the coordinator, one for the simulated supervisors",
    options={
        "sizes": (SIZES, "numbers of workers"),
        "seconds": (10.0, "seconds of training"),
        "only": ("", "counts: no times"),
        "plant": ("", "a quadratic cost to plant: orders, reduce or messages"),
    },
    quick={"sizes": [8, 32], "seconds": 2.0},
)

if __name__ == "__main__":
    main(BENCHMARK)
