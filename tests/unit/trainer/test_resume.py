"""Where an attempt starts if states are damaged or unreadable: never from the beginning without need."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest
import torch

import ray_ulysses.trainer.resume as module
from ray_ulysses.checkpoint import CheckpointError, Damage, FencedError, TensorPart
from ray_ulysses.checkpoint.choice import committed_steps
from ray_ulysses.checkpoint.fence import claim_attempt, read_lineage, start_attempt
from ray_ulysses.checkpoint.manifest import read_manifest
from ray_ulysses.checkpoint.messenger import SingleRankMessenger
from ray_ulysses.checkpoint.state import StateDescription
from ray_ulysses.errors import UserError
from ray_ulysses.run import start_point
from ray_ulysses.run.start_point import RecoverySources
from ray_ulysses.run_names import CHECKPOINT_FOLDER, manifest_key, step_folder
from ray_ulysses.storage import LocalStore, Store
from ray_ulysses.storage.retry import RetryPolicy
from ray_ulysses.tracking.journal import claim_journal
from ray_ulysses.trainer.context import AttemptContext, PeerStore
from tests.stores import FaultyStore, MemoryStore, permission_lost
from tests.unit.checkpoint.fakes import TENSORS, save
from tests.unit.checkpoint.manifests import signed
from tests.unit.tracking.journals import COMMITTED
from tests.unit.trainer.conftest import HandClock

NOWHERE = Path("/nowhere/run")
Tensors = dict[str, torch.Tensor]


@dataclass
class FakeRecorder:
    clock: ClassVar[Any]
    store: Store
    attempt: int = 2
    passed_over: list[Damage] = field(default_factory=list)
    phase: ClassVar[Any] = Mock()
    checkpoints_found: ClassVar[Any] = Mock()

    def checkpoint_set_aside(self, damage: Damage) -> None:
        self.passed_over.append(damage)


def _run(store: Store, run_dir: Path) -> Any:
    config = SimpleNamespace(run_dir=run_dir, model=SimpleNamespace(resume_from=None), stages=())
    return SimpleNamespace(config=config, store=store, location=str(run_dir))


def _journal(run_dir: Path, *steps: int) -> Path:
    journal = claim_journal(run_dir)
    for step in steps:
        journal.append({"event": "checkpoint_committed", **COMMITTED, "step": step, "path": "p", "world_size": 2})
    return run_dir


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    clock = HandClock()
    monkeypatch.setattr(FakeRecorder, "clock", clock, raising=False)
    return clock.waits


@pytest.fixture(autouse=True)
def own_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_point, "_check_own", lambda *_: None)


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Tensors:
    """Replace the engine by one that loads the fp32 tensors only."""
    taken: Tensors = {}

    def import_state(engine: None, description: StateDescription, fill: Any) -> None:
        taken.clear()
        wanted = [key for key in description.tensors if key.startswith("fp32/")]
        taken.update({key: torch.zeros_like(TENSORS[key]) for key in wanted})
        fill([TensorPart(key=key, start=0, tensor=tensor) for key, tensor in taken.items()])

    monkeypatch.setattr(module, "import_state", import_state)
    return taken


def _context(recorder: FakeRecorder, run_dir: Path, memory: Store | None = None) -> AttemptContext:
    worker: Any = SimpleNamespace(rank=0, clock=recorder.clock)
    alone = SingleRankMessenger()
    if memory is not None:
        memory.holders, memory.learn = lambda folder: {}, lambda holders: None  # type: ignore[attr-defined]
    peers = None if memory is None else PeerStore(store=memory, messenger=alone)  # type: ignore[arg-type]
    return AttemptContext(
        run=_run(recorder.store, run_dir), worker=worker, attempt=recorder.attempt, nodes=("node",), messenger=alone,
        save_messenger=alone, peer_memory=peers,
    )  # fmt: skip


def choose(recorder: FakeRecorder, run_dir: Path = NOWHERE) -> Any:
    context = _context(recorder, run_dir)
    retry = RetryPolicy(wait_s=5.0, first_pause_s=1.0, clock=recorder.clock)
    plan: Any = None
    sources = RecoverySources(run=context.run, plan=plan, memory=None, retry=retry, passed=recorder.passed_over)
    return module._choose(sources, context)


def resume(recorder: FakeRecorder, memory: Store | None = None, run_dir: Path = NOWHERE) -> Any:
    context, log, plan = _context(recorder, run_dir, memory), recorder, None
    return module.resume(None, module.find_state(plan, context, log), context, log)  # type: ignore[arg-type]


def _saved(folder: Path) -> LocalStore:
    store = LocalStore(folder)
    save(store, 10)
    save(store, 20)
    return store


def _flip(store: Store, step: int, key: str | None = "fp32/a") -> None:
    """Flip a byte of rank 0's shard: of a tensor, or of the header."""
    shard = read_manifest(store, step).shards[0]
    offset = next((one.offset for one in shard.intervals if one.interval.key == key), 12)
    path = f"{step_folder(step)}/{shard.file}"
    content = bytearray(store.read_whole(path))
    content[offset] ^= 1
    store.replace(path, [content])


