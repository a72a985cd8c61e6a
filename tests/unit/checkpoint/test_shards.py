from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from ray_ulysses.checkpoint import load_parts, newest_committed, read_manifest
from ray_ulysses.checkpoint.shards import ShardEntry, find_damage, verified_chunks, write_shard
from ray_ulysses.checkpoint.state import TensorPart
from ray_ulysses.storage import LocalStore
from tests.stores import HookedStore, MemoryFile, MemoryStore
from tests.unit.checkpoint.fakes import TENSORS, save, shard_of
from tests.unit.storage.short_reads import read_little

PARTS = (
    TensorPart(key="fp32/a", start=3, tensor=torch.arange(5, dtype=torch.float32)),
    TensorPart(key="frozen/b", start=0, tensor=torch.arange(3, dtype=torch.bfloat16)),
    TensorPart(key="exp_avg/empty", start=9, tensor=torch.zeros(0)),
    TensorPart(key="buffer/flag", start=0, tensor=torch.tensor([True, False, True])),
)


def _write(tmp_path: Path) -> tuple[LocalStore, ShardEntry]:
    store = LocalStore(tmp_path)
    return store, write_shard(store, "checkpoints/step-00000001", "attempt-0001/s.safetensors", PARTS)


def test_a_shard_is_a_safetensors_file(tmp_path: Path) -> None:
    store, entry = _write(tmp_path)
    path = store.path(f"checkpoints/step-00000001/{entry.file}")
    with safe_open(path, framework="pt") as shard:
        assert sorted(shard.keys()) == ["block_sums", "buffer/flag", "fp32/a", "frozen/b"]
        for part in PARTS:
            if part.tensor.numel():
                assert torch.equal(shard.get_tensor(part.key), part.tensor)
        assert json.loads(shard.metadata()["starts"])["fp32/a"] == 3
    assert entry.num_bytes == path.stat().st_size


def test_shards_that_differ_in_one_thing_only_each_have_their_own_header(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    ones = torch.ones(4)
    more = [("x", 0, ones.int()), ("x", 8, ones), ("y", 0, ones), ("x", 0, torch.arange(100.0).narrow(0, 7, 3))]
    parts = [TensorPart(key=key, start=start, tensor=tensor) for key, start, tensor in (("x", 0, ones), *more)]
    for _ in range(2):
        for number, part in enumerate(parts):
            entry = write_shard(store, f"c{number}", "s", [part, TensorPart(key="z", start=0, tensor=ones)])
            assert entry.intervals[0].interval == part.interval and entry.intervals[0].num_bytes == part.tensor.nbytes
            with safe_open(store.path(f"c{number}/s"), framework="pt") as shard:
                found = shard.get_tensor(part.key)
                assert found.dtype == part.tensor.dtype and torch.equal(found, part.tensor)
                assert json.loads(shard.metadata()["starts"]) == {part.key: part.start, "z": 0}
            store.delete(f"c{number}")


def test_a_flip_of_any_byte_is_found(tmp_path: Path) -> None:
    store, entry = _write(tmp_path)
    folder = "checkpoints/step-00000001"
    path = store.path(f"{folder}/{entry.file}")
    whole = path.read_bytes()
    assert find_damage(store, folder, entry, read_content=True) is None
    for position in range(len(whole)):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        reason = find_damage(store, folder, entry, read_content=True)
        assert reason is not None and "checksum" in reason, f"flip of byte {position} was not found"


@pytest.mark.parametrize("read_content", [True, False])
def test_a_short_long_or_missing_file_is_found(tmp_path: Path, read_content: bool) -> None:
    store, entry = _write(tmp_path)
    path = store.path(f"checkpoints/step-00000001/{entry.file}")
    whole = path.read_bytes()
    for content in (b"", whole[:-1], whole + b"x", None):
        path.write_bytes(content or b"")
        wanted = f"has {len(content)} bytes instead of" if content is not None else "is missing"
        if content is None:
            path.unlink()
        assert wanted in str(find_damage(store, "checkpoints/step-00000001", entry, read_content=read_content))


def test_a_checkpoint_is_whole_however_little_its_storage_gives_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = LocalStore(tmp_path)
    save(short, 20)
    read_little(monkeypatch, 7)
    manifest = read_manifest(short, 20)
    for shard in manifest.shards:
        assert shard.num_bytes > 400 and shard.header_bytes > 200
        assert find_damage(short, "checkpoints/step-00000020", shard, read_content=True) is None
        assert sum(verified_chunks(short, "checkpoints/step-00000020", shard)) == shard.num_bytes
    chosen = newest_committed(short)
    assert chosen.damaged == () and chosen.manifest == manifest
    parts = [replace(part, tensor=torch.zeros_like(part.tensor)) for part in shard_of(TENSORS, 0, 1).parts]
    load_parts(short, manifest, parts)
    assert all(torch.equal(part.tensor, TENSORS[part.key]) for part in parts)


def test_a_file_that_ends_while_it_is_read_is_damage_and_no_endless_loop() -> None:
    store = MemoryStore()
    entry = write_shard(store, "c", "s", PARTS)

    class EndsEarly(HookedStore):
        def open(self, key: str) -> MemoryFile:
            content = self.inner.read_whole(key)
            file = MemoryFile(content[: len(content) // 2])
            file.size = len(content)
            return file

    damage = find_damage(EndsEarly(store), "c", entry, read_content=True)
    assert damage is not None
