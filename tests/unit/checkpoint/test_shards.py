"""Shards: ordinary safetensors files, streamed, with every byte under a checksum."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from ray_ulysses.checkpoint.shards import ShardEntry, find_damage, write_shard
from ray_ulysses.checkpoint.state import Piece
from ray_ulysses.storage import LocalStore

PIECES = (
    Piece(key="fp32/a", start=3, tensor=torch.arange(5, dtype=torch.float32)),
    Piece(key="frozen/b", start=0, tensor=torch.arange(3, dtype=torch.bfloat16)),
    Piece(key="exp_avg/empty", start=9, tensor=torch.zeros(0)),
    Piece(key="buffer/flag", start=0, tensor=torch.tensor([True, False, True])),
)


def _write(tmp_path: Path) -> tuple[LocalStore, ShardEntry]:
    store = LocalStore(tmp_path)
    return store, write_shard(store, "checkpoints/step-00000001", "attempt-0001/s.safetensors", PIECES)


def test_a_shard_is_a_safetensors_file(tmp_path: Path) -> None:
    store, entry = _write(tmp_path)
    path = store.path(f"checkpoints/step-00000001/{entry.file}")
    with safe_open(path, framework="pt") as shard:
        assert sorted(shard.keys()) == ["block_sums", "buffer/flag", "fp32/a", "frozen/b"]
        for piece in PIECES:
            if piece.tensor.numel():
                assert torch.equal(shard.get_tensor(piece.key), piece.tensor)
        assert json.loads(shard.metadata()["starts"])["fp32/a"] == 3
    assert entry.num_bytes == path.stat().st_size


def test_a_view_in_the_middle_of_a_larger_tensor_is_written_alone(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    flat = torch.arange(100, dtype=torch.float32)
    entry = write_shard(store, "c", "s", [Piece(key="x", start=0, tensor=flat.narrow(0, 7, 11))])
    assert entry.intervals[0].num_bytes == 44
    with safe_open(store.path("c/s"), framework="pt") as shard:
        assert torch.equal(shard.get_tensor("x"), flat[7:18])


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
    folder = "checkpoints/step-00000001"
    path = store.path(f"{folder}/{entry.file}")
    whole = path.read_bytes()
    for content in (b"", whole[:-1], whole + b"x"):
        path.write_bytes(content)
        assert f"has {len(content)} bytes instead of" in str(
            find_damage(store, folder, entry, read_content=read_content)
        )
    path.unlink()
    assert find_damage(store, folder, entry, read_content=read_content) == f"{entry.file} is missing"


def test_a_rank_without_pieces_still_has_a_shard(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    entry = write_shard(store, "c", "s", [])
    assert entry.intervals == ()
    assert find_damage(store, "c", entry, read_content=True) is None
