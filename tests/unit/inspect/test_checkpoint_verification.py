"""Every byte of a checkpoint is verified; damage is located by file, tensor and bytes."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from ray_ulysses.checkpoint.fence import start_attempt
from ray_ulysses.checkpoint.manifest import read_manifest
from ray_ulysses.clock import SystemClock
from ray_ulysses.errors import UserError
from ray_ulysses.inspect.checkpoint_verification import CheckpointVerdict, verify_checkpoint
from ray_ulysses.storage import LocalStore
from tests.unit.inspect.saved import cut, denied, flip, make_folder, make_foreign, manifest, save, shard

FILE = "attempt-0001/rank-00001-of-00002.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "demo"
    store = make_folder(folder)
    for step in (10, 20):
        save(store, step)
    return folder


def verify(folder: Path, step: int = 20) -> CheckpointVerdict:
    return verify_checkpoint(folder, step, clock=SystemClock())


def test_an_intact_checkpoint_is_read_completely(folder: Path) -> None:
    told: list[tuple[int, int]] = []
    verdict = verify_checkpoint(folder, 20, clock=SystemClock(), watch=lambda done, total: told.append((done, total)))
    assert verdict.is_whole
    assert (verdict.attempt, verdict.world_size, verdict.num_tensors, verdict.num_elements) == (1, 2, 2, 200_050)
    sizes = [path.stat().st_size for path in (shard(folder, 20, 0), shard(folder, 20, 1))]
    assert [(file.num_bytes, file.num_tensors, file.problem) for file in verdict.files] == [
        (size, 2, None) for size in sizes
    ]
    assert told[-1] == (sum(sizes), sum(sizes))
    assert [done for done, _ in told] == sorted(done for done, _ in told)


def test_a_flipped_bit_is_located_by_file_tensor_and_bytes(folder: Path) -> None:
    path = shard(folder, 20)
    position = path.stat().st_size // 2
    flip(path, position)
    verdict = verify(folder)
    assert not verdict.is_whole
    good, bad = verdict.files
    assert good.problem is None
    found = re.fullmatch(rf"{FILE}: the checksum of fp32/weight is wrong \(bytes (\d+) to (\d+)\)", str(bad.problem))
    assert found, bad.problem
    assert int(found[1]) <= position <= int(found[2])
    assert verify(folder, 10).is_whole


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: flip(path, 20), "the header's checksum is wrong"),
        (lambda path: flip(path, -1), "the table of checksums is damaged"),
        (lambda path: cut(path, 7), r"has \d+ bytes instead of \d+"),
        (lambda path: path.unlink(), "is missing"),
    ],
    ids=["header", "checksums", "truncated", "missing"],
)
def test_other_file_damage_is_reported(folder: Path, damage: Callable[[Path], object], said: str) -> None:
    damage(shard(folder, 20))
    verdict = verify(folder)
    assert (verdict.condition, verdict.problem, verdict.files[0].problem) == ("damaged", None, None)
    assert re.match(f"{FILE}:? {said}", str(verdict.files[1].problem))


def test_an_unreadable_file_is_not_reported_as_damaged(folder: Path) -> None:
    with denied(shard(folder, 20)):
        verdict = verify(folder)
    assert "Permission denied" in str(verdict.files[1].problem)
    assert (verdict.condition, verdict.is_whole) == ("unreadable", False)
    flip(shard(folder, 20, 0), -1)
    with denied(shard(folder, 20)):
        assert verify(folder).condition == "damaged"


@pytest.mark.parametrize(
    ("condition", "said"),
    [("unreadable", "Permission denied"), ("foreign", "schema version 99"), ("damaged", "is truncated or is not JSON")],
)
def test_only_a_torn_manifest_is_damaged(folder: Path, condition: str, said: str) -> None:
    path = manifest(folder, 20)
    if condition == "foreign":
        make_foreign(path)
    elif condition == "damaged":
        cut(path, 30)
    with denied(path) if condition == "unreadable" else nullcontext():
        verdict = verify(folder)
    assert said in str(verdict.problem)
    assert (verdict.condition, verdict.is_whole) == (condition, False)
    assert (verdict.to_json()["condition"], verdict.to_json()["whole"]) == (condition, False)


def test_a_checkpoint_deleted_during_the_verification_is_refused(folder: Path) -> None:
    def delete(done: int, total: int) -> None:
        LocalStore(folder).delete("checkpoints/step-00000020")

    shard(folder, 20).unlink()
    with pytest.raises(UserError, match="--verify-checkpoint=20: retention deleted this"):
        verify_checkpoint(folder, 20, clock=SystemClock(), watch=delete)


def test_a_manifest_without_all_ranks_does_not_cover_the_state(folder: Path) -> None:
    whole = read_manifest(LocalStore(folder), 20)
    manifest(folder, 20).write_bytes(replace(whole, shards=whole.shards[:1]).to_bytes())
    verdict = verify(folder)
    assert not verdict.is_whole
    assert "fp32/weight" in str(verdict.problem)


def test_a_superseded_checkpoint_is_intact_but_unusable(folder: Path) -> None:
    start_attempt(LocalStore(folder), 2, 10)
    verdict = verify(folder)
    assert (verdict.condition, verdict.is_whole) == ("superseded", False)
    assert "the checkpoint is not part of the run and is never loaded" in str(verdict.problem)
    assert [file.problem for file in verdict.files] == [None, None]
    assert verify(folder, 10).is_whole


def test_an_uncommitted_step_is_refused_with_the_committed_steps(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--verify-checkpoint=30: no checkpoint of step 30 is committed in .*: 10, 20"):
        verify(folder, 30)
    make_folder(tmp_path / "empty")
    with pytest.raises(UserError, match="committed: none"):
        verify(tmp_path / "empty", 30)
