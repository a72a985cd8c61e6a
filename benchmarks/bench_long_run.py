"""Costs of inspecting and resuming a run of a million steps and a thousand checkpoints.

The journal is synthetic, as long as that of a real run; the checkpoints are on an S3 server of this machine. Each part
runs in a process of its own.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.runner import MIB, Benchmark, Record, columns, fresh, header, main, met, peak_rss_bytes, say

NUM_TENSORS = 500
PARTS = {
    "inspect": "`inspect`",
    "progress": "the progress view's first look",
    "resume": "a resume reads the journal's ends, and all of it in the background for its account of the time",
    "json": "`inspect --json`, every step of it",
    "checkpoints": "`inspect --checkpoints`",
    "inventory": "the inventory for MLflow",
    "retention": "retention after a save",
}
GOAL_CPU_S, GOAL_MIB, GOAL_CHECKPOINTS_S = 10.0, 500, 10.0


def write_journal(run_dir: Path, num_steps: int, num_checkpoints: int) -> dict[str, int]:
    """Write the journal of one attempt."""
    from ray_ulysses.tracking.journal_lines import with_checksum

    drawn = random.Random(0)
    path = run_dir / "journal/attempt-0001.jsonl"
    now, digest, tokens = 1_700_000_000.0, 0, 0
    with path.open("wb") as file:

        def write(event: str, **fields: Any) -> None:
            line = json.dumps({"time": now, "attempt": 1, "event": event, **fields}).encode()
            file.write(with_checksum(line) + b"\n")

        sizes = {"world_size": 2, "sp_size": 2, "dp_size": 1, "nodes": ["a"], "rank_nodes": ["a", "a"]}
        plan = {"last_step": num_steps, "plan_ids": ["p"], "versions": {}, "resumed_step": 0, "resumed_from": None}
        write("attempt_started", **sizes, **plan, session="s", command_started=now - 5.0)
        for step in range(1, num_steps + 1):
            now += 1.0
            own, count = drawn.getrandbits(64), 8_000_000 + drawn.randrange(1000)
            digest, tokens = (digest + own) % 2**64, tokens + count
            write(
                "step", step=step, loss=2.0 + drawn.random(), tokens=count, rows=[8 * step - 8, 8 * step],
                digest=f"{own:016x}", seconds=0.98, saving_seconds=0.001, learning_rate=3e-4 * drawn.random(),
                grad_norm=drawn.random(), peak_memory_gib=55.125, mfu=0.41, tokens_per_s=count / 0.98, world_size=2,
            )  # fmt: skip
            if step % (num_steps // num_checkpoints) == 0:
                sums = {"digest": f"{digest:016x}", "tokens": tokens, "next_row": 8 * step}
                write("checkpoint_committed", step=step, path=f"checkpoints/step-{step:08d}", world_size=2, **sums)
    return {"num_steps": num_steps, "journal_bytes": path.stat().st_size}


def write_checkpoints(uri: str, num_steps: int, num_checkpoints: int) -> dict[str, int]:
    """Commit checkpoints that have the shards of the first of them."""
    import torch

    from ray_ulysses.checkpoint.choice import for_each_step
    from ray_ulysses.checkpoint.manifest import read_manifest
    from ray_ulysses.run_names import manifest_key, step_folder
    from ray_ulysses.storage.place import open_store
    from tests.unit.inspect import saved

    saved.TENSORS = {f"frozen/layer.{number}.weight": torch.ones(64) for number in range(NUM_TENSORS)}
    store, every = open_store(uri), num_steps // num_checkpoints
    saved.save(store, every)
    first = read_manifest(store, every)
    shards = {shard.file: store.read_whole(f"{step_folder(every)}/{shard.file}") for shard in first.shards}

    def write(step: int) -> None:
        for file, content in shards.items():
            store.create(f"{step_folder(step)}/{file}", [content])
        store.create(manifest_key(step), [replace(first, step=step).to_bytes()])

    for_each_step(range(2 * every, num_steps + 1, every), write)
    return {"num_checkpoints": num_checkpoints, "manifest_bytes": len(first.to_bytes()), "num_shards": len(shards)}


def take(part: str, run_dir: str, uri: str) -> list[dict[str, float]]:
    """Do a part in this process, which does nothing else, and return what each stretch of it took."""
    stretches: dict[str, Callable[[], list[Callable[[], Any]]]] = {
        "inspect": lambda: [lambda: _inspect(run_dir)],
        "json": lambda: [lambda: _inspect(run_dir, "--json")],
        "checkpoints": lambda: [lambda: _inspect(run_dir, "--checkpoints")],
        "progress": lambda: [lambda: _progress(run_dir)],
        "resume": lambda: [lambda: _resume(run_dir)],
        "inventory": lambda: [lambda: _inventory(uri)],
        "retention": lambda: _retention(uri),
    }
    found, cpu = [], 0.0
    for stretch in stretches[part]():
        start = time.perf_counter()
        stretch()
        # The first one pays for the process's imports.
        found.append({"seconds": time.perf_counter() - start, "cpu_s": time.process_time() - cpu})
        cpu = time.process_time()
        found[-1]["peak_bytes"] = float(peak_rss_bytes())
    return found


def _inspect(run_dir: str, *options: str) -> None:
    from ray_ulysses.cli import app, run

    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
        assert run(app, ["inspect", run_dir, *options]) == 0


def _progress(run_dir: str) -> None:
    from rich.console import Console

    from ray_ulysses.commands.progress import ProgressView

    with ProgressView(Path(run_dir), name="long", console=Console(file=io.StringIO())):
        pass


def _resume(run_dir: str) -> None:
    from ray_ulysses.tracking.history import finished_step
    from ray_ulysses.tracking.journal_reader import read_entries
    from ray_ulysses.tracking.run_time import time_spent

    assert finished_step(read_entries(Path(run_dir), ends_only=True)) is None
    time_spent(read_entries(Path(run_dir)))


def _inventory(uri: str) -> None:
    from ray_ulysses.run.checkpoint_store import found_fields
    from ray_ulysses.storage.place import open_store

    assert found_fields(open_store(uri)) is not None


def _retention(uri: str) -> list[Callable[[], Any]]:
    from ray_ulysses.checkpoint.choice import newest_committed
    from ray_ulysses.checkpoint.retention import KeepRules, Retention
    from ray_ulysses.storage.place import open_store

    store = open_store(uri)
    newest = newest_committed(store, "sizes").manifest
    assert newest is not None
    retention = Retention(store, KeepRules(last=1_000_000))
    return [lambda: retention.apply(newest.ref)] * 2


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Write the run and take each part in a fresh process."""
    from ray_ulysses.storage.place import place_of
    from tests.s3_server import serve_s3
    from tests.unit.inspect.saved import make_folder

    with tempfile.TemporaryDirectory(prefix="bench-long-") as temporary, serve_s3() as server:
        os.environ.update(server.environment())
        run_dir, uri = Path(temporary) / "long", server.uri("long")
        make_folder(run_dir, checkpoint__storage=uri)
        run = write_journal(run_dir, options.steps, options.checkpoints)
        store = str(place_of(uri) / "long")
        run |= write_checkpoints(store, options.steps, options.checkpoints)
        found = {}
        for part in PARTS:
            found[part] = fresh(take, part, run_dir, store)
            say(f"{part}: {found[part]}")
    return {"run": run, "found": found}


