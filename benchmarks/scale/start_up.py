"""The calls, bytes and waits of the start of 8 to 1,024 workers on the controller, with a Ray that only counts."""

from __future__ import annotations

import argparse
import pickle
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import ray

from benchmarks.runner import Benchmark, Record, fresh, header, main, met, table
from benchmarks.scale.controller_side import controller_side, host_of_node, node_id
from benchmarks.scale.limits import allow_open_files
from benchmarks.scale.slope import slope
from ray_ulysses.cluster.peer_memory_agents import Contact, ensure_agents
from ray_ulysses.cluster.scaling import JoiningWorkers
from ray_ulysses.elastic import reform
from ray_ulysses.supervision.supervisor import Announcement

SIZES, PER_NODE = [8, 64, 256, 1024], 8
ANSWER_S = 0.005
"""Seconds that the fake Ray's head takes to find an actor."""
GOAL_SLOPE, GOAL_WAIT_S = 1.1, 0.1


class Reference:
    """A reference to a result that is there."""

    def __init__(self, value: Any) -> None:
        self.value = value


class CountingRay:
    """Counts remote calls and the bytes of their arguments, and answers them at once."""

    def __init__(self) -> None:
        self.num_calls = self.num_bytes = self.num_lookups = 0

    def call(self, result: Any, *arguments: Any) -> Any:
        """Count a remote call, and return a reference to its result."""
        self.num_calls += 1
        self.num_bytes += len(pickle.dumps(arguments))
        return Reference(result)

    def remote(self, *_: Any, **options: Any) -> Any:
        """Stand in for ``ray.remote(...)`` of an actor's class."""
        return lambda kind: SimpleNamespace(options=lambda **placed: SimpleNamespace(remote=self._actor))

    def _actor(self, *arguments: Any) -> Any:
        self.call(None, *arguments)
        contact = Contact(address="10.0.0.1:40000", limit_bytes=2**36, token="t" * 32)
        answers = {"contact": contact, "gpus": ["0"], "supervise": None}

        def method(result: Any) -> Any:
            return SimpleNamespace(remote=lambda *given: self.call(result, *given))

        return SimpleNamespace(**{name: method(result) for name, result in answers.items()})

    def get_actor(self, name: str, namespace: str) -> Any:
        """Take as long as the head, which finds nothing."""
        self.num_lookups += 1
        time.sleep(ANSWER_S)
        raise ValueError(name)

    def get(self, asked: Any) -> Any:
        """Return the results."""
        return [one.value for one in asked] if isinstance(asked, list) else asked.value

    def wait(self, asked: list[Any], **_: Any) -> tuple[list[Any], list[Any]]:
        """Return all references as ready."""
        return asked, []