def _damage_manifest(store: Store, step: int) -> None:
    store.replace(manifest_key(step), [b"{"])


def _away(inner: Store, kind: str, *, lasting: bool = True, part: str = "") -> FaultyStore:
    return FaultyStore(
        inner, fail_at=1, error=permission_lost(), kinds=(kind,), lasting=lasting, only=lambda key: part in key
    )


def test_the_newest_state_is_taken_and_the_nearest_of_equals(tmp_path: Path, loaded: Tensors) -> None:
    memory, storage = MemoryStore(), _saved(tmp_path)
    seen = []
    for attempt, (place, step) in enumerate(((memory, 15), (memory, 20), (memory, 30), (storage, 40)), start=2):
        save(place, step, attempt=attempt - 1)
        recorder = FakeRecorder(storage, attempt=attempt)
        position = resume(recorder, memory)
        assert all(torch.equal(loaded[key], TENSORS[key]) for key in loaded)
        assert recorder.passed_over == []
        seen.append((position.step, position.resumed_from))
    assert seen == [
        (20, "checkpoints/step-00000020"),
        (20, "peer memory, step 20"),
        (30, "peer memory, step 30"),
        (40, "checkpoints/step-00000040"),
    ]


def test_the_storage_vetoes_peer_memory(tmp_path: Path, loaded: Tensors, said: pytest.LogCaptureFixture) -> None:
    memory, storage = MemoryStore(), _saved(tmp_path)
    save(memory, 25, attempt=1)
    # A later attempt, unknown to peer memory, started before that step.
    start_attempt(storage, 2, 20)
    recorder = FakeRecorder(storage, attempt=3)
    assert resume(recorder, memory).step == 20
    assert "not using the state of step 25 in peer memory" in said.text
    assert recorder.passed_over == []
    assert committed_steps(storage) == (10, 20)


def _delete_shards(store: Store, step: int) -> None:
    store.delete(f"{CHECKPOINT_FOLDER}/step-{step:08d}/attempt-0001")


@pytest.mark.parametrize("damage", [_flip, _damage_manifest, _delete_shards, "agents gone", "other settings"])
def test_what_is_wrong_with_peer_memory_costs_nothing_on_storage(
    tmp_path: Path,
    loaded: Tensors,
    damage: Any,
    said: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory, storage, kept = MemoryStore(), _saved(tmp_path), {"loss": 1.5}
    for step in (20, 30):
        save(memory, step, metrics=kept)
        if callable(damage):
            damage(memory, step)

    def refuse(manifest: Any, *_: Any) -> None:
        if manifest.meta.metrics == kept:
            raise UserError("was written with a configuration that differs")

    asked: Store = memory
    if damage == "agents gone":
        asked = FaultyStore(memory, fail_at=1, error=OSError(113, "nobody answers"), lasting=True)
    if damage == "other settings":
        monkeypatch.setattr(start_point, "_check_own", refuse)
    before = storage.list(CHECKPOINT_FOLDER)
    recorder = FakeRecorder(storage)
    position = resume(recorder, asked)
    assert (position.step, position.resumed_from) == (20, "checkpoints/step-00000020")
    assert all(torch.equal(loaded[key], TENSORS[key]) for key in loaded) and len(loaded) == 3
    assert storage.list(CHECKPOINT_FOLDER) == before and recorder.passed_over == []
    assert ("can't read peer memory" if damage == "agents gone" else "not using the state of step 30") in said.text


def test_a_partly_loaded_state_is_no_obstacle_to_the_next_attempt(tmp_path: Path, loaded: Tensors) -> None:
    memory = MemoryStore()
    save(memory, 3)
    _flip(memory, 3)
    recorder = FakeRecorder(LocalStore(tmp_path))
    # The engine is partially filled, so it must not train from step 0.
    with pytest.raises(CheckpointError, match=r"could not be loaded completely.*the next attempt starts from step 0"):
        resume(recorder, memory, tmp_path / "run")
    assert resume(recorder, memory, tmp_path / "run").step == 0


def test_outages_are_waited_for_and_what_stays_away_is_kept(tmp_path: Path, waits: list[float]) -> None:
    store = _saved(tmp_path)
    recorder = FakeRecorder(_away(store, "open", lasting=False))
    assert choose(recorder).step == 20
    assert waits == [1.0] and recorder.passed_over == []
    recorder = FakeRecorder(_away(store, "open", part="step-00000020"))
    assert choose(recorder).step == 10
    assert waits == [1.0, 1.0, 2.0, 2.0]
    (damage,) = recorder.passed_over
    assert (damage.step, damage.kind) == (20, "unreadable")
    assert committed_steps(store) == (10, 20)


def test_a_run_whose_checkpoints_are_of_another_version_or_can_not_be_read_is_refused(tmp_path: Path) -> None:
    store = _saved(tmp_path)
    for kind in ("open", "list"):
        with pytest.raises(CheckpointError, match="Permission denied"):
            choose(FakeRecorder(_away(store, kind)))
    path = store.path("checkpoints/step-00000020/manifest.json")
    path.write_bytes(signed({**json.loads(path.read_text()), "schema_version": 9}))
    with pytest.raises(CheckpointError, match="step 20 was written by another version"):
        choose(FakeRecorder(store))
    assert committed_steps(store) == (10, 20)


def test_a_storage_that_lost_everything_is_not_begun_anew(tmp_path: Path) -> None:
    """The storage is not mounted, or checkpoint.storage is mistyped, as the journal shows."""
    run_dir = _journal(tmp_path / "run", 10, 20)
    # The remains of deleted or unfinished checkpoints do not count.
    leftovers = _saved(tmp_path / "leftovers")
    for step in (10, 20):
        leftovers.delete(f"{CHECKPOINT_FOLDER}/step-000000{step}/manifest.json")
    for store in (LocalStore(tmp_path), leftovers):
        with pytest.raises(CheckpointError, match="the journal records a checkpoint at step 20"):
            choose(FakeRecorder(store), run_dir)
    assert choose(FakeRecorder(LocalStore(tmp_path)), tmp_path / "fresh") is None


Damages = Callable[[Store, int], None]


@pytest.mark.parametrize("newest", [_flip, _damage_manifest], ids=["flipped", "torn"])
@pytest.mark.parametrize("older", [_flip, _damage_manifest], ids=["flipped", "torn"])
def test_only_damaged_states_are_refused(tmp_path: Path, loaded: Tensors, older: Damages, newest: Damages) -> None:
    store = _saved(tmp_path)
    older(store, 10)
    newest(store, 20)
    before = store.list(CHECKPOINT_FOLDER)
    recorder = FakeRecorder(store)
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"does not restart from step 0 .*step 20 .*step 10 "):
            resume(recorder)
    assert store.list(CHECKPOINT_FOLDER) == before
    assert recorder.passed_over == [] and read_lineage(store).started_from == {}


