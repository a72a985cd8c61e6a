from __future__ import annotations

import contextlib
import json
import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from ray_ulysses.checkpoint import (
    CheckpointError,
    CheckpointRef,
    DamagedCheckpointError,
    Manifest,
    load_parts,
    newest_committed,
    read_manifest,
    save_checkpoint,
)
from ray_ulysses.checkpoint.checksums import BLOCK_BYTES, table_bytes
from ray_ulysses.checkpoint.choice import committed_steps
from ray_ulysses.checkpoint.load import verify_rest
from ray_ulysses.checkpoint.shards import ShardEntry, find_damage, verified_chunks, write_shard
from ray_ulysses.checkpoint.state import TensorPart
from ray_ulysses.storage import LocalStore
from tests.stores import CountingStore, FaultyStore, HookedStore, MemoryFile, MemoryStore
from tests.unit.checkpoint.fakes import META, TENSORS, ThreadExchange, blank_of, on_ranks, save, shard_of
from tests.unit.fake_cuda import FakeCuda
from tests.unit.storage.conftest import read_little


def _flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def _loaded(store: LocalStore, step: int, world_size: int) -> dict[str, torch.Tensor]:
    manifest = read_manifest(store, step)
    loaded: dict[str, list[torch.Tensor]] = {key: [] for key in TENSORS}
    for rank in range(world_size):
        parts = blank_of(TENSORS, rank, world_size)
        load_parts(store, manifest, parts)
        for part in parts:
            loaded[part.key].append(part.tensor)
    return {key: torch.cat(tensors) for key, tensors in loaded.items()}


@pytest.mark.parametrize(("saved", "loaded"), [(1, 1), (1, 12), (2, 3), (3, 2), (4, 4), (7, 4), (12, 1), (12, 7)])
def test_what_was_saved_is_loaded_bitwise_at_any_world_size(tmp_path: Path, saved: int, loaded: int) -> None:
    store = LocalStore(tmp_path)
    refs = save(store, 20, world_size=saved)
    assert refs == [CheckpointRef(step=20, attempt=1, world_size=saved)] * saved
    assert refs[0].folder == "checkpoints/step-00000020"
    for key, tensor in _loaded(store, 20, loaded).items():
        assert torch.equal(tensor, TENSORS[key]), key


def test_the_threads_that_load_use_the_ranks_own_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, store = FakeCuda.installed(monkeypatch), LocalStore(tmp_path)

    class OnThirdGpu(torch.Tensor):
        @property
        def device(self) -> torch.device:  # type: ignore[override]
            return torch.device("cuda", 3)

        def copy_(self, *values: Any, **options: Any) -> torch.Tensor:
            cuda.touch()
            return super().copy_(*values, **options)

    save(store, 20, world_size=2)
    parts = [replace(part, tensor=part.tensor.as_subclass(OnThirdGpu)) for part in blank_of(TENSORS)]
    load_parts(store, read_manifest(store, 20), parts)
    assert all(torch.equal(part.tensor.as_subclass(torch.Tensor), TENSORS[part.key]) for part in parts)
    assert cuda.strays == []


@pytest.mark.parametrize("failing", [0, 2])
def test_a_full_disk_on_one_rank_is_the_same_error_on_every_rank(tmp_path: Path, failing: int) -> None:
    store = LocalStore(tmp_path)
    save(store, 10, world_size=3)
    full = FaultyStore(store, fail_at=2, kinds=("chunk",), only=lambda key: "rank-" in key)
    errors = save(store, 20, world_size=3, stores={failing: full})
    assert all(isinstance(error, CheckpointError) for error in errors) and len({str(error) for error in errors}) == 1
    shard = f"attempt-0001/rank-0000{failing}-of-00003.safetensors"
    assert f"rank {failing}: {shard} could not be written ([Errno 28] No space left" in str(errors[0])
    assert "run the same command again to resume" in str(errors[0])
    assert committed_steps(store) == (10,)
    # What the others had written makes room again.
    assert not [key for key in store.list("checkpoints") if "step-00000020" in key]


