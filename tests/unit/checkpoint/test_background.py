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
    load_parts,
    newest_committed,
)
from ray_ulysses.checkpoint.background import BackgroundSaver, Saved
from ray_ulysses.checkpoint.choice import committed_steps
from ray_ulysses.checkpoint.fence import claim_attempt, start_attempt
from ray_ulysses.checkpoint.messenger import SingleRankMessenger
from ray_ulysses.checkpoint.staging import LentBuffer, Staging
from ray_ulysses.checkpoint.state import StateDescription, TensorPart
from ray_ulysses.clock import SystemClock
from ray_ulysses.storage import LocalStore, Store
from tests.polling import wait_until
from tests.stores import FaultyStore, SlowStore
from tests.unit.checkpoint.fakes import META, TENSORS, ThreadExchange, blank_of, on_ranks, save, shard_of
from tests.unit.fake_cuda import FakeCuda

CPU = torch.device("cpu")


def _saver(store: Store, buffers: int = 2, **changes: Any) -> tuple[BackgroundSaver, list[Saved], list[str]]:
    saved: list[Saved] = []
    failed: list[str] = []
    arguments: dict[str, Any] = {
        "attempt": 1, "rank": 0, "world_size": 1, "messenger": SingleRankMessenger(),
        "staging": Staging(buffers, CPU), "clock": SystemClock(), "on_saved": saved.append,
        "on_failed": lambda step, error: failed.append(f"{step}: {error}"),
    }  # fmt: skip
    return BackgroundSaver(store, **{**arguments, **changes}), saved, failed


def _live() -> ShardedState:
    return shard_of(TENSORS, 0, 1)


def _check_whole(store: LocalStore, step: int) -> None:
    choice = newest_committed(store)
    assert choice.manifest is not None and choice.manifest.step == step and choice.damaged == ()
    blank = blank_of(TENSORS)
    load_parts(store, choice.manifest, blank)
    for part in blank:
        assert torch.equal(part.tensor, TENSORS[part.key].reshape(-1)), part.key


@pytest.mark.parametrize("buffers", [1, 2])
def test_the_written_state_is_the_one_at_the_time_of_the_save(tmp_path: Path, buffers: int) -> None:
    gate = threading.Event()
    saver, saved, _ = _saver(SlowStore(LocalStore(tmp_path), gate=gate, kinds=("chunk",)), buffers)
    state = _live()
    saver.save(10, state, META, timeout_s=5)
    assert not saver.is_idle and committed_steps(LocalStore(tmp_path)) == ()
    for part in state.parts:
        part.tensor.zero_()
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


def state(**sizes: int) -> ShardedState:
    parts = tuple(
        TensorPart(key=key, start=number, tensor=torch.randn(size)) for number, (key, size) in enumerate(sizes.items())
    )
    return ShardedState(parts=parts, description=StateDescription(tensors={}))


@pytest.mark.parametrize("num_buffers", [1, 2])
def test_a_buffer_holds_whatever_state_is_staged_in_it_next(num_buffers: int) -> None:
    staging = Staging(num_buffers, torch.device("cpu"))
    small, other, large = state(a=5, b=70), state(a=70, b=5), state(a=500, b=70, c=9)
    for source in (small, small, other, large, other, small, large, large):
        staged = staging.stage(source)
        assert staged.state.description is source.description
        for part, copy in zip(source.parts, staged.state.parts, strict=True):
            assert (copy.key, copy.start) == (part.key, part.start)
            assert torch.equal(copy.tensor, part.tensor)
            assert copy.tensor.data_ptr() != part.tensor.data_ptr()
        staging.release(staged.buffer)
    # As much as the largest took, without gaps.
    assert staging.num_bytes <= num_buffers * 4 * (500 + 70 + 9)
    reserved = Staging(num_buffers, torch.device("cpu"))
    reserved.reserve(large.intervals)
    size = reserved.num_bytes
    assert size > 0 and reserved.stage(large).buffer == 0 and reserved.num_bytes == size


def test_buffers_are_pinned_while_they_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, third = FakeCuda.installed(monkeypatch), torch.device("cuda", 3)
    torch.cuda.set_device(third)
    staging = Staging(1, third)
    staging.reserve(state(a=500).intervals)
    assert list(cuda.pinned.values()) == [2000]
    del staging
    assert cuda.pinned == {}
    monkeypatch.setattr("ray_ulysses.checkpoint.staging.pin", lambda *_, **__: 2)
    with pytest.raises(CheckpointError, match=r"CUDA error 2.*ulimit -l"):
        Staging(1, third).reserve(state(a=500).intervals)


def test_memory_that_nobody_lends_is_said_and_nothing_is_kept() -> None:
    def lend(num_bytes: int) -> LentBuffer:
        raise OSError(28, "No space left on device")

    staging = Staging(2, torch.device("cpu"), lend=lend)
    with pytest.raises(CheckpointError, match=r"No space left on device.*elastic.peer_memory"):
        staging.reserve(ShardedState(parts=(), description=StateDescription(tensors={})).intervals)
    assert staging.num_bytes == 0 and not staging.is_ready
