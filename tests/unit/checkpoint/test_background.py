from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from ray_ulysses.checkpoint import (
    CheckpointError,
    FencedError,
    KeepRules,
    Retention,
    ShardedState,
    TensorPart,
    load_parts,
    newest_committed,
)
from ray_ulysses.checkpoint.background import BackgroundSaver, Saved
from ray_ulysses.checkpoint.choice import committed_steps
from ray_ulysses.checkpoint.fence import claim_attempt, start_attempt
from ray_ulysses.checkpoint.messenger import SingleRankMessenger
from ray_ulysses.checkpoint.staging import Staging
from ray_ulysses.clock import SystemClock
from ray_ulysses.storage import LocalStore, Store
from tests.polling import wait_until
from tests.stores import FaultyStore, SlowStore
from tests.unit.checkpoint.fakes import META, TENSORS, ThreadExchange, on_ranks, save, shard_of
from tests.unit.fake_cuda import FakeCuda

CPU = torch.device("cpu")


def _saver(store: Store, buffers: int = 2, **changes: Any) -> tuple[BackgroundSaver, list[Saved], list[str]]:
    saved: list[Saved] = []
    failed: list[str] = []
    arguments: dict[str, Any] = {
        "attempt": 1,
        "rank": 0,
        "world_size": 1,
        "messenger": SingleRankMessenger(),
        "staging": Staging(buffers, CPU),
        "clock": SystemClock(),
        "on_saved": saved.append,
        "on_failed": lambda step, error: failed.append(f"{step}: {error}"),
    }
    return BackgroundSaver(store, **{**arguments, **changes}), saved, failed


def _live() -> ShardedState:
    return shard_of(TENSORS, 0, 1)


def _overwrite(state: ShardedState) -> None:
    for part in state.parts:
        part.tensor.zero_()


def _check_whole(store: LocalStore, step: int) -> None:
    choice = newest_committed(store)
    assert choice.manifest is not None and choice.manifest.step == step and choice.damaged == ()
    blank = [TensorPart(key=p.key, start=p.start, tensor=torch.full_like(p.tensor, 9)) for p in _live().parts]
    load_parts(store, choice.manifest, blank)
    for part in blank:
        assert torch.equal(part.tensor, TENSORS[part.key].reshape(-1)), part.key


@pytest.mark.parametrize("buffers", [1, 2])
def test_what_is_written_is_the_state_that_was_asked_for_whatever_training_does_meanwhile(
    tmp_path: Path, buffers: int
) -> None:
    gate = threading.Event()
    saver, saved, _ = _saver(SlowStore(LocalStore(tmp_path), gate=gate, kinds=("chunk",)), buffers)
    state = _live()
    saver.save(10, state, META, timeout_s=5)
    assert not saver.is_idle and committed_steps(LocalStore(tmp_path)) == ()
    _overwrite(state)
    gate.set()
    assert saver.wait(10) and saver.is_idle and saver.failure is None
    _check_whole(LocalStore(tmp_path), 10)
    assert [one.ref.step for one in saved] == [10]
    assert saver.close(5)


def test_two_states_are_held_and_a_third_waits_until_one_is_written(tmp_path: Path) -> None:
    gate = threading.Event()
    saver, saved, _ = _saver(SlowStore(LocalStore(tmp_path), gate=gate, kinds=("chunk",)))
    for step in (10, 20):
        saver.save(step, _live(), META, timeout_s=5)
    with pytest.raises(CheckpointError, match="step 30 could not be started"):
        saver.save(30, _live(), META, timeout_s=0.05)
    gate.set()
    saver.save(30, _live(), META, timeout_s=10)
    assert saver.close(10)
    assert [one.ref.step for one in saved] == [10, 20, 30]
    assert committed_steps(LocalStore(tmp_path)) == (10, 20, 30)


def test_a_failed_save_is_told_and_the_next_one_succeeds(tmp_path: Path) -> None:
    faulty = FaultyStore(LocalStore(tmp_path), fail_at=2, kinds=("chunk",))
    saver, saved, failed = _saver(faulty)
    saver.save(10, _live(), META, timeout_s=5)
    assert saver.wait(10)
    assert isinstance(saver.failure, CheckpointError) and saver.failures == 1 and saved == []
    assert "No space left on device" in failed[0] and failed[0].startswith("10: ")
    # The same step again: its shard has a name of its own, since the dead one's may be anywhere.
    saver.save(10, _live(), META, timeout_s=5)
    assert saver.wait(10)
    assert saver.failure is None and saver.failures == 0
    assert any("try-01" in key for key in faulty.list("checkpoints"))
    _check_whole(LocalStore(tmp_path), 10)
    assert [one.ref.step for one in saved] == [10]
    saver.close(5)


