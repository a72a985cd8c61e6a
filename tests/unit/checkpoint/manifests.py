"""A manifest in which every field is used, and files that hold it with a change and a checksum that is right."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ray_ulysses.checkpoint import CheckpointMeta, Manifest, StateDescription, TensorSpec
from ray_ulysses.checkpoint.checksums import BLOCK_BYTES, table_bytes
from ray_ulysses.checkpoint.intervals import Interval, partition
from ray_ulysses.checkpoint.shard_table import ShardRecord, ShardTable, record_of
from ray_ulysses.checkpoint.shards import ShardEntry, place_intervals
from ray_ulysses.run_names import shard_file

STEP, ATTEMPT, WORLD_SIZE = 6, 3, 2
MOMENT = "exp_avg/layer.weight"
NUM_LARGE = BLOCK_BYTES  # elements; a rank's half of it has two blocks
TENSORS = {
    "fp32/layer.weight": TensorSpec(shape=(NUM_LARGE // 4, 4), dtype="F32"),
    "exp_avg/layer.weight": TensorSpec(shape=(NUM_LARGE // 4, 4), dtype="F32"),
    "fp32/norm": TensorSpec(shape=(), dtype="F32"),
    "model/norm": TensorSpec(shape=(), dtype="BF16"),
    "buffer/none": TensorSpec(shape=(0, 7), dtype="I64"),
}
META = CheckpointMeta(
    sp_size=2, cursor={"segment": 0, "plan_id": "ab", "next_row": 12}, digest="00000000000000ff", tokens=1200,
    config_fingerprint="f00d", versions={"torch": "2.13.0"}, metrics={"loss": 2.5, "eval_loss": math.inf},
    reason="steps", written_at=1_790_000_000.5, run="demo", extra={"journal": [1, {"line": 7}], "parent": None},
)  # fmt: skip
STATE = StateDescription(
    tensors=TENSORS, tied={"head.weight": "layer.weight"}, optimizer_step=6,
    groups=({"lr": 1e-5, "betas": [0.9, 0.95]}, {"lr": 1e-5, "amsgrad": False}),
    group_of={"layer.weight": 0, "norm": 1}, counters={"global_steps": 6, "skipped_steps": 0},
)  # fmt: skip


def shard_of_rank(rank: int) -> ShardRecord:
    sizes = []
    for key, spec in TENSORS.items():
        start, stop = partition(spec.num_elements, WORLD_SIZE, rank)
        if key == MOMENT:
            start, stop = (0, 4) if rank == 0 else (4, NUM_LARGE)
        if stop > start:
            sizes.append((Interval(key=key, start=start, stop=stop), (stop - start) * spec.item_bytes))
    entry = ShardEntry(
        file=shard_file(ATTEMPT, rank, WORLD_SIZE),
        num_bytes=512 + sum(size for _, size in sizes) + table_bytes(size for _, size in sizes),
        header_bytes=512,
        header_sum=2**64 - 1,
        sums_sum=0,
        intervals=place_intervals(sizes, 512),
    )
    return record_of(entry, TENSORS, WORLD_SIZE, rank)


MANIFEST = Manifest(
    step=STEP, attempt=ATTEMPT, world_size=WORLD_SIZE, meta=META, state=STATE,
    shards=ShardTable(TENSORS, WORLD_SIZE, [shard_of_rank(rank) for rank in range(WORLD_SIZE)]),
)  # fmt: skip


def tree() -> dict[str, Any]:
    """Return what the file of `MANIFEST` holds, without its checksum."""
    values: dict[str, Any] = json.loads(MANIFEST.to_bytes())
    del values["crc32"]
    return values


def signed(content: Mapping[str, Any]) -> bytes:
    """Return a file that holds this, less a checksum that it has, under the right checksum."""
    text = json.dumps({name: value for name, value in content.items() if name != "crc32"})
    return f'{{"crc32":{zlib.crc32(text.encode())},{text[1:]}\n'.encode()


def changed(path: tuple[Any, ...], change: Callable[[Any, Any], object]) -> dict[str, Any]:
    """Return the tree with a change at a path: `change` gets what holds the last key, and the key."""
    values = tree()
    holder: Any = values
    for key in path[:-1]:
        holder = holder[key]
    change(holder, path[-1])
    return values


def replaced(path: tuple[Any, ...], value: object) -> dict[str, Any]:
    return changed(path, lambda holder, key: holder.__setitem__(key, value))


def removed(path: tuple[Any, ...]) -> dict[str, Any]:
    return changed(path, lambda holder, key: holder.__delitem__(key))


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of everything in a tree."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in items:
        yield from paths(child, (*path, key))


PATHS = tuple(paths(tree()))
