from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ray_ulysses.checkpoint import DamagedCheckpointError, TensorPart, load_parts, read_manifest
from ray_ulysses.checkpoint.checksums import BLOCK_BYTES, table_bytes
from ray_ulysses.checkpoint.intervals import partition
from ray_ulysses.storage import LocalStore
from tests.stores import CountingStore
from tests.unit.checkpoint.fakes import save

ELEMENTS = 5 * 2**20 + 77
BIG = {
    "fp32/a": torch.arange(ELEMENTS, dtype=torch.float32),
    "frozen/b": torch.arange(3 * 2**16 + 5, dtype=torch.int64).to(torch.bfloat16),
    "fp32/small": torch.ones(3),
    "exp_avg/a": torch.arange(ELEMENTS, dtype=torch.float32) * 2,
}


def _wanted(world_size: int, rank: int) -> list[TensorPart]:
    parts = []
    for key, tensor in BIG.items():
        start, stop = partition(tensor.numel(), world_size, rank)
        parts.append(TensorPart(key=key, start=start, tensor=torch.full((stop - start,), 7, dtype=tensor.dtype)))
    return parts


@pytest.mark.parametrize(("saved", "loaded"), [(3, 3), (4, 2), (3, 2), (1, 5)])
def test_bytes_read_are_bytes_needed_but_for_cut_blocks(tmp_path: Path, saved: int, loaded: int) -> None:
    save(LocalStore(tmp_path), 10, world_size=saved, tensors=BIG)
    for rank in range(loaded):
        store = CountingStore(LocalStore(tmp_path))
        manifest = read_manifest(store, 10)
        manifest_bytes = store.bytes_read
        parts = _wanted(loaded, rank)
        num_bytes = load_parts(store, manifest, parts)
        for part in parts:
            whole = BIG[part.key]
            assert torch.equal(part.tensor, whole[part.start : part.start + part.tensor.numel()]), part.key
        assert num_bytes == store.bytes_read - manifest_bytes
        needed = sum(part.tensor.numel() * part.tensor.element_size() for part in parts)
        tables = sum(table_bytes(one.num_bytes for one in shard.intervals) for shard in manifest.shards)
        cuts = 2 * len(parts) * BLOCK_BYTES
        assert needed <= num_bytes <= needed + tables + cuts
        if loaded == saved:
            # No interval is cut: nothing but the table is read beside it.
            assert num_bytes <= needed + tables


def test_a_flip_in_a_part_that_is_read_is_found_and_one_beside_it_is_not_read(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    save(store, 10, world_size=1, tensors=BIG)
    manifest = read_manifest(store, 10)
    path = store.path(f"checkpoints/step-00000010/{manifest.shards[0].file}")
    stored = manifest.shards[0].intervals[0]
    position = stored.offset + 40 * BLOCK_BYTES + 11
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 4]))
    half = 20 * BLOCK_BYTES // 4
    load_parts(store, manifest, [TensorPart(key="fp32/a", start=0, tensor=torch.zeros(half))])
    first = stored.offset + 40 * BLOCK_BYTES
    wanted = TensorPart(key="fp32/a", start=half, tensor=torch.zeros(half * 2))
    with pytest.raises(DamagedCheckpointError, match=f"fp32/a is wrong .bytes {first} to {first + BLOCK_BYTES - 1}"):
        load_parts(store, manifest, [wanted])
