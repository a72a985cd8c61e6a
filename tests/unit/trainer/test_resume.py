"""Where an attempt starts when its storage does not give everything: patience first, and never a new beginning."""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import ray_ulysses.trainer.resume as module
from ray_ulysses.checkpoint import CheckpointError, Damage
from ray_ulysses.checkpoint.choice import committed_steps
from ray_ulysses.checkpoint.exchange import SingleExchange
from ray_ulysses.storage import LocalStore, Store
from tests.stores import FaultyStore, permission_lost
from tests.unit.checkpoint.fakes import save


@dataclass
class FakeRecorder:
    store: Store
    rank: int = 0
    attempt: int = 2
    exchange: SingleExchange = field(default_factory=SingleExchange)
    passed_over: list[Damage] = field(default_factory=list)
    has_committed: bool = False

    def committed_before(self) -> bool:
        return self.has_committed

    def checkpoint_set_aside(self, damage: Damage) -> None:
        self.passed_over.append(damage)


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    waited: list[float] = []
    monkeypatch.setattr(module.time, "sleep", waited.append)
    return waited


def choose(recorder: FakeRecorder) -> Any:
    return module._choose(recorder, [])  # type: ignore[arg-type]


def _saved(folder: Path) -> LocalStore:
    store = LocalStore(folder)
    save(store, 10)
    save(store, 20)
    return store


def test_a_short_outage_is_waited_for(tmp_path: Path, waits: list[float]) -> None:
    flaky = FaultyStore(_saved(tmp_path), fail_at=1, error=permission_lost(), kinds=("open",))
    recorder = FakeRecorder(flaky)
    assert choose(recorder).manifest.step == 20
    assert waits == [1.0] and recorder.passed_over == []


def test_what_stays_unreadable_is_passed_over_and_kept(tmp_path: Path, waits: list[float]) -> None:
    inner = _saved(tmp_path)
    away = FaultyStore(
        inner,
        fail_at=1,
        error=permission_lost(),
        kinds=("open",),
        lasting=True,
        only=lambda key: "step-00000020" in key,
    )
    recorder = FakeRecorder(away)
    assert choose(recorder).manifest.step == 10
    assert waits == [1.0, 4.0]
    (damage,) = recorder.passed_over
    assert (damage.step, damage.kind) == (20, "unreadable")
    assert committed_steps(inner) == (10, 20)


def test_a_run_whose_checkpoints_can_not_be_read_does_not_begin_anew(tmp_path: Path) -> None:
    inner = _saved(tmp_path)
    away = FaultyStore(inner, fail_at=1, error=permission_lost(), kinds=("open",), lasting=True)
    with pytest.raises(
        CheckpointError, match="no checkpoint of the run can be read: the checkpoint of step 20 can't be"
    ):
        choose(FakeRecorder(away))
    gone = FaultyStore(inner, fail_at=1, error=permission_lost(), kinds=("list",), lasting=True)
    with pytest.raises(CheckpointError, match=r"the checkpoints of the run can't be read .*Permission denied"):
        choose(FakeRecorder(gone))
    assert committed_steps(inner) == (10, 20)


def test_a_storage_that_lost_everything_is_not_begun_anew(tmp_path: Path) -> None:
    """Not mounted, or checkpoint.storage mistyped: the journal knows better."""
    with pytest.raises(CheckpointError, match="the journal knows of committed checkpoints, but where they should be"):
        choose(FakeRecorder(LocalStore(tmp_path), has_committed=True))
    assert choose(FakeRecorder(LocalStore(tmp_path))).manifest is None
    store = _saved(tmp_path / "set aside")
    for step in (10, 20):
        store.path(f"checkpoints/step-000000{step}/manifest.json").write_bytes(b"{")
    assert choose(FakeRecorder(store, has_committed=True)).manifest is None
    # Set aside by this attempt: the next one may begin anew.
    assert choose(FakeRecorder(store, has_committed=True)).manifest is None


def test_a_run_of_another_version_is_refused_and_untouched(tmp_path: Path) -> None:
    store = _saved(tmp_path)
    path = store.path("checkpoints/step-00000020/manifest.json")
    fields = {**json.loads(path.read_text()), "schema_version": 9}
    del fields["crc32"]
    crc32 = zlib.crc32(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode())
    path.write_text(json.dumps({"crc32": crc32, **fields}))
    recorder = FakeRecorder(store)
    with pytest.raises(CheckpointError, match=r"step 20 is of another version and not used.*nothing was changed"):
        choose(recorder)
    assert recorder.passed_over == [] and committed_steps(store) == (10, 20)


def test_what_is_damaged_is_set_aside_at_once(tmp_path: Path, waits: list[float]) -> None:
    store = _saved(tmp_path)
    store.path("checkpoints/step-00000020/manifest.json").write_bytes(b"{")
    recorder = FakeRecorder(store)
    assert choose(recorder).manifest.step == 10
    assert waits == [] and [damage.kind for damage in recorder.passed_over] == ["damaged"]
    assert committed_steps(store) == (10,)
