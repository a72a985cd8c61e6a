"""Costs of inspecting and resuming a run of a million steps and a thousand checkpoints.

The journal is synthetic, as long as that of a real run; the checkpoints are on an S3 server of this machine. Each part
runs in a process of its own, by this tree and, with ``--before``, by another one, on the same files.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

_REPOSITORY = Path(__file__).resolve().parents[1]
_TREE = os.environ.get("BENCH_TREE", str(_REPOSITORY))
if _TREE not in sys.path:
    sys.path.insert(0, _TREE)

TIMEOUT_S = 1800.0
NUM_TENSORS = 500
PARTS = ("inspect", "json", "progress", "resume", "inventory", "checkpoints", "retention")
"""The parts that are measured, by their names in the page's table."""


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


def do(part: str, run_dir: Path, uri: str) -> list[dict[str, float]]:
    """Do a part in this process, which does nothing else, and return what each stretch of it took."""
    stretches: list[Callable[[], Any]]
    if part in ("inspect", "json", "checkpoints"):
        stretches = [lambda: _inspect(run_dir, {"inspect": (), "json": ("--json",)}.get(part, ("--checkpoints",)))]
    else:
        stretches = {"progress": _progress, "resume": _resume, "inventory": _inventory, "retention": _retention}[part](
            run_dir, uri
        )
    found, cpu = [], 0.0
    for stretch in stretches:
        start = time.perf_counter()
        stretch()
        # The first one pays for the process's imports.
        found.append({"seconds": time.perf_counter() - start, "cpu_s": time.process_time() - cpu})
        cpu = time.process_time()
        found[-1]["peak_bytes"] = float(_peak_bytes())
    return found


def _inspect(run_dir: Path, options: tuple[str, ...]) -> None:
    from ray_ulysses.cli import app, run

    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
        assert run(app, ["inspect", str(run_dir), *options]) == 0


def _progress(run_dir: Path, _: str) -> list[Callable[[], Any]]:
    def look() -> None:
        from rich.console import Console

        from ray_ulysses.commands.progress import ProgressView

        with ProgressView(run_dir, name="long", console=Console(file=io.StringIO())):
            pass

    return [look]


def _resume(run_dir: Path, _: str) -> list[Callable[[], Any]]:
    def read() -> None:
        from ray_ulysses.tracking.history import finished_step
        from ray_ulysses.tracking.journal_reader import read_entries
        from ray_ulysses.tracking.run_time import time_spent

        assert finished_step(read_entries(run_dir, ends_only=True)) is None
        time_spent(read_entries(run_dir))

    return [read]


def _inventory(_: Path, uri: str) -> list[Callable[[], Any]]:
    def take() -> None:
        from ray_ulysses.run.checkpoint_store import found_fields
        from ray_ulysses.storage.place import open_store

        assert found_fields(open_store(uri)) is not None

    return [take]


def _retention(_: Path, uri: str) -> list[Callable[[], Any]]:
    from ray_ulysses.checkpoint.choice import newest_committed
    from ray_ulysses.checkpoint.retention import KeepRules, Retention
    from ray_ulysses.storage.place import open_store

    store = open_store(uri)
    newest = newest_committed(store, "sizes").manifest
    assert newest is not None
    retention = Retention(store, KeepRules(last=1_000_000))
    return [lambda: retention.apply(newest.ref)] * 2


def _peak_bytes() -> int:
    from benchmarks.fresh_process import peak_rss_bytes

    return peak_rss_bytes()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the record of everything that the options ask for."""
    from benchmarks.fresh_process import run_fresh
    from benchmarks.stored_result import command, provenance, say
    from ray_ulysses.storage.place import place_of
    from tests.s3_server import serve_s3
    from tests.unit.inspect.saved import make_folder

    record: dict[str, Any] = {
        **provenance(("numpy", "pydantic", "obstore"), "local disk, an S3 server (moto) on the same machine"),
        "command": command("bench_long_run.py"),
        "load_before": os.getloadavg(),
        "after": {},
        "before": None,
    }
    with tempfile.TemporaryDirectory(prefix="bench-long-") as temporary, serve_s3() as server:
        os.environ.update(server.environment())
        run_dir, uri = Path(temporary) / "long", server.uri("long")
        make_folder(run_dir, checkpoint__storage=uri)
        record["run"] = write_journal(run_dir, options.steps, options.checkpoints)
        place = str(place_of(uri) / "long")
        record["run"] |= write_checkpoints(place, options.steps, options.checkpoints)

        def parts(tree: Path, names: tuple[str, ...]) -> dict[str, Any]:
            os.environ["BENCH_TREE"] = str(tree)
            found = {}
            for name in names:
                arguments = [__file__, "--part", name, str(run_dir), place]
                try:
                    found[name] = run_fresh(arguments, TIMEOUT_S)["stretches"]
                except RuntimeError as error:
                    sys.exit(str(error))
                say(f"{tree.name} {name}: {found[name]}")
            return found

        if options.before is not None:
            record["before"] = parts(options.before.resolve(), PARTS)
            git = ["git", "-C", str(options.before), "rev-parse", "--short", "HEAD"]
            record["before_commit"] = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
        record["after"] = parts(_REPOSITORY, PARTS)
    return record | {"load_average": os.getloadavg()}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        description="Costs of inspecting a long run, and of resuming it.",
        epilog="Example: git worktree add ../before ac805de; python benchmarks/bench_long_run.py --before ../before",
    )
    parser.add_argument("--steps", type=int, default=1_000_000, help="of the journal (default: 1,000,000)")
    parser.add_argument("--checkpoints", type=int, default=1_000, help="of the run (default: 1,000)")
    parser.add_argument("--before", type=Path, help="another tree of this project, which does the same beside this one")
    parser.add_argument("--quick", action="store_true", help="5,000 steps and 10 checkpoints; writes nothing")
    parser.add_argument("--part", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="folder for long_run.md and .json (default: results; --quick: none)")
    options = parser.parse_args(arguments)
    if options.quick:
        options.steps, options.checkpoints = 5_000, 10
    elif options.out is None:
        options.out = Path(__file__).parent / "results"
    return options


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark, show its page and store it."""
    options = parse(arguments)
    if options.part:
        name, run_dir, uri = options.part
        try:
            stretches = do(name, Path(run_dir), uri)
        except ImportError as error:
            sys.exit(
                f"--before {_TREE}: that tree can't do the part {name!r} ({error}), since its modules are called "
                "otherwise; give a tree of a newer commit, or leave --before out"
            )
        sys.stdout.write(json.dumps({"stretches": stretches}) + "\n")
        return
    from benchmarks.long_run_report import markdown
    from benchmarks.stored_result import say, store

    record = measure(options)
    say(markdown(record))
    if options.out is not None:
        say("\n".join(f"written: {path.name}" for path in store("long_run", markdown(record), record, options.out)))


if __name__ == "__main__":
    main()
