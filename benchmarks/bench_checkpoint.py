"""Checkpoints of a ZeRO-3 engine, ours beside DeepSpeed's own: stall, save, load at half the world, bytes, memory.

Both sides save and load the same engine in the same gloo processes on CPU, in turn. DeepSpeed's way to another world
size is ``save_checkpoint``, ``ds_to_universal`` and ``load_checkpoint`` with ``load_universal``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

if str(Path(__file__).resolve().parents[1]) not in sys.path:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.checkpoint_estimate import estimate
from benchmarks.checkpoint_phases import load_rank, save_rank
from benchmarks.checkpoint_report import markdown, summary
from benchmarks.checkpoint_sides import SIZES, convert_theirs
from benchmarks.stored_result import RESULTS, command, provenance, say, store

TIMEOUT_S = 1200.0


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the record of everything that the options ask for."""
    record: dict[str, Any] = {
        **provenance(("torch", "deepspeed", "transformers"), "one thread a rank, gloo over loopback, one local disk"),
        "command": command("bench_checkpoint.py"),
        "load_before": os.getloadavg(),
        "size": asdict(SIZES[options.size]),
        "worlds": [],
    }
    for world_size in options.world:
        record["worlds"].append(one_world(world_size, options))
        say(summary(record["worlds"][-1]))
    record["estimate"] = estimate()
    return record | {"load_average": os.getloadavg()}


def one_world(world_size: int, options: argparse.Namespace) -> dict[str, Any]:
    """Save on a world and load on half of it."""
    from tests.distributed.harness import run_ranks

    size = SIZES[options.size]
    with tempfile.TemporaryDirectory(prefix="bench-checkpoint-", dir=options.folder) as folder:
        # One more: the first save of each side is told apart.
        saves = run_ranks(save_rank, world_size, size, folder, options.rounds + 1, timeout_s=TIMEOUT_S)
        loads = run_ranks(
            load_rank, world_size // 2, size, folder, options.rounds, options.cold_rounds, timeout_s=TIMEOUT_S
        )
    return {"world_size": world_size, "saves": saves, "loads": loads}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        description="Checkpoints of a ZeRO-3 engine, ours beside DeepSpeed's own, over gloo processes on CPU.",
        epilog="Example: python benchmarks/bench_checkpoint.py --world 2 --rounds 5 --out /tmp/checkpoint",
    )
    parser.add_argument("--world", type=int, nargs="+", default=[2, 4], help="even numbers of ranks (default: 2 4)")
    parser.add_argument("--size", choices=sorted(SIZES), default="full", help="the model (default: full, 110M)")
    parser.add_argument("--rounds", type=int, default=3, help="of each side, in turn (default: 3)")
    parser.add_argument("--cold-rounds", type=int, default=1, help="of loads from the disk itself (default: 1)")
    parser.add_argument("--folder", type=Path, help="where checkpoints are written (default: the temporary folder)")
    parser.add_argument("--quick", action="store_true", help="a tiny model, 2 ranks, one round")
    parser.add_argument("--convert", type=Path, nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="folder for checkpoint.md and .json (default: results; --quick: none)")
    options = parser.parse_args(arguments)
    if any(world_size < 2 or world_size % 2 for world_size in options.world):
        parser.error(f"--world {options.world}: a world that can be halved is needed; give even numbers")
    if options.quick:
        options.world, options.size, options.rounds, options.cold_rounds = [2], "small", 1, 1
    elif options.out is None and options.size == "full":
        options.out = RESULTS
    return options


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark, show its page and store it."""
    options = parse(arguments)
    if options.convert:
        say(json.dumps(convert_theirs(*options.convert)))
        return
    record = measure(options)
    say(markdown(record))
    if options.out is not None:
        say("\n".join(f"written: {path.name}" for path in store("checkpoint", markdown(record), record, options.out)))


if __name__ == "__main__":
    main()
