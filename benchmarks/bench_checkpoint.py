"""Checkpoints of a ZeRO-3 engine, ours beside DeepSpeed's: stall, save, and load at half the world.

Both sides save and load the same engine in the same gloo processes on CPU, in turn. DeepSpeed's way to another world
size is its universal checkpoint: ``ds_to_universal`` converts what ``save_checkpoint`` wrote, and ``load_checkpoint``
reads that.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from benchmarks.runner import MIB, Benchmark, Record, columns, fresh, header, main, measured, met, ratios, say, spread
from ray_ulysses.checkpoint import CheckpointMeta, TorchRankMessenger, load_parts, newest_committed
from ray_ulysses.checkpoint.background import BackgroundSaver, Saved
from ray_ulysses.checkpoint.load import verify_rest
from ray_ulysses.checkpoint.staging import Staging
from ray_ulysses.checkpoint.state import ShardedState, TensorPart
from ray_ulysses.clock import SystemClock
from ray_ulysses.engine.optimizer import parameter_groups
from ray_ulysses.engine.zero import ZeroSettings, zero_config
from ray_ulysses.engine.zero_state import import_state, state_source
from ray_ulysses.storage import LocalStore

TIMEOUT_S = 1200.0
GOAL_STALL, GOAL_LOAD = 0.1, 3.0
WAIT_S = 300.0
_DIGEST_ELEMENTS = 2**20
_DIGEST_MODULUS = 2**48

Size = dict[str, int]
SIZES: dict[str, Size] = {
    "small": {"vocab": 1024, "hidden": 128, "intermediate": 256, "layers": 2, "tokens": 16},
    "full": {"vocab": 16_384, "hidden": 768, "intermediate": 2048, "layers": 12, "tokens": 32},
}
"""A random Llama with heads of 64, and the tokens of each rank's micro-batch."""


class Trained:
    """A ZeRO-3 engine over all ranks, in bf16 with fp32 master weights and AdamW; every rank must make one."""

    def __init__(self, size: Size) -> None:
        import deepspeed
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        heads = size["hidden"] // 64
        config = LlamaConfig(
            vocab_size=size["vocab"], hidden_size=size["hidden"], intermediate_size=size["intermediate"],
            num_hidden_layers=size["layers"], num_attention_heads=heads, num_key_value_heads=heads,
        )  # fmt: skip
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        settings = ZeroSettings(
            dtype="bf16", accumulation=1, max_grad_norm=1.0, learning_rate=1e-4, betas=(0.9, 0.95), eps=1e-8,
            weight_decay=0.1,
        )  # fmt: skip
        self.engine: Any = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.AdamW(parameter_groups(model, 0.1), lr=1e-4, betas=(0.9, 0.95)),
            # Only DeepSpeed's load reads the switch.
            config=zero_config(settings) | {"checkpoint": {"load_universal": True}},
            dist_init_required=False,
        )[0]
        self._size = size

    def step(self) -> float:
        """Train on random tokens and return the seconds; every rank must call."""
        start = time.perf_counter()
        row = torch.randint(0, self._size["vocab"], (1, self._size["tokens"]))
        logits = self.engine(input_ids=row, use_cache=False).logits.float()
        self.engine.backward(cross_entropy(logits[0, :-1], row[0, 1:]))
        self.engine.step()
        return time.perf_counter() - start

    @property
    def parts(self) -> tuple[TensorPart, ...]:
        """What this rank holds."""
        state = state_source(self.engine)
        assert isinstance(state, ShardedState)
        return state.parts

    def digest(self) -> int:
        """Return a checksum of the whole state that does not depend on the world size; every rank must call."""
        held = sum(zlib.crc32(part.key.encode()) * _position_sum(part) for part in self.parts)
        total = torch.tensor(held % _DIGEST_MODULUS)
        dist.all_reduce(total)
        return int(total) % _DIGEST_MODULUS

    def forget(self) -> None:
        """Make the state that of an engine that was just built, and wrong, so that what a load leaves out shows."""
        inner = self.engine.optimizer.optimizer
        for flat in self.engine.optimizer.fp32_partitioned_groups_flat:
            flat.data.fill_(0.5)
            inner.state.pop(flat, None)


class OurSaver:
    """Our way to save, as the training loop uses it; every rank must make one."""

    def __init__(self, trained: Trained, folder: Path) -> None:
        self._trained, self._committed_at = trained, 0.0
        self._staging = Staging(2, torch.device("cpu"))
        self._staging.reserve(state_source(trained.engine).intervals)
        self._saver = BackgroundSaver(
            LocalStore(folder), attempt=1, rank=dist.get_rank(), world_size=dist.get_world_size(),
            messenger=TorchRankMessenger(dist.new_group(backend="gloo")), staging=self._staging, clock=SystemClock(),
            on_saved=self._saved, on_failed=lambda *_: None,
        )  # fmt: skip

    def save(self, step: int) -> dict[str, float]:
        """Save, and return how long training stood still for it and how long the commit took."""
        start = time.perf_counter()
        meta = CheckpointMeta(sp_size=1, cursor={}, digest="0", tokens=0)
        self._saver.save(step, state_source(self._trained.engine), meta, timeout_s=WAIT_S)
        stall_s = time.perf_counter() - start
        assert self._saver.wait(WAIT_S)
        if self._saver.failure is not None:
            raise self._saver.failure
        return {"stall_s": stall_s, "save_s": self._committed_at - start}

    def _saved(self, _: Saved) -> None:
        self._committed_at = time.perf_counter()


