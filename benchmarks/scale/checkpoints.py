"""Checkpoints of Llama-3-70B on 64 to 1,024 ranks, without data: manifest, inventory, choice, read plans, requests.

The code is the product's; the state is described by the architecture's tensors and ZeRO-3's arithmetic. Nothing is
saved but manifests and, to count requests, shards of a few bytes.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import runner
from benchmarks.runner import MIB, Benchmark, Record, columns, fresh, header, measured, met, say
from benchmarks.scale.slope import slope

LLAMA_3_70B: dict[str, Any] = {
    "vocab_size": 128_256, "hidden_size": 8_192, "intermediate_size": 28_672, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8,
}  # fmt: skip
GOAL_PLAN_S, GOAL_MEMORY_BYTES, GOAL_HOLD_S = 10.0, 2 * 2**30, 0.05
STEP, ATTEMPT = 100, 1
PAGE_KEYS = 1000
"""Keys in an answer to a list request, as on S3, Google Cloud Storage and MinIO."""


def state_of_70b() -> Any:
    """Return the description of the state that ZeRO-3 and Adam have for the model, in the order of a rank's parts."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    from ray_ulysses.checkpoint.state import StateDescription, TensorSpec
    from ray_ulysses.engine.zero_state import named_tensors

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**LLAMA_3_70B), dtype=torch.bfloat16)
    shapes = {name: tuple(parameter.shape) for name, parameter in named_tensors(model).trained}
    kinds = ("fp32", "exp_avg", "exp_avg_sq")
    tensors = {
        f"{kind}/{name}": TensorSpec(shape=shape, dtype="F32") for name, shape in shapes.items() for kind in kinds
    }
    tensors |= {f"model/{name}": TensorSpec(shape=shape, dtype="BF16") for name, shape in shapes.items()}
    return StateDescription(
        tensors=tensors, optimizer_step=STEP, groups=({"lr": 1e-5}, {"lr": 1e-5}),
        group_of={name: int(len(shape) < 2) for name, shape in shapes.items()},
    )  # fmt: skip


def meta() -> Any:
    """Return the training loop's part of a checkpoint."""
    from ray_ulysses.checkpoint import CheckpointMeta

    return CheckpointMeta(sp_size=8, cursor={"next_row": 6400}, digest="00ff", tokens=10**9, metrics={"loss": 2.0})


def record_of_rank(state: Any, world_size: int, rank: int, head: bytes | None = None) -> tuple[Any, bytes]:
    """Return the record that a rank sends to rank 0 after it has written its shard, and the shard's header.

    With ``head``, the header is not made: it takes most of the time, and other ranks' headers are about as long.
    """
    import torch

    from ray_ulysses.checkpoint.checksums import checksum, table_bytes
    from ray_ulysses.checkpoint.intervals import Interval, partition
    from ray_ulysses.checkpoint.shard_table import record_of
    from ray_ulysses.checkpoint.shards import ShardEntry, place_intervals, shard_layout
    from ray_ulysses.run_names import shard_file

    dtypes = {"F32": torch.float32, "BF16": torch.bfloat16}
    held = []
    for key, spec in state.tensors.items():
        start, stop = partition(spec.num_elements, world_size, rank)
        if start < stop:
            held.append((key, start, stop - start, dtypes[spec.dtype]))
    if head is None:
        head, intervals = shard_layout(tuple(held))
    else:
        sizes = [(Interval(key, start, start + count), count * dtype.itemsize) for key, start, count, dtype in held]
        intervals = place_intervals(sizes, len(head))
    num_bytes = len(head) + sum(one.num_bytes for one in intervals) + table_bytes(one.num_bytes for one in intervals)
    entry = ShardEntry(
        file=shard_file(ATTEMPT, rank, world_size), num_bytes=num_bytes, header_bytes=len(head),
        header_sum=checksum(head), sums_sum=rank, intervals=intervals,
    )  # fmt: skip
    return record_of(entry, state.tensors, world_size, rank), head


