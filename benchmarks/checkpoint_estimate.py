"""What a checkpoint of an 8B model at 64 ranks comes to: sizes that are exact, times that rest on assumed speeds.

Its manifest is really made, encoded, read back, checked and planned from, on one core of this machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.stored_result import table
from ray_ulysses.checkpoint import CheckpointMeta, Manifest, StateDescription, TensorSpec
from ray_ulysses.checkpoint.checksums import table_bytes
from ray_ulysses.checkpoint.intervals import Interval, check_cover, partition, plan_reads
from ray_ulysses.checkpoint.load import plan_batches
from ray_ulysses.checkpoint.shards import ShardEntry, place_intervals
from ray_ulysses.run_names import shard_file

WORLD_SIZE, RANKS_A_NODE = 64, 8
STEP_S = 10.0
PCIE_BYTES_S = 25e9
"""Assumed, a GPU: pinned copies to the host over PCIe 4 x16."""
STORAGE_BYTES_S = 2e9
"""Assumed, a node: durable writes and reads of shared storage."""
HEADER_BYTES = 2**16
FP32_KINDS = ("fp32", "exp_avg", "exp_avg_sq")


def llama_8b() -> dict[str, tuple[int, ...]]:
    """Return the parameters of Llama 3 8B (https://huggingface.co/meta-llama/Meta-Llama-3-8B): names and shapes."""
    hidden, inner, kv, vocab, layers = 4096, 14_336, 1024, 128_256, 32
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for number in range(layers):
        layer = f"model.layers.{number}"
        attention = {"q": (hidden, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, hidden)}
        shapes |= {f"{layer}.self_attn.{name}_proj.weight": shape for name, shape in attention.items()}
        mlp = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
        shapes |= {f"{layer}.mlp.{name}_proj.weight": shape for name, shape in mlp.items()}
        shapes |= {f"{layer}.{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}


def estimate() -> dict[str, Any]:
    """Return sizes, measured times of the manifest, and what the assumed speeds make of them."""
    manifest = large_manifest(llama_8b(), WORLD_SIZE)
    num_parameters = sum(spec.num_elements for key, spec in manifest.state.tensors.items() if key.startswith("fp32/"))
    rank_bytes = max(shard.num_bytes for shard in manifest.shards)
    loaded = _wanted(manifest, WORLD_SIZE // 2)
    read_bytes = sum(_bytes(manifest, interval) for interval in loaded)
    seconds, num_batches, manifest_bytes = _times(manifest, loaded)
    return {
        "world_size": WORLD_SIZE,
        "ranks_a_node": RANKS_A_NODE,
        "step_s": STEP_S,
        "pcie_bytes_s": PCIE_BYTES_S,
        "storage_bytes_s": STORAGE_BYTES_S,
        "num_parameters": num_parameters,
        "num_tensors": len(manifest.state.tensors),
        "num_intervals": sum(len(shard.intervals) for shard in manifest.shards),
        "rank_bytes": rank_bytes,
        "sums_bytes": max(shard.num_bytes - shard.sums_offset for shard in manifest.shards),
        "manifest_bytes": manifest_bytes,
        "manifest_s": seconds,
        "num_batches": num_batches,
        "read_bytes": read_bytes,
        "staging_s": rank_bytes / PCIE_BYTES_S,
        # Each byte is written and read back.
        "save_s": 2 * rank_bytes * RANKS_A_NODE / STORAGE_BYTES_S,
        "load_s": read_bytes * RANKS_A_NODE / STORAGE_BYTES_S,
        # DeepSpeed's load reads each file whole on each rank; its conversion reads and writes everything twice.
        "theirs_read_bytes": 12 * num_parameters,
        "theirs_conversion_bytes": 4 * 12 * num_parameters,
    }


def large_manifest(shapes: dict[str, tuple[int, ...]], world_size: int) -> Manifest:
    """Return the manifest of a model trained in bf16 by ZeRO-3."""
    tensors = {
        f"{kind}/{name}": TensorSpec(shape=shape, dtype="F32") for kind in FP32_KINDS for name, shape in shapes.items()
    }
    tensors |= {f"model/{name}": TensorSpec(shape=shape, dtype="BF16") for name, shape in shapes.items()}
    groups = ({"lr": 1e-5, "weight_decay": 0.1}, {"lr": 1e-5, "weight_decay": 0.0})
    state = StateDescription(
        tensors=tensors,
        optimizer_step=1000,
        groups=groups,
        group_of={name: int(len(s) < 2) for name, s in shapes.items()},
    )
    return Manifest(
        step=1000,
        attempt=1,
        world_size=world_size,
        meta=CheckpointMeta(sp_size=8, cursor={"next_row": 0}, digest="0" * 16, tokens=0),
        state=state,
        shards=tuple(_shard(tensors, rank, world_size) for rank in range(world_size)),
    )


def _shard(tensors: dict[str, TensorSpec], rank: int, world_size: int) -> ShardEntry:
    sizes = []
    for key, spec in tensors.items():
        start, stop = partition(spec.num_elements, world_size, rank)
        if stop > start:
            sizes.append((Interval(key=key, start=start, stop=stop), (stop - start) * spec.item_bytes))
    data = sum(size for _, size in sizes)
    return ShardEntry(
        file=shard_file(1, rank, world_size),
        num_bytes=HEADER_BYTES + data + table_bytes(size for _, size in sizes),
        header_bytes=HEADER_BYTES,
        header_sum=2**63,
        sums_sum=2**63,
        intervals=place_intervals(sizes, HEADER_BYTES),
    )


def _wanted(manifest: Manifest, world_size: int) -> list[Interval]:
    """Return what the first rank of another world loads."""
    found = []
    for key, spec in manifest.state.tensors.items():
        if not key.startswith("model/"):
            start, stop = partition(spec.num_elements, world_size, 0)
            found.append(Interval(key=key, start=start, stop=stop))
    return found


def _bytes(manifest: Manifest, interval: Interval) -> int:
    return (interval.stop - interval.start) * manifest.state.tensors[interval.key].item_bytes


def _times(manifest: Manifest, wanted: list[Interval]) -> tuple[dict[str, float], int, int]:
    """Return how long this core takes for what is done with the manifest; batches of a load; its size."""
    seconds: dict[str, float] = {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = work()
        seconds[name] = time.perf_counter() - start
        return result

    content = timed("encode", manifest.to_bytes)
    read = timed("decode", lambda: Manifest.from_bytes(content))
    stored = [(shard, entry) for shard in read.shards for entry in shard.intervals]
    intervals = [entry.interval for _, entry in stored]
    sizes = {key: spec.num_elements for key, spec in read.state.tensors.items()}
    timed("check that nothing is missing", lambda: check_cover(sizes, intervals))
    reads = timed("plan a rank's reads", lambda: plan_reads(wanted, intervals))
    batches = timed("join them", lambda: plan_batches(reads, stored, [interval.start for interval in wanted]))
    return seconds, len(batches), len(content)


def estimate_text(found: Mapping[str, Any]) -> str:
    """Return the calculation for a large model."""
    share = found["staging_s"] / found["step_s"]
    node = found["ranks_a_node"]
    rows = [
        ["a rank writes", "calculated, exact", f"{found['rank_bytes'] / 1e9:.3f} GB, 14 bytes a parameter"],
        ["of it checksums", "calculated, exact", f"{found['sums_bytes'] / 1e6:.2f} MB"],
        ["manifest", "made, exact", f"{found['manifest_bytes'] / 1e6:.2f} MB, {found['num_intervals']:,} intervals"],
        *(
            [f"manifest: {name}", "measured, one core here", f"{seconds:.2f} s"]
            for name, seconds in found["manifest_s"].items()
        ),
        ["copy to the host", f"assumed {found['pcie_bytes_s'] / 1e9:.0f} GB/s a GPU", f"{found['staging_s']:.3f} s"],
        ["copy/step", f"assumed step of {found['step_s']:.0f} s", f"**{share:.2%}**, if nothing of it hides"],
        [
            "write and read back",
            f"assumed {found['storage_bytes_s'] / 1e9:.0f} GB/s a node of {node} ranks",
            f"{found['save_s']:.1f} s, behind the steps",
        ],
        [
            f"load at {found['world_size'] // 2} ranks: a rank reads",
            "calculated, exact",
            f"{found['read_bytes'] / 1e9:.3f} GB in {found['num_batches']:,} reads",
        ],
        ["load", f"assumed {found['storage_bytes_s'] / 1e9:.0f} GB/s a node", f"{found['load_s']:.1f} s"],
        [
            "theirs: a rank's load reads",
            "calculated from its code",
            f"{found['theirs_read_bytes'] / 1e9:.1f} GB: each rank each file whole",
        ],
        [
            "theirs: conversion reads and writes",
            "calculated from its code",
            f"at least {found['theirs_conversion_bytes'] / 1e9:.0f} GB, on one machine",
        ],
    ]
    text = (
        f"Llama 3 8B ({found['num_parameters']:,} parameters, {found['num_tensors']:,} stored tensors), bf16 with fp32 "
        f"master weights, ZeRO-3 on {found['world_size']} GPUs. Nothing here was run on GPUs or at this size but what "
        "says measured."
    )
    return f"{text}\n\n{table(('what', 'how it is known', 'value'), rows)}"