@pytest.mark.parametrize("where", ["fp32/a", "frozen/c", None], ids=["loaded", "not loaded", "header"])
def test_a_flipped_byte_selects_the_previous_checkpoint(tmp_path: Path, loaded: Tensors, where: str | None) -> None:
    store = _saved(tmp_path)
    _flip(store, 20, where)
    recorder = FakeRecorder(store)
    assert resume(recorder).step == 10
    assert all(torch.equal(loaded[key], TENSORS[key]) for key in loaded) and len(loaded) == 3
    (damage,) = recorder.passed_over
    assert damage.kind == "damaged" and damage.step == 20 and (where or "header") in damage.reason
    assert committed_steps(store) == (10,)
    assert read_lineage(store).started_from == {2: 10}


def test_an_overtaken_attempt_changes_nothing(tmp_path: Path, loaded: Tensors) -> None:
    store = _saved(tmp_path)
    _damage_manifest(store, 20)
    claim_attempt(store, 3)
    with pytest.raises(FencedError, match="attempt 2"):
        resume(FakeRecorder(store))
    assert committed_steps(store) == (10, 20) and read_lineage(store).started_from == {}


def test_damage_that_can_not_be_set_aside_is_ignored(tmp_path: Path, loaded: Tensors, waits: list[float]) -> None:
    inner = _saved(tmp_path)
    _damage_manifest(inner, 20)
    assert resume(FakeRecorder(_away(inner, "delete"))).step == 10
    assert waits == []
    assert committed_steps(inner) == (10, 20)
    assert read_lineage(inner).started_from == {2: 10}


def test_a_storage_that_takes_no_announcement_ends_the_attempt(tmp_path: Path, loaded: Tensors) -> None:
    with pytest.raises(CheckpointError, match="start of attempt 2 can't be recorded"):
        resume(FakeRecorder(_away(_saved(tmp_path), "create")))


def _two_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start a second stage, which resets the optimizer, after step 20."""

    def stage_at(config: Any, plan: Any, step: int) -> Any:
        number = int(step >= 20)
        return SimpleNamespace(number=number, first_step=20 * number, begins_anew=bool(number), name="long")

    monkeypatch.setattr(module, "stage_at", stage_at)


def test_a_stage_may_drop_the_moments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loaded: Tensors) -> None:
    begun: list[dict[str, bool]] = []
    monkeypatch.setattr(module, "begun_anew", lambda description, **options: begun.append(options) or description)
    store = _saved(tmp_path)
    assert resume(FakeRecorder(store)).step == 20 and begun == []
    _two_stages(monkeypatch)
    assert resume(FakeRecorder(store)).step == 20 and begun == [{"with_optimizer": False}]


def test_a_damaged_border_ends_the_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loaded: Tensors) -> None:
    store = _saved(tmp_path)
    _flip(store, 20)
    _two_stages(monkeypatch)
    recorder = FakeRecorder(store)
    with pytest.raises(module.AnotherStageError, match="'long'") as left:
        resume(recorder)
    assert left.value.step == 10
    assert [damage.step for damage in recorder.passed_over] == [20]
    assert resume(FakeRecorder(store, attempt=3)).step == 10