@contextmanager
def longest_hold() -> Iterator[list[float]]:
    """Yield a list that receives the longest time for which a thread of the block kept the interpreter's lock.

    A second thread asks for the lock every millisecond. Its longest wait is counted in CPU time of the process, which
    other processes of the machine do not lengthen.
    """
    longest, done = [0.0], threading.Event()

    def sample() -> None:
        last = time.process_time()
        while not done.is_set():
            time.sleep(0.001)
            now = time.process_time()
            longest[0], last = max(longest[0], now - last), now

    thread = threading.Thread(target=sample)
    thread.start()
    time.sleep(0.05)
    longest[0] = 0.0
    try:
        yield longest
    finally:
        done.set()
        thread.join()


def write(folder: str, world_size: int) -> dict[str, Any]:
    """Measure what rank 0 does once all ranks have written their shards, and store the manifest."""
    import pickle

    from ray_ulysses.checkpoint import Manifest
    from ray_ulysses.checkpoint.shard_table import ShardTable
    from ray_ulysses.run_names import manifest_key
    from ray_ulysses.storage import LocalStore

    state = state_of_70b()
    with measured() as of_ranks:
        _, head = record_of_rank(state, world_size, 0)
    records = [record_of_rank(state, world_size, rank, head)[0] for rank in range(world_size)]
    with measured() as used:
        table = ShardTable(state.tensors, world_size, records)
        manifest = Manifest(step=STEP, attempt=ATTEMPT, world_size=world_size, meta=meta(), state=state, shards=table)
        table.validate()
        manifest.shards.check_cover()
        content = manifest.to_bytes()
    with longest_hold() as held:
        for _ in range(3):
            table.validate()
            manifest.shards.check_cover()
            manifest.to_bytes()
    LocalStore(Path(folder)).create(manifest_key(STEP), [content])
    return {
        "intervals": sum(len(shard.intervals) for shard in manifest.shards),
        "tensors": len(state.tensors),
        "manifest_bytes": len(content),
        "gathered_bytes": sum(len(pickle.dumps((one, 2**63, None))) for one in records),
        "rank_cpu_s": of_ranks["cpu_s"],
        "write_cpu_s": used["cpu_s"],
        "write_grown_bytes": used["grown_bytes"],
        "hold_s": held[0],
    }