def load_ours(trained: Trained, folder: Path) -> None:
    """Resume from the newest checkpoint as the training loop does, every byte verified."""
    store, messenger = LocalStore(folder), TorchRankMessenger()
    manifest = messenger.broadcast(newest_committed(store, "sizes").manifest if dist.get_rank() == 0 else None)
    loaded: set[str] = set()

    def fill(parts: Any) -> None:
        loaded.update(part.key for part in parts)
        load_parts(store, manifest, parts, messenger)

    import_state(trained.engine, manifest.state, fill)
    place = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    verify_rest(store, manifest, loaded, **place, messenger=messenger)


def convert_theirs(source: str, target: str) -> dict[str, float]:
    """Convert what DeepSpeed saved into its universal checkpoint, as its command does by default."""
    from deepspeed.checkpoint import ds_to_universal

    options = argparse.Namespace(
        input_folder=source, output_folder=target, keep_temp_folder=False, strict=True, inject_missing_state=False,
        num_extract_workers=4, num_merge_workers=2,
    )  # fmt: skip
    with measured() as use:
        ds_to_universal.main(options)
    return use


def _position_sum(part: TensorPart) -> int:
    """Return the sum of an interval's bits, each element times its place in the whole tensor, in 64 bits."""
    bits = part.tensor.detach().view(torch.int16 if part.tensor.element_size() == 2 else torch.int32)
    total = 0
    for start in range(0, bits.numel(), _DIGEST_ELEMENTS):
        chunk = bits[start : start + _DIGEST_ELEMENTS].to(torch.int32)
        places = torch.arange(part.start + start, part.start + start + chunk.numel(), dtype=torch.int32)
        total += int((chunk * (2 * places + 1)).sum(dtype=torch.int64))
    return total


def save_rank(rank: int, _: int, size: Size, folder: str, rounds: int) -> dict[str, Any]:
    """Save in rounds, each with every side in turn; what the last round wrote stays."""
    root, trained = Path(folder), Trained(size)
    for _step in range(2):
        trained.step()
    ours, found = OurSaver(trained, root / "ours"), []
    sides: dict[str, Callable[[int], dict[str, Any]]] = {
        "ours": ours.save,
        "theirs": lambda step: _save_theirs(trained, root / "theirs", f"round-{step}"),
    }
    for number in range(rounds):
        parts: dict[str, Any] = {}
        for side in list(sides) if number % 2 == 0 else list(sides)[::-1]:
            _settle()
            with measured() as used:
                saved = sides[side](number + 1)
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
    found = {side: slowest(world["loads"], side, "seconds") for side in ("ours", "theirs")}
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
        "weights and AdamW. Both sides save and load the same engine in the same processes, in turn; a time is the "
        "slowest rank's, a ratio is of the same round. **Theirs** is DeepSpeed's `save_checkpoint`, `ds_to_universal` "
        "and a universal load, which neither syncs its files nor reads them back; ours syncs each shard, verifies it "
        "and commits a manifest. Theirs holds 12 bytes per parameter, ours 14. Goals: a stall of at most "
        f"{GOAL_STALL:.0%} of DeepSpeed's save; a load on "
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
        ours_of_theirs=lambda world: spread(ratios(*_stalls(world)), "{:.1%}"),
        goal=lambda world: met(median(ratios(*_stalls(world))) <= GOAL_STALL),
        our_save=of("ours", "save_s"),
        their_save_with_fsync=of("theirs", "save_s"),
    )
    loads = columns(
        worlds,
        ranks=lambda world: f"{world['world_size']} to {len(world['loads'])}",
        ours=load("ours"),
        theirs_with_conversion=load("whole"),
        ratio=lambda world: spread(ratios(_load_s(world)["whole"], _load_s(world)["ours"]), "{:.1f}"),
        goal=lambda world: met(median(ratios(_load_s(world)["whole"], _load_s(world)["ours"])) >= GOAL_LOAD),
        their_load_alone=load("theirs"),
        our_bytes_read_over_needed=lambda world: f"{_read_share(world):.2f}",
        the_state_is_exact=lambda world: ", ".join(f"{side} {_is_exact(world, side)}" for side in ("ours", "theirs")),
        memory_grown_MiB=lambda world: ", ".join(
            f"{side} {max(slowest(world['loads'], side, 'grown_bytes')) / MIB:,.0f}" for side in ("ours", "theirs")
        ),
    )
    title = "Checkpoints: ours beside DeepSpeed's save, conversion and universal load"
    return "\n\n".join([header(title, record, text), "## Saving", saves, "## Loading on half as many ranks", loads])


BENCHMARK = Benchmark(
    name="checkpoint",
    about="Checkpoints of a ZeRO-3 engine, ours beside DeepSpeed's, over gloo processes on CPU.",
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