def count(workers: int) -> dict[str, float]:
    """Return what the start of a worker group costs, and then that of as many workers outside of it."""
    allow_open_files()
    counted, nodes_asked, calls = CountingRay(), Counter[str](), Counter[str]()
    place = {worker: node_id(worker // PER_NODE) for worker in range(workers)}
    with ExitStack() as ending:
        folder = Path(ending.enter_context(tempfile.TemporaryDirectory()))
        watch, nodes, _ = ending.enter_context(controller_side(folder, max(workers, 16), PER_NODE))
        nodes.workers = Counter(place.values())
        for name in ("remote", "get_actor", "get", "wait"):
            ending.enter_context(patch.object(ray, name, getattr(counted, name)))

        def listed() -> Any:
            nodes_asked["nodes"] += 1
            return nodes.listed()

        ending.enter_context(patch.object(ray, "nodes", listed))
        watch.scaling._placed = dict(nodes.workers)
        group = SimpleNamespace(
            get_worker_group_state=lambda: SimpleNamespace(
                placement_group_handle=SimpleNamespace(placement_group=None)
            ),
            get_workers=lambda: [
                SimpleNamespace(
                    metadata=SimpleNamespace(node_id=node, node_ip=host_of_node(worker // PER_NODE)),
                    actor=None,
                    placement_group_bundle_index=worker,
                )
                for worker, node in place.items()
            ],
            execute=lambda _, given: [counted.call(None, given) for _ in range(workers)],
        )

        def profile(frame: Any, event: str, argument: Any) -> None:
            calls[event] += event == "call"

        sys.setprofile(profile)
        watch.before_worker_group_start(SimpleNamespace())  # type: ignore[arg-type]
        watch.after_worker_group_start(group)
        sys.setprofile(None)
        started = {"calls": calls["call"], "nodes": nodes_asked["nodes"], "remote": counted.num_calls}
        started_bytes = counted.num_bytes
        job = {"config": watch._judge._book.config.model_dump(mode="json"), "session": "s" * 32}
        began = time.monotonic()
        ensure_agents("run", {node: host_of_node(number) for number, node in enumerate(nodes.workers)})
        agents_s, agent_calls = time.monotonic() - began, counted.num_calls - started["remote"]
        members = list(place.values())
        calls.clear()
        sys.setprofile(profile)
        addresses = watch._memory.of(members, ())
        sys.setprofile(None)
        assert addresses is not None and len(addresses) == workers
        of_calls = calls["call"]
        calls.clear()
        before = counted.num_calls, counted.num_bytes
        joining = JoiningWorkers(job, watch.scaling._demand, 600.0)
        joining.begin(Announcement(host="h", port=1, token="t", group=1), {})
        sys.setprofile(profile)
        empty = reform.Group(wanted=watch.scaling._demand.wanted, workers={})
        joining.start(empty, nodes.workers, 0.0)
        joining.have_joined(empty, 1.0)
        sys.setprofile(None)
        return {
            "calls": started["calls"],
            "nodes": started["nodes"],
            "remote": started["remote"],
            "bytes": started_bytes,
            "job_bytes": len(pickle.dumps(job)),
            "lookups": counted.num_lookups,
            "agents_s": agents_s,
            "agent_calls": agent_calls,
            "of_calls": of_calls,
            "joining_calls": calls["call"],
            "joining_remote": counted.num_calls - before[0],
            "joining_bytes": counted.num_bytes - before[1],
        }


ROWS = {
    "calls": "a worker group: Python calls in the controller",
    "nodes": "a worker group: requests for the list of nodes",
    "remote": "a worker group: remote calls of ours",
    "bytes": "a worker group: bytes of these calls",
    "job_bytes": "bytes of the settings that each worker receives",
    "lookups": "agents of peer memory: lookups of actors",
    "agents_s": f"agents: seconds, if a lookup takes {ANSWER_S * 1000:g} ms",
    "agent_calls": "agents: remote calls",
    "of_calls": "addresses of agents for a generation: Python calls",
    "joining_calls": "as many workers that join later: Python calls",
    "joining_remote": "as many workers that join later: remote calls",
    "joining_bytes": "as many workers that join later: bytes of these calls",
}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the counts and their slopes."""
    counted = [fresh(count, workers) for workers in options.sizes]
    slopes = {name: slope(options.sizes, [one[name] for one in counted]) for name in ROWS}
    return {"sizes": options.sizes, "counted": counted, "slopes": slopes}


def page(record: Record) -> str:
    """Return the page."""
    text = (
        "The controller's real code before and after Ray Train starts a worker group, for the agents of peer memory "
        "and for workers that join later, with a Ray that counts calls, pickles their arguments and answers at once. "
        "Eight workers per node. The list of nodes and the lookup of actors are requests to the cluster's head; remote "
        "calls go to all actors before the first answer is awaited. Ray Train's own calls for each worker, the start "
        "of processes and the placement group are not counted. The driver makes one remote call for a run. **slope** "
        "is the exponent of the power law nearest to a row's figures: 1 is linear."
    )
    lines = [
        [title, *(f"{one[name]:,.4g}" if one[name] < 1000 else f"{one[name]:,.0f}" for one in record["counted"]),
         f"{record['slopes'][name]:.2f}"]
        for name, title in ROWS.items()
    ]  # fmt: skip
    head = ["workers", *(f"{size:,}" for size in record["sizes"]), "slope"]
    steepest, wait_s = max(record["slopes"].values()), record["counted"][-1]["agents_s"]
    goals = (
        f"Goals: no count or size with a slope above {GOAL_SLOPE}: {steepest:.2f}, {met(steepest <= GOAL_SLOPE)}; "
        f"agents found without a wait for each node, in at most {GOAL_WAIT_S:g} s: {wait_s:.2f} s, "
        f"{met(wait_s <= GOAL_WAIT_S)}. Before, agents were looked for one after another, for {record['sizes'][-1]:,} "
        "workers in 0.64 s by computation, and a start of workers that join later looked at all workers for each of "
        "their nodes."
    )
    return "\n\n".join([header("Start-up: 8 to 1,024 workers", record, text), table(head, lines), goals])


BENCHMARK = Benchmark(
    name="scale_start_up",
    about=__doc__ or "",
    measure=measure,
    page=page,
    packages=("ray-ulysses", "ray"),
    hardware="one of them used",
    options={"sizes": (SIZES, "numbers of workers")},
    quick={"sizes": [8, 64]},
)

if __name__ == "__main__":
    main(BENCHMARK)
