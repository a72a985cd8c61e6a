"""Checkpoints of a ZeRO-3 engine, ours beside DeepSpeed's and torch's: stall, save, and load at half the world.

All sides save and load the same engine in the same gloo processes on CPU, in turn.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.checkpoint_sides import SIZES, DcpSaver, OurSaver, Size, Trained, convert_theirs, load_dcp, load_ours
from benchmarks.runner import (
    MIB,
    Benchmark,
    Record,
    columns,
    fresh,
    header,
    main,
    measured,
    met,
    ratios,
    say,
    spread,
)  # fmt: skip
from ray_ulysses.checkpoint import newest_committed
from ray_ulysses.storage import LocalStore

TIMEOUT_S = 1200.0
QUIET_STEPS = 2
GOAL_STALL, GOAL_LOAD = 0.1, 3.0


def save_rank(rank: int, _: int, size: Size, folder: str, rounds: int) -> dict[str, Any]:
    """Save in rounds, each with every side in turn; what the last round wrote stays."""
    root, trained = Path(folder), Trained(size)
    for _step in range(2):
        trained.step()
    ours, dcp, found = OurSaver(trained, root / "ours"), DcpSaver(trained, root / "dcp"), []
    sides: dict[str, Callable[[int], dict[str, Any]]] = {
        "ours": lambda step: ours.end(ours.begin(step)),
        "theirs": lambda step: _save_theirs(trained, root / "theirs", f"round-{step}"),
        "dcp": lambda step: dcp.save(),
    }
    for number in range(rounds):
        parts: dict[str, Any] = {"beside": _beside_steps(trained, ours, 2 * number)}
        for side in list(sides) if number % 2 == 0 else list(sides)[::-1]:
            _settle()
            with measured() as used:
                saved = sides[side](2 * number + 1)
            parts[side] = {**used, **saved}
        parts["copy"] = {"seconds": _copy_s(trained)}
        found.append(parts)
        dist.barrier()
        if rank == 0 and number + 1 < rounds:
            shutil.rmtree(root / "theirs")
    return {
        # The first save of each side pays for what later ones find.
        "rounds": found[1:],
        "state_bytes": sum(part.tensor.nbytes for part in trained.parts),
        "digest": trained.digest(),
    }


def load_rank(rank: int, world_size: int, size: Size, folder: str, rounds: int) -> dict[str, Any]:
    """Load in rounds, each with every side in turn, DeepSpeed's conversion before its own."""
    root, trained = Path(folder), Trained(size)
    stored = newest_committed(LocalStore(root / "ours"), "sizes").manifest
    assert stored is not None
    native = next((root / "theirs").glob("round-*"))
    found = []
    for number in range(rounds):
        parts: dict[str, Any] = {"conversion": None}
        tag = f"universal-{number}"
        if rank == 0:
            parts["conversion"] = fresh(convert_theirs, native, root / "theirs" / tag)
        dist.barrier()
        sides: dict[str, Callable[[], object]] = {
            "ours": lambda: load_ours(trained, root / "ours"),
            "theirs": lambda tag=tag: trained.engine.load_checkpoint(str(root / "theirs"), tag=tag),  # type: ignore[misc]
            "dcp": lambda: load_dcp(trained, stored.state, root / "dcp"),
        }
        for side in list(sides) if number % 2 == 0 else list(sides)[::-1]:
            trained.forget()
            _settle()
            with measured() as used:
                sides[side]()
            parts[side] = {**used, "digest": trained.digest()}
        found.append(parts)
    needed = sum(part.tensor.nbytes for part in trained.parts if not part.key.startswith("model/"))
    return {"rounds": found, "needed_bytes": needed}


def _beside_steps(trained: Trained, ours: OurSaver, step: int) -> dict[str, float]:
    """Take steps without a save and then beside one; return by how much those were longer, the stall included."""
    _settle()
    quiet = [trained.step() for _ in range(QUIET_STEPS)]
    begun = ours.begin(step)
    beside = []
    is_saving = torch.tensor(1)
    while is_saving:
        beside.append(trained.step())
        is_saving = torch.tensor(int(not ours.is_idle))
        dist.all_reduce(is_saving, op=dist.ReduceOp.MAX)
    ours.end(begun)
    return {"step_s": median(quiet), "cost_s": begun["stall_s"] + sum(beside) - len(beside) * median(quiet)}


def _save_theirs(trained: Trained, folder: Path, tag: str) -> dict[str, float]:
    """Save as DeepSpeed does, and then, timed apart, bring its files to the disk as ours are."""
    start = time.perf_counter()
    trained.engine.save_checkpoint(str(folder), tag=tag)
    stall_s = time.perf_counter() - start
    dist.barrier()
    if dist.get_rank() == 0:
        for path in (folder / tag).iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    return {"stall_s": stall_s, "save_s": time.perf_counter() - start}


def _copy_s(trained: Trained) -> float:
    """Return the seconds in which all ranks at once copy the bytes that each of them saves: the fastest of three."""
    source = torch.ones(sum(part.tensor.nbytes for part in trained.parts), dtype=torch.uint8)
    target, seconds = torch.empty_like(source), []
    for _ in range(4):
        dist.barrier()
        start = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def _settle() -> None:
    """Bring what was written before to the disk, so that no side pays for another."""
    if dist.get_rank() == 0:
        os.sync()
    dist.barrier()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Save on each world and load on half of it."""
    from tests.distributed.harness import run_ranks

    size, worlds = SIZES[options.size], []
    for world_size in options.world:
        with tempfile.TemporaryDirectory(prefix="bench-checkpoint-", dir=options.folder) as folder:
            saves = run_ranks(save_rank, world_size, size, folder, options.rounds + 1, timeout_s=TIMEOUT_S)
            loads = run_ranks(load_rank, world_size // 2, size, folder, options.rounds, timeout_s=TIMEOUT_S)
        worlds.append({"world_size": world_size, "saves": saves, "loads": loads})
        say(f"{world_size} ranks: stall/their save {spread(ratios(*_stalls(worlds[-1])), '{:.1%}')}")
    return {"size": size, "worlds": worlds}


def slowest(ranks: Sequence[Record], part: str, name: str) -> list[float]:
    """Return a figure of each round, the slowest rank's."""
    return [max(one[part][name] for one in each) for each in zip(*(rank["rounds"] for rank in ranks), strict=True)]