def read(folder: str, world_size: int, new_world_size: int) -> dict[str, Any]:
    """Measure one rank of a resume: read and validate the manifest, check its cover, and plan the rank's reads."""
    from ray_ulysses.checkpoint.intervals import Interval, partition
    from ray_ulysses.checkpoint.load import _share_of, plan_load
    from ray_ulysses.checkpoint.manifest import read_manifest
    from ray_ulysses.storage import LocalStore

    store = LocalStore(Path(folder))
    with measured() as reading:
        manifest = read_manifest(store, STEP)
        manifest.shards.check_cover()
    plans = []
    for rank in (0, new_world_size // 2, new_world_size - 1):
        wanted = [
            Interval(key, *partition(spec.num_elements, new_world_size, rank))
            for key, spec in manifest.state.tensors.items()
            if not key.startswith("model/")
        ]
        with measured() as planning:
            batches = plan_load(manifest.shards, wanted)
            # The weights in the model's precision are not loaded, but all ranks together verify them.
            rest = frozenset(key for key in manifest.state.tensors if key.startswith("model/"))
            verified = _share_of(manifest.shards, rest, rank, new_world_size)
        wanted_bytes = sum(4 * (want.stop - want.start) for want in wanted)
        plans.append(
            {
                "cpu_s": planning["cpu_s"], "peak_bytes": planning["peak_bytes"], "requests": len(batches),
                "shards": len({batch.shard.file for batch in batches}),
                "read_bytes": sum(batch.num_bytes for batch in batches), "wanted_bytes": wanted_bytes,
                "verified_bytes": sum(batch.num_bytes for batch in verified),
            }
        )  # fmt: skip
    slowest = max(plans, key=lambda one: one["cpu_s"])
    return {
        **slowest,
        "read_cpu_s": reading["cpu_s"],
        "total_cpu_s": reading["cpu_s"] + slowest["cpu_s"],
        "peak_bytes": max(reading["peak_bytes"], *(one["peak_bytes"] for one in plans)),
    }


@contextmanager
def counted_requests(counts: Counter[str], sizes: Mapping[str, int]) -> Iterator[None]:
    """Count the requests that `obstore` sends in the block; a listing counts as one request per page.

    Listings show the given sizes of shards, since the stored ones are a byte long.
    """
    import obstore

    real: dict[str, Callable[..., Any]] = {
        name: getattr(obstore, name) for name in ("head", "get", "put", "delete", "list", "list_with_delimiter")
    }

    def counting(name: str) -> Callable[..., Any]:
        def call(client: Any, *arguments: Any, **options: Any) -> Any:
            if name == "list":
                found = list(real[name](client, *arguments, **options))
                counts["list"] += max(-(-sum(map(len, found)) // PAGE_KEYS), 1)
                return (
                    [{**one, "size": sizes.get(_file(one["path"]), one["size"])} for one in batch] for batch in found
                )
            found = real[name](client, *arguments, **options)
            if name == "list_with_delimiter":
                counts["list"] += max(-(-(len(found["objects"]) + len(found["common_prefixes"])) // PAGE_KEYS), 1)
            else:
                counts[name] += 1
            return found

        return call

    for name in real:
        setattr(obstore, name, counting(name))
    try:
        yield
    finally:
        for name, function in real.items():
            setattr(obstore, name, function)


def requests(manifest_folder: str, world_size: int, num_steps: int) -> dict[str, Any]:
    """Count rank 0's requests to an object store with many checkpoints: per resume, retention pass and commit."""
    from dataclasses import replace

    import obstore
    from obstore.store import MemoryStore

    from ray_ulysses.checkpoint import KeepRules, Retention, newest_committed
    from ray_ulysses.checkpoint.choice import committed_steps
    from ray_ulysses.checkpoint.manifest import CheckpointRef, read_manifest
    from ray_ulysses.checkpoint.save import _commit
    from ray_ulysses.run.checkpoint_store import found_fields
    from ray_ulysses.run_names import claim_key, step_folder
    from ray_ulysses.storage import LocalStore
    from ray_ulysses.storage.location import parse_location
    from ray_ulysses.storage.object_store import ObjectStore

    store = ObjectStore(parse_location("s3://bucket/run?region=us-east-1"))  # type: ignore[arg-type]
    client = MemoryStore()
    store.__dict__["_client"] = client
    manifest = read_manifest(LocalStore(Path(manifest_folder)), STEP)

    def shards(step: int) -> None:
        for shard in manifest.shards.records:
            obstore.put(client, f"{step_folder(step)}/{shard.file}", b"-")

    obstore.put(client, claim_key(ATTEMPT), b"{}")
    steps = [STEP * number for number in range(1, num_steps + 1)]
    for step in steps:
        shards(step)
        assert _commit(store, replace(manifest, step=step)).problem is None
    found: dict[str, Any] = {"ranks": world_size, "steps": num_steps}

    def count(name: str, call: Callable[[], object]) -> None:
        counts: Counter[str] = Counter()
        with counted_requests(counts, {shard.file: shard.bytes for shard in manifest.shards.records}):
            call()
        found[name] = dict(counts)

    def resume() -> None:
        chosen = newest_committed(store, "sizes")
        assert chosen.manifest is not None and chosen.manifest.step == steps[-1]

    count("resume", resume)
    count("found", lambda: found_fields(store))
    refs = [CheckpointRef(step=steps[-1] + more, attempt=ATTEMPT, world_size=world_size) for more in (1, 2, 3)]
    # The first pass keeps everything, and later ones delete one step each.
    keep = KeepRules(last=10**6)
    retention = Retention(store, KeepRules(last=1, every_steps=STEP))
    for ref in refs:
        shards(ref.step)
        count("commit", partial(_commit, store, replace(manifest, step=ref.step)))
        if ref is refs[0]:
            count("first_pass", partial(Retention(store, keep).apply, ref))
            retention.apply(ref)
        else:
            count("pass", partial(retention.apply, ref))
    assert [step for step in committed_steps(store) if step % STEP] == [refs[-1].step]
    return found


def all_requests(manifest_folder: str, world_size: int, steps: Sequence[int]) -> list[dict[str, Any]]:
    """Count the requests with each number of stored checkpoints."""
    return [requests(manifest_folder, world_size, num_steps) for num_steps in steps]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure each size in fresh processes."""
    record: dict[str, Any] = {"writes": [], "reads": [], "requests": []}
    with tempfile.TemporaryDirectory(prefix="scale-checkpoints-") as folder:
        for world_size in options.ranks:
            place = f"{folder}/{world_size}"
            Path(place).mkdir()
            record["writes"].append({"ranks": world_size, **fresh(write, place, world_size)})
            say(f"{world_size} ranks: a manifest of {record['writes'][-1]['manifest_bytes'] / MIB:.2f} MiB")
        for world_size in options.ranks:
            for new in _new_worlds(world_size):
                found = fresh(read, f"{folder}/{world_size}", world_size, new)
                record["reads"].append({"ranks": world_size, "new": new, **found})
                say(f"{world_size} to {new}: {found['total_cpu_s']:.2f} s, {found['peak_bytes'] / MIB:.0f} MiB")
        for world_size in options.ranks:
            record["requests"] += fresh(all_requests, f"{folder}/{world_size}", world_size, options.steps)
    return record


def _file(key: str) -> str:
    return "/".join(key.split("/")[-2:])


def _new_worlds(world_size: int) -> list[int]:
    """Return the numbers of ranks on which a checkpoint is resumed."""
    return [world_size, *{1024: [768], 256: [1024], 4: [2]}.get(world_size, [])]


def _requests(counts: Mapping[str, int]) -> str:
    return f"{sum(counts.values()):,} ({', '.join(f'{count} {name}' for name, count in sorted(counts.items()))})"


def page(record: Record) -> str:
    """Return the page."""
    writes, reads = record["writes"], record["reads"]
    same = [one for one in reads if one["ranks"] == one["new"]]
    worst = max(reads, key=lambda one: one["total_cpu_s"])
    text = (
        f"The state of Llama-3-70B with Adam under ZeRO-3: {writes[0]['tensors']:,} tensors (fp32 weights, two "
        "moments, bf16 weights), each cut into one interval per rank. The tensors are the architecture's; there are "
        "no data. **Real**: the partition's arithmetic, the header of the first shard, the manifest, its validation, "
        "the choice, the read plans, and retention. **Not real**: the shards' contents, the headers of the other "
        "shards (the first one's size stands for them), and the ranks, which run one after another. Times are CPU "
        "seconds on one core; memory is a fresh process's peak, Python and torch (about 0.25 GiB) included."
    )
    is_planned = worst["total_cpu_s"] <= GOAL_PLAN_S and max(one["peak_bytes"] for one in reads) <= GOAL_MEMORY_BYTES
    goals = (
        f"Goals: one rank reads the manifest and plans its reads in {GOAL_PLAN_S:.0f} s and 2 GiB, also on another "
        f"number of ranks: {met(is_planned)}. Writing the manifest holds the interpreter's lock for at most "
        f"{GOAL_HOLD_S * 1000:.0f} ms at a time: {met(max(one['hold_s'] for one in writes) <= GOAL_HOLD_S)}."
    )
    before = (
        "At commit 3a5a1bd2 the manifest listed every interval. At 1,024 ranks it had 189 MiB; rank 0 gathered about "
        "as much from the other ranks; reading took 10.5 s and planning 4.8 s, with a peak of 2.1 GiB (at 256 ranks: "
        "47 MiB, 3.1 s and 1.2 s). Now one row of a shard's entry stands for all of its even shares."
    )
    written = columns(
        writes,
        ranks=lambda one: f"{one['ranks']:,}",
        intervals=lambda one: f"{one['intervals']:,}",
        manifest=lambda one: f"{one['manifest_bytes'] / MIB:.2f} MiB",
        gathered_by_rank_0=lambda one: f"{one['gathered_bytes'] / MIB:.2f} MiB",
        each_rank=lambda one: f"{one['rank_cpu_s'] * 1000:.0f} ms",
        check_and_serialize=lambda one: f"{one['write_cpu_s']:.3f} s",
        more_memory=lambda one: f"{one['write_grown_bytes'] / MIB:.0f} MiB",
        lock_held=lambda one: f"{one['hold_s'] * 1000:.0f} ms",
    )
    planned = columns(
        reads,
        saved_on=lambda one: f"{one['ranks']:,}",
        resumed_on=lambda one: f"{one['new']:,}",
        manifest=lambda one: f"{one['read_cpu_s']:.2f} s",
        plan_of_one_rank=lambda one: f"{one['cpu_s']:.2f} s",
        together=lambda one: f"{one['total_cpu_s']:.2f} s",
        peak=lambda one: f"{one['peak_bytes'] / MIB:,.0f} MiB",
        shards_read=lambda one: str(one["shards"]),
        reads=lambda one: f"{one['requests']:,}",
        bytes_beyond_need=lambda one: f"{one['read_bytes'] / one['wanted_bytes'] - 1:.1%}",
    )
    asked = columns(
        record["requests"],
        ranks=lambda one: f"{one['ranks']:,}",
        stored_steps=lambda one: str(one["steps"]),
        commit=lambda one: _requests(one["commit"]),
        choose_the_newest=lambda one: _requests(one["resume"]),
        describe_it=lambda one: _requests(one["found"]),
        retention_in_a_new_process=lambda one: _requests(one["first_pass"]),
        later_pass=lambda one: _requests(one["pass"]),
    )
    sloped = f"Slopes over the ranks: {_slopes(writes, same)}." if len(writes) > 1 else ""
    asking = (
        "Requests of rank 0 to an object store with the given number of checkpoints, counted at the client "
        f"(obstore's store in memory; a listing is one request per {PAGE_KEYS:,} keys). The shards' own bytes are not "
        "counted. **describe it**: finds the fields of the event that reports the newest checkpoint."
    )
    title = "Checkpoints of 70B on 64 to 1,024 ranks"
    parts = [header(title, record, text), goals, before, "## Writing", written, "## Resuming", planned, sloped]
    return "\n\n".join([*parts, "## Requests", asking, asked])


def _slopes(writes: Sequence[Record], reads: Sequence[Record]) -> str:
    figures = {
        "manifest": [one["manifest_bytes"] for one in writes],
        "serializing": [one["write_cpu_s"] for one in writes],
        "reading": [one["read_cpu_s"] for one in reads],
        "planning": [one["cpu_s"] for one in reads],
    }
    ranks = [one["ranks"] for one in writes]
    return ", ".join(f"{name} {slope(ranks, values):.2f}" for name, values in figures.items())


BENCHMARK = Benchmark(
    name="scale_checkpoints",
    about="Manifest, choice, read plans and requests of checkpoints of 70B on up to 1,024 ranks.",
    measure=measure,
    page=page,
    packages=("torch", "transformers", "numpy", "obstore"),
    hardware="one of them used",
    options={
        "ranks": ([64, 256, 768, 1024], "numbers of ranks"),
        "steps": ([10, 40], "stored checkpoints when requests are counted"),
    },
    quick={"ranks": [4], "steps": [2]},
)

if __name__ == "__main__":
    runner.main(BENCHMARK)
