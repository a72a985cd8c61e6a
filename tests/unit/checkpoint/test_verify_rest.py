from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ray_ulysses.checkpoint import DamagedCheckpointError, Manifest, load_parts, read_manifest
from ray_ulysses.checkpoint.load import verify_rest
from ray_ulysses.storage import LocalStore
from tests.unit.checkpoint.fakes import ThreadExchange, on_ranks, save, shard_of

TENSORS = {
    **{f"fp32/{number}": torch.arange(3000.0) + number for number in range(4)},
    **{f"model/{number}": torch.arange(300_000).to(torch.bfloat16) for number in range(8)},
}
REST_BYTES = 8 * 300_000 * 2


@pytest.fixture
def saved(tmp_path: Path) -> tuple[LocalStore, Manifest]:
    store = LocalStore(tmp_path)
    save(store, 10, world_size=8, tensors=TENSORS)
    return store, read_manifest(store, 10)


def _loaded(rank: int, world_size: int, *, by_key: bool) -> dict[str, torch.Tensor]:
    # ZeRO-3 assigns each rank a part of every tensor, ZeRO-1 some complete tensors.
    wanted = {key: tensor for key, tensor in TENSORS.items() if key.startswith("fp32/")}
    if not by_key:
        return wanted
    return {key: wanted[key] for number, key in enumerate(wanted) if number % world_size == rank}


def _resume(saved: tuple[LocalStore, Manifest], world_size: int, *, by_key: bool) -> list[Any]:
    store, manifest = saved

    def call(rank: int, messenger: ThreadExchange) -> int:
        wanted = _loaded(rank, world_size, by_key=by_key)
        share = (0, 1) if by_key else (rank, world_size)
        parts = shard_of(wanted, *share).parts
        load_parts(store, manifest, parts, messenger)
        keys = {part.key for part in parts}
        return verify_rest(store, manifest, keys, rank=rank, world_size=world_size, messenger=messenger)

    return on_ranks(world_size, call)


@pytest.mark.parametrize("by_key", [False, True], ids=["parts of all", "some whole"])
@pytest.mark.parametrize("world_size", [1, 3, 8, 16])
def test_the_rest_is_read_once_and_shared(saved: tuple[LocalStore, Manifest], world_size: int, by_key: bool) -> None:
    read = _resume(saved, world_size, by_key=by_key)
    _, manifest = saved
    headers = sum(shard.header_bytes for shard in manifest.shards)
    assert sum(read) == REST_BYTES + headers
    # Each about its share: a batch is one shard's part at most.
    assert max(read) <= REST_BYTES / world_size + REST_BYTES / 8 + headers


@pytest.mark.parametrize(
    ("world_size", "shard", "where"), [(1, 0, "model/0"), (4, 3, "model/7"), (16, 7, "model/0"), (4, 7, None)]
)
def test_damage_in_what_nobody_loads_is_found_by_all(
    saved: tuple[LocalStore, Manifest], world_size: int, shard: int, where: str | None
) -> None:
    store, manifest = saved
    entry = manifest.shards[shard]
    offset = next((one.offset for one in entry.intervals if one.interval.key == where), 20)
    path = store.path(f"checkpoints/step-00000010/{entry.file}")
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)
    errors = _resume(saved, world_size, by_key=True)
    assert len(errors) == world_size
    for error in errors:
        assert isinstance(error, DamagedCheckpointError)
        assert entry.file in str(error) and (where or "header") in str(error)