def page(record: Record) -> str:
    """Return the page."""
    run = record["run"]
    text = (
        f"{run['num_steps']:,} steps in one attempt, a journal of {run['journal_bytes'] / MIB:,.0f} MiB; "
        f"{run['num_checkpoints']:,} checkpoints on an object store, each with {run['num_shards']} shards and a "
        f"manifest of {run['manifest_bytes'] / 2**10:,.0f} KiB. Each line is a process that does nothing else; CPU "
        f"time is with imports. The S3 server runs on the same cores. Goals: {GOAL_CPU_S:.0f} CPU seconds and "
        f"{GOAL_MIB} MiB to look at the run; {GOAL_CHECKPOINTS_S:.0f} s for checkpoints."
    )

    def goal(part: str) -> str:
        took = record["found"][part][0]
        if part in ("inspect", "progress", "resume"):
            return met(took["cpu_s"] <= GOAL_CPU_S and took["peak_bytes"] <= GOAL_MIB * MIB)
        return met(took["seconds"] <= GOAL_CHECKPOINTS_S) if part in ("checkpoints", "inventory") else ""

    parts = columns(
        list(PARTS),
        part=lambda part: PARTS[part],
        CPU_seconds=lambda part: ", then ".join(f"{one['cpu_s']:.1f}" for one in record["found"][part]),
        seconds=lambda part: ", then ".join(f"{one['seconds']:.1f}" for one in record["found"][part]),
        peak_memory=lambda part: f"{record['found'][part][0]['peak_bytes'] / MIB:,.0f} MiB",
        goal=goal,
    )
    return "\n\n".join([header("A long run: inspecting it, and resuming it", record, text), parts])


BENCHMARK = Benchmark(
    name="long_run",
    about="Costs of inspecting a long run, and of resuming it.",
    measure=measure,
    page=page,
    packages=("numpy", "pydantic", "obstore"),
    hardware="local disk, an S3 server (moto) on the same machine",
    options={"steps": (1_000_000, "steps of the journal"), "checkpoints": (1_000, "checkpoints of the run")},
    quick={"steps": 5_000, "checkpoints": 10},
)

if __name__ == "__main__":
    main(BENCHMARK)
