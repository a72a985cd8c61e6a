"""Retention: the last K stay, nothing goes before its successor, dead attempts' shards go."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_ulysses.checkpoint import CheckpointRef, apply_retention, newest_committed
from ray_ulysses.checkpoint.choice import committed_steps
from ray_ulysses.checkpoint.retention import leftovers, steps_to_delete
from ray_ulysses.storage import LocalStore
from tests.unit.checkpoint.fakes import save


@given(st.sets(st.integers(0, 100), min_size=1), st.integers(1, 8), st.data())
def test_the_newest_and_the_last_k_always_stay(steps: set[int], keep_last: int, data: st.DataObject) -> None:
    newest = data.draw(st.sampled_from(sorted(steps)))
    deleted = steps_to_delete(sorted(steps), newest=newest, keep_last=keep_last)
    kept = steps - set(deleted)
    assert newest in kept
    assert all(step < newest for step in deleted)
    assert len([step for step in kept if step <= newest]) == min(
        keep_last, len([step for step in steps if step <= newest])
    )
    assert not deleted or max(deleted) < min(step for step in kept)


def test_keeping_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"checkpoint\.keep_last=0 would delete the only state there is; use 1"):
        steps_to_delete([1], newest=1, keep_last=0)


def test_nothing_is_deleted_in_favour_of_a_step_that_is_not_committed() -> None:
    with pytest.raises(ValueError, match="step 3 is not committed"):
        steps_to_delete([1, 2], newest=3, keep_last=1)


def test_leftovers_are_what_no_manifest_names() -> None:
    def keys(step: int, *attempts: int) -> list[str]:
        return [f"checkpoints/step-{step:08d}/attempt-{a:04d}/rank-00000-of-00001.safetensors" for a in attempts]

    listing = [*keys(10, 1, 2), *keys(20, 2), *keys(30, 2, 3), *keys(40, 3, 5), *keys(50, 1)]
    found = leftovers(listing, {10: 2, 30: 3, 50: None}, attempt=3, in_flight=frozenset({40}))
    assert found == (
        "checkpoints/step-00000010/attempt-0001",
        "checkpoints/step-00000020/attempt-0002",
        "checkpoints/step-00000030/attempt-0002",
    )


def test_old_checkpoints_and_dead_shards_are_deleted(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    for step in (10, 20, 30):
        save(store, step)
    dead = tmp_path / "checkpoints/step-00000035/attempt-0001"
    dead.mkdir(parents=True)
    (dead / "rank-00000-of-00002.safetensors").write_bytes(b"half")
    (dead / ".writing-ab").write_bytes(b"half")
    (newest, _) = save(store, 40, attempt=2)
    assert isinstance(newest, CheckpointRef)
    assert apply_retention(store, newest=newest, keep_last=2) == (10, 20)
    assert committed_steps(store) == (30, 40)
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step-00000030", "step-00000035", "step-00000040"]
    assert os.listdir(tmp_path / "checkpoints/step-00000035") == []
    choice = newest_committed(store)
    assert choice.manifest is not None and choice.manifest.step == 40 and choice.damaged == ()


def test_a_death_while_deleting_leaves_the_old_checkpoint_absent_and_not_torn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(tmp_path)
    save(store, 10)
    (newest, _) = save(store, 20)
    calls = []

    def die_at_second(self: LocalStore, prefix: str) -> None:
        calls.append(prefix)
        if len(calls) == 2:
            raise KeyboardInterrupt
        original(self, prefix)

    original = LocalStore.delete
    monkeypatch.setattr(LocalStore, "delete", die_at_second)
    with pytest.raises(KeyboardInterrupt):
        apply_retention(store, newest=newest, keep_last=1)
    monkeypatch.setattr(LocalStore, "delete", original)
    choice = newest_committed(store)
    assert choice.manifest is not None and choice.manifest.step == 20 and choice.damaged == ()
    assert committed_steps(store) == (20,)
    (later, _) = save(store, 30, attempt=2)
    apply_retention(store, newest=later, keep_last=1)
    assert os.listdir(tmp_path / "checkpoints/step-00000010") == []


def test_the_shards_of_a_damaged_checkpoint_stay_until_it_is_set_aside(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    save(store, 10)
    manifest = tmp_path / "checkpoints/step-00000010/manifest.json"
    manifest.write_bytes(b"{")
    (newest, _) = save(store, 20)
    apply_retention(store, newest=newest, keep_last=3)
    assert len(os.listdir(tmp_path / "checkpoints/step-00000010/attempt-0001")) == 2