def _stalls(world: Record) -> tuple[list[float], list[float]]:
    return slowest(world["saves"], "ours", "stall_s"), slowest(world["saves"], "theirs", "stall_s")


def _load_s(world: Record) -> dict[str, list[float]]:
    found = {side: slowest(world["loads"], side, "seconds") for side in ("ours", "theirs", "dcp")}
    converted = [one["conversion"]["seconds"] for one in world["loads"][0]["rounds"]]
    return {**found, "whole": [one + other for one, other in zip(converted, found["theirs"], strict=True)]}


def _read_share(world: Record) -> float:
    """Return the bytes that our load read over those that it needed, of the worst rank."""
    return max(one["ours"]["read_bytes"] / rank["needed_bytes"] for rank in world["loads"] for one in rank["rounds"])


def _is_exact(world: Record, side: str) -> bool:
    """Whether every rank's state after a load is the one that was saved."""
    wanted = {rank["digest"] for rank in world["saves"]}
    return {one[side]["digest"] for rank in world["loads"] for one in rank["rounds"]} == wanted


def page(record: Record) -> str:
    """Return the page."""
    worlds, size = record["worlds"], record["size"]
    text = (
        f"A random Llama ({size['layers']} layers, hidden size {size['hidden']}), ZeRO-3, bf16 with fp32 master "
        "weights and AdamW. All sides save and load the same engine in the same processes, in turn; a time is the "
        "slowest rank's, a ratio is of the same round. **Theirs** is DeepSpeed's `save_checkpoint`, `ds_to_universal` "
        "and a universal load, which neither syncs its files nor reads them back; ours syncs each shard, verifies it "
        "and commits a manifest. **torch** is `async_save` with `sync_files`, and `load`. Theirs holds 12 bytes per "
        f"parameter, ours and torch's 14. Goals: a stall of at most {GOAL_STALL:.0%} of DeepSpeed's save; a load on "
        f"half the ranks {GOAL_LOAD:.0f} times as fast as conversion and load."
    )

    def of(part: str, name: str) -> Callable[[Record], str]:
        return lambda world: spread(slowest(world["saves"], part, name), "{:.3f}") + " s"

    def load(name: str) -> Callable[[Record], str]:
        return lambda world: spread(_load_s(world)[name], "{:.3f}") + " s"

    saves = columns(
        worlds,
        ranks=lambda world: str(world["world_size"]),
        MiB_per_rank=lambda world: f"{max(rank['state_bytes'] for rank in world['saves']) / MIB:,.0f}",
        our_stall=of("ours", "stall_s"),
        bound_copying_it=of("copy", "seconds"),
        their_stall=of("theirs", "stall_s"),
        torchs_stall=of("dcp", "stall_s"),
        ours_of_theirs=lambda world: spread(ratios(*_stalls(world)), "{:.1%}"),
        goal=lambda world: met(median(ratios(*_stalls(world))) <= GOAL_STALL),
        our_save=of("ours", "save_s"),
        their_save_with_fsync=of("theirs", "save_s"),
        torchs_save=of("dcp", "save_s"),
        step_without_a_save=of("beside", "step_s"),
        steps_beside_a_save_take_longer_by=of("beside", "cost_s"),
    )
    loads = columns(
        worlds,
        ranks=lambda world: f"{world['world_size']} to {len(world['loads'])}",
        ours=load("ours"),
        theirs_with_conversion=load("whole"),
        ratio=lambda world: spread(ratios(_load_s(world)["whole"], _load_s(world)["ours"]), "{:.1f}"),
        goal=lambda world: met(median(ratios(_load_s(world)["whole"], _load_s(world)["ours"])) >= GOAL_LOAD),
        their_load_alone=load("theirs"),
        torch=load("dcp"),
        our_bytes_read_over_needed=lambda world: f"{_read_share(world):.2f}",
        the_state_is_exact=lambda world: ", ".join(
            f"{side} {_is_exact(world, side)}" for side in ("ours", "theirs", "dcp")
        ),
        memory_grown_MiB=lambda world: ", ".join(
            f"{side} {max(slowest(world['loads'], side, 'grown_bytes')) / MIB:,.0f}"
            for side in ("ours", "theirs", "dcp")
        ),
    )
    title = "Checkpoints: ours beside DeepSpeed's save, conversion and universal load"
    return "\n\n".join([header(title, record, text), "## Saving", saves, "## Loading on half as many ranks", loads])


BENCHMARK = Benchmark(
    name="checkpoint",
    about="Checkpoints of a ZeRO-3 engine, ours beside DeepSpeed's and torch's, over gloo processes on CPU.",
    measure=measure,
    page=page,
    packages=("torch", "deepspeed", "transformers"),
    hardware="one thread per rank, gloo over loopback, one local disk",
    options={
        "world": ([2, 4], "even numbers of ranks"),
        "size": ("full", "the model: full (110M) or small"),
        "rounds": (3, "of each side, in turn"),
        "folder": (None, "where checkpoints are written"),
    },
    quick={"world": [2], "size": "small", "rounds": 1},
)

if __name__ == "__main__":
    main(BENCHMARK)
