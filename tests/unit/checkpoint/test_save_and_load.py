from __future__ import annotations

import contextlib
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from ray_ulysses.checkpoint import (
    CheckpointError,
    CheckpointRef,
    DamagedCheckpointError,
    TensorPart,
    load_parts,
    newest_committed,
    read_manifest,
    save_checkpoint,
)
from ray_ulysses.checkpoint.choice import committed_steps
from ray_ulysses.storage import LocalStore
from tests.stores import FaultyStore
from tests.unit.checkpoint.fakes import META, TENSORS, ThreadExchange, on_ranks, save, shard_of
from tests.unit.fake_cuda import FakeCuda


def _loaded(store: LocalStore, step: int, world_size: int) -> dict[str, torch.Tensor]:
    manifest = read_manifest(store, step)
    loaded: dict[str, list[torch.Tensor]] = {key: [] for key in TENSORS}
    for rank in range(world_size):
        parts = [
            TensorPart(key=part.key, start=part.start, tensor=torch.full_like(part.tensor, 99))
            for part in shard_of(TENSORS, rank, world_size).parts
        ]
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
    parts = [
        TensorPart(key=part.key, start=part.start, tensor=torch.full_like(part.tensor, 99).as_subclass(OnThirdGpu))
        for part in shard_of(TENSORS, 0, 1).parts
    ]
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


class _Trap:
    def __reduce__(self) -> tuple[object, ...]:
        return (os.mkdir, ("sprung",))


def test_a_planted_pickle_is_never_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = LocalStore(tmp_path / "run")
    save(store, 20)
    folder = tmp_path / "run" / "checkpoints" / "step-00000020"
    manifest = read_manifest(store, 20)
    for target in (".metadata", manifest.shards[0].file, "manifest.json"):
        (folder / target).write_bytes(pickle.dumps(_Trap()))
        assert (newest_committed(store).manifest is None) == (target != ".metadata")
        with contextlib.suppress(CheckpointError):
            load_parts(store, manifest, shard_of(TENSORS, 0, 1).parts)
    assert not (tmp_path / "sprung").exists()