def test_a_step_is_committed_once(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    save(store, 20, attempt=1)
    before = {key: store.path(key).read_bytes() for key in store.list("checkpoints")}
    for attempt in (1, 2):
        errors = save(store, 20, attempt=attempt, tensors={k: v + 1 for k, v in TENSORS.items()})
        assert all(isinstance(error, CheckpointError) for error in errors)
    assert {key: store.path(key).read_bytes() for key in store.list("checkpoints")} == before


def test_shards_that_do_not_hold_the_whole_state_are_never_committed(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)

    def call(rank: int, messenger: ThreadExchange) -> CheckpointRef:
        state = shard_of(TENSORS, 0, 2)
        return save_checkpoint(
            store, step=5, attempt=1, rank=rank, world_size=2, state=state, meta=META, messenger=messenger
        )

    errors = on_ranks(2, call)
    assert "[0, 5) of fp32/a are stored twice" in str(errors[0])
    assert committed_steps(store) == ()


def test_ranks_that_describe_the_tensors_in_another_order_are_refused(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    tensors = {name: torch.arange(4.0) + number for number, name in enumerate(("fp32/a", "fp32/b"))}
    orders = [tensors, tensors, dict(reversed(tensors.items()))]

    def call(rank: int, messenger: ThreadExchange) -> CheckpointRef:
        state = shard_of(orders[rank], rank, 3)
        return save_checkpoint(
            store, step=20, attempt=1, rank=rank, world_size=3, state=state, meta=META, messenger=messenger
        )

    errors = on_ranks(3, call)
    assert all("rank 2: its tensors differ from rank 0's" in str(error) for error in errors)
    assert committed_steps(store) == () and list(store.list("checkpoints")) == []


def test_a_rank_that_can_not_read_stops_every_rank(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    save(store, 20)
    manifest = read_manifest(store, 20)

    def call(rank: int, messenger: ThreadExchange) -> int:
        root = tmp_path if rank != 1 else tmp_path / "not mounted"
        return load_parts(LocalStore(root), manifest, shard_of(TENSORS, rank, 3).parts, messenger)

    errors = on_ranks(3, call)
    assert len({str(error) for error in errors}) == 1
    assert "rank 1: " in str(errors[0])
    assert all(isinstance(error, DamagedCheckpointError) for error in errors)


def test_another_dtype_than_the_stored_one_is_refused(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    save(store, 20)
    part = TensorPart(key="frozen/c", start=0, tensor=torch.zeros(5))
    with pytest.raises(CheckpointError, match="frozen/c is stored as BF16"):
        load_parts(store, read_manifest(store, 20), [part])


def test_a_planted_pickle_is_never_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, ...]:
            return (os.mkdir, ("sprung",))

    monkeypatch.chdir(tmp_path)
    store = LocalStore(tmp_path / "run")
    save(store, 20)
    folder = tmp_path / "run" / "checkpoints" / "step-00000020"
    manifest = read_manifest(store, 20)
    for target in (".metadata", manifest.shards[0].file, "manifest.json"):
        (folder / target).write_bytes(pickle.dumps(Trap()))
        assert (newest_committed(store).manifest is None) == (target != ".metadata")
        with contextlib.suppress(CheckpointError):
            load_parts(store, manifest, shard_of(TENSORS, 0, 1).parts)
    assert not (tmp_path / "sprung").exists()


PARTS = (
    TensorPart(key="fp32/a", start=3, tensor=torch.arange(5, dtype=torch.float32)),
    TensorPart(key="frozen/b", start=0, tensor=torch.arange(3, dtype=torch.bfloat16)),
    TensorPart(key="exp_avg/empty", start=9, tensor=torch.zeros(0)),
    TensorPart(key="buffer/flag", start=0, tensor=torch.tensor([True, False, True])),
)


def _shard(tmp_path: Path) -> tuple[LocalStore, ShardEntry]:
    store = LocalStore(tmp_path)
    return store, write_shard(store, "checkpoints/step-00000001", "attempt-0001/s.safetensors", PARTS)


def test_a_shard_is_a_safetensors_file(tmp_path: Path) -> None:
    store, entry = _shard(tmp_path)
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
    store, entry = _shard(tmp_path)
    folder = "checkpoints/step-00000001"
    path = store.path(f"{folder}/{entry.file}")
    whole = path.read_bytes()
    assert find_damage(store, folder, entry, read_content=True) is None
    for position in range(len(whole)):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        reason = find_damage(store, folder, entry, read_content=True)
        assert reason is not None and "checksum" in reason, f"flip of byte {position} was not found"


def test_short_reads_of_storage_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    parts = blank_of(TENSORS)
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


ELEMENTS = 5 * 2**20 + 77
BIG = {
    "fp32/a": torch.arange(ELEMENTS, dtype=torch.float32),
    "frozen/b": torch.arange(3 * 2**16 + 5, dtype=torch.int64).to(torch.bfloat16),
    "fp32/small": torch.ones(3),
    "exp_avg/a": torch.arange(ELEMENTS, dtype=torch.float32) * 2,
}


@pytest.mark.parametrize(("saved", "loaded"), [(3, 3), (4, 2), (3, 2), (1, 5)])
def test_bytes_read_are_bytes_needed_but_for_cut_blocks(tmp_path: Path, saved: int, loaded: int) -> None:
    save(LocalStore(tmp_path), 10, world_size=saved, tensors=BIG)
    for rank in range(loaded):
        store = CountingStore(LocalStore(tmp_path))
        manifest = read_manifest(store, 10)
        manifest_bytes = store.bytes_read
        parts = blank_of(BIG, rank, loaded)
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
            assert num_bytes <= needed + tables


def test_a_flip_in_a_part_that_is_read_is_found_and_one_beside_it_is_not_read(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    save(store, 10, world_size=1, tensors=BIG)
    manifest = read_manifest(store, 10)
    path = store.path(f"checkpoints/step-00000010/{manifest.shards[0].file}")
    stored = manifest.shards[0].intervals[0]
    first = stored.offset + 40 * BLOCK_BYTES
    _flip(path, first + 11)
    half = 20 * BLOCK_BYTES // 4
    load_parts(store, manifest, [TensorPart(key="fp32/a", start=0, tensor=torch.zeros(half))])
    wanted = TensorPart(key="fp32/a", start=half, tensor=torch.zeros(half * 2))
    with pytest.raises(DamagedCheckpointError, match=f"fp32/a is wrong .bytes {first} to {first + BLOCK_BYTES - 1}"):
        load_parts(store, manifest, [wanted])


MANY_TENSORS = {
    **{f"fp32/{number}": torch.arange(3000.0) + number for number in range(4)},
    **{f"model/{number}": torch.arange(300_000).to(torch.bfloat16) for number in range(8)},
}
REST_BYTES = 8 * 300_000 * 2


@pytest.fixture
def saved(tmp_path: Path) -> tuple[LocalStore, Manifest]:
    store = LocalStore(tmp_path)
    save(store, 10, world_size=8, tensors=MANY_TENSORS)
    return store, read_manifest(store, 10)


def _wanted_by(rank: int, world_size: int, *, by_key: bool) -> dict[str, torch.Tensor]:
    # ZeRO-3 assigns each rank a part of every tensor, ZeRO-1 some complete tensors.
    wanted = {key: tensor for key, tensor in MANY_TENSORS.items() if key.startswith("fp32/")}
    if not by_key:
        return wanted
    return {key: wanted[key] for number, key in enumerate(wanted) if number % world_size == rank}


def _resume(saved: tuple[LocalStore, Manifest], world_size: int, *, by_key: bool) -> list[Any]:
    store, manifest = saved

    def call(rank: int, messenger: ThreadExchange) -> int:
        wanted = _wanted_by(rank, world_size, by_key=by_key)
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
    _flip(path, offset)
    errors = _resume(saved, world_size, by_key=True)
    assert len(errors) == world_size
    for error in errors:
        assert isinstance(error, DamagedCheckpointError)
        assert entry.file in str(error) and (where or "header") in str(error)