def test_a_failure_of_one_rank_is_told_to_all(tmp_path: Path) -> None:
    def call(rank: int, messenger: ThreadExchange) -> str:
        store: Store = LocalStore(tmp_path)
        if rank == 1:
            store = FaultyStore(store, fail_at=1, kinds=("create",))
        saver, _, failed = _saver(store, rank=rank, world_size=3, messenger=messenger)
        saver.save(10, shard_of(TENSORS, rank, 3), META, timeout_s=5)
        assert saver.wait(10) and saver.failures == 1
        saver.save(20, shard_of(TENSORS, rank, 3), META, timeout_s=5)
        assert saver.wait(10) and saver.failures == 0 and saver.close(5)
        return failed[0]

    texts = on_ranks(3, call)
    assert len(set(texts)) == 1 and "rank 1: " in texts[0]
    assert committed_steps(LocalStore(tmp_path)) == (20,)


def test_an_overtaken_attempt_hears_of_it_and_is_not_told_as_a_failed_save(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    claim_attempt(store, 2)
    saver, saved, failed = _saver(store)
    saver.save(10, _live(), META, timeout_s=5)
    assert saver.close(10)
    assert isinstance(saver.failure, FencedError) and saved == [] and failed == []


def test_an_error_of_a_callback_is_a_failure_and_ends_no_thread(tmp_path: Path) -> None:
    def refuse(saved: Saved) -> None:
        raise RuntimeError("a bug")

    # Without a buffer the live state is written.
    staging = Staging(0, CPU)
    staging.reserve(_live().intervals)
    saver, _, _ = _saver(LocalStore(tmp_path), staging=staging, on_saved=refuse)
    saver.save(10, _live(), META, timeout_s=5)
    assert saver.close(10) and staging.num_bytes == 0
    assert str(saver.failure) == "a bug"
    _check_whole(LocalStore(tmp_path), 10)


@pytest.mark.parametrize("path", ["leftovers", "dead"])
def test_retention_does_not_touch_what_ranks_ahead_of_it_are_writing(tmp_path: Path, path: str) -> None:
    """Rank 0 deletes old checkpoints while rank 1 has written its shard of the next save already."""
    inner = LocalStore(tmp_path)
    if path == "dead":
        # A dead attempt's checkpoint of the very step that is saved next.
        save(inner, 20)
        start_attempt(inner, 2, 0)
    written = threading.Event()

    def call(rank: int, messenger: ThreadExchange) -> BackgroundSaver:
        retention = Retention(inner, KeepRules(last=1))

        def on_saved(saved: Saved) -> None:
            if rank == 0 and saved.ref.step == 10:
                folder = "checkpoints/step-00000020/attempt-0002"
                wait_until(lambda: any("rank-00001" in key for key in inner.list(folder)), "rank 1's next shard")
                written.set()
            if rank == 0:
                retention.apply(saved.ref)

        saver, _, _ = _saver(inner, rank=rank, world_size=2, messenger=messenger, attempt=2, on_saved=on_saved)
        for step in (10, 20):
            saver.save(step, shard_of(TENSORS, rank, 2), META, timeout_s=5)
        assert saver.close(20)
        return saver

    savers = on_ranks(2, call)
    assert written.is_set() and [saver.failure for saver in savers] == [None, None]
    choice = newest_committed(inner)
    assert choice.damaged == () and choice.manifest is not None
    assert (choice.manifest.step, choice.manifest.attempt) == (20, 2)
    assert committed_steps(inner) == (20,)


def test_the_thread_that_saves_uses_the_ranks_own_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, third = FakeCuda.installed(monkeypatch), torch.device("cuda", 3)
    torch.cuda.set_device(third)
    saver, saved, _ = _saver(LocalStore(tmp_path), staging=Staging(2, third))
    saver.save(10, _live(), META, timeout_s=5)
    assert saver.wait(10) and saver.close(5)
    assert [one.ref.step for one in saved] == [10] and cuda.strays == []
