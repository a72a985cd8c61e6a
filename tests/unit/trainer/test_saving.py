"""What an attempt that has failed does about the checkpoint that it was writing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ray_ulysses.checkpoint import CheckpointError, newest_committed
from ray_ulysses.checkpoint.choice import committed_steps
from ray_ulysses.checkpoint.errors import StorageFailedError
from ray_ulysses.checkpoint.messenger import SingleRankMessenger
from ray_ulysses.checkpoint.staging import Staging
from ray_ulysses.clock import SystemClock
from ray_ulysses.errors import FinalError, PeerError, RunError
from ray_ulysses.trainer import saving
from ray_ulysses.trainer.saving import CheckpointKeeper
from tests.distributed.run_case import make_config
from tests.polling import wait_until
from tests.stores import MemoryStore, SlowStore
from tests.unit.checkpoint.fakes import META, TENSORS, shard_of


class Attempt:
    """An attempt of one rank that is writing a checkpoint, until a gate is opened."""

    def __init__(self, folder: Path) -> None:
        self.store = MemoryStore()
        self.gate = threading.Event()
        slow = SlowStore(self.store, gate=self.gate, kinds=("create",), only=lambda key: key.endswith("manifest.json"))
        config = make_config(folder, folder)
        worker: Any = SimpleNamespace(
            rank=0, world_size=1, device=torch.device("cpu"), clock=SystemClock(), session="one",
            on_event=lambda name, step: None, notice=lambda: None,
        )  # fmt: skip
        context: Any = SimpleNamespace(
            run=SimpleNamespace(config=config, store=slow),
            worker=worker,
            attempt=1,
            save_messenger=SingleRankMessenger(),
        )
        recorder: Any = SimpleNamespace(
            checkpoint_committed=lambda saved: None, checkpoint_deleted=lambda step: None,
            checkpoint_failed=lambda step, error: None, sync=lambda: None, storage_failure=lambda: None,
        )  # fmt: skip
        self.keeper = CheckpointKeeper(context, recorder)
        self.keeper._taken_step = 7
        self.keeper._saver.save(7, shard_of(TENSORS, 0, 1), META, timeout_s=20.0)

    def is_committed(self) -> bool:
        return newest_committed(self.store).manifest is not None


@pytest.fixture
def attempt(tmp_path: Path) -> Iterator[Attempt]:
    made = Attempt(tmp_path)
    yield made
    made.gate.set()
    assert made.keeper._saver.close(20.0)


def test_a_failure_that_the_next_attempt_repairs_from_peer_memory_waits_for_no_checkpoint(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(attempt.keeper._saver, "close", waits.append)
    attempt.keeper.abandon(RunError("a rank died"), is_in_memory=True)
    assert waits == [saving.ABANDON_TIMEOUT_S]
    monkeypatch.undo()


@pytest.mark.parametrize(
    ("error", "is_in_memory", "is_told"),
    [
        pytest.param(RunError("a rank died"), False, True, id="storage alone has the state"),
        pytest.param(FinalError("the loss is NaN"), True, True, id="the run ends, and peer memory with it"),
        pytest.param(PeerError("another rank is gone"), False, False, id="another rank tells why"),
    ],
)
def test_otherwise_the_checkpoint_is_completed_and_the_failure_told_before(
    attempt: Attempt, said: pytest.LogCaptureFixture, error: RunError, is_in_memory: bool, is_told: bool
) -> None:
    waiting = threading.Thread(target=attempt.keeper.abandon, args=(error,), kwargs={"is_in_memory": is_in_memory})
    waiting.start()
    wait_until(lambda: not is_told or "has failed" in said.text, "the failure is told")
    assert not attempt.is_committed()
    attempt.gate.set()
    waiting.join(20.0)
    assert not waiting.is_alive() and attempt.is_committed()
    assert (f"has failed ({type(error).__name__}: {error}); the checkpoint of step 7" in said.text) == is_told


def test_a_save_that_the_storage_keeps_waiting_is_taken_after_a_later_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(saving, "_BUFFER_S", 0.05)
    monkeypatch.setattr(saving, "checkpoint_meta", lambda *_: META)
    monkeypatch.setattr(saving, "state_source", lambda _: shard_of(TENSORS, 0, 1))
    attempt = Attempt(tmp_path)
    attempt.keeper._is_reserved = True
    attempt.keeper._context.messenger = SingleRankMessenger()  # type: ignore[misc]

    def step(number: int) -> None:
        outcome: Any = SimpleNamespace(flags=attempt.keeper.flags(), position=SimpleNamespace(step=number))
        attempt.keeper.after_step(None, outcome, None, 99)  # type: ignore[arg-type]

    # Step 7 is being written, the second buffer takes step 10, and there is none for step 15.
    for number in range(8, 23):
        step(number)
    assert attempt.keeper._taken_step == 10 and "checkpoint of step 15 is postponed, since the previous" in said.text
    attempt.gate.set()
    assert attempt.keeper._saver.wait(20.0)
    step(23)
    step(24)
    assert attempt.keeper._saver.wait(20.0) and committed_steps(attempt.store) == (7, 10, 23)
    step(25)
    assert attempt.keeper._saver.close(20.0) and committed_steps(attempt.store)[-2:] == (23, 25)


def test_training_does_not_wait_for_the_memory_of_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(saving, "_BUFFER_S", 0.05)
    monkeypatch.setattr(saving, "checkpoint_meta", lambda *_: META)
    monkeypatch.setattr(saving, "state_source", lambda _: shard_of(TENSORS, 0, 1))
    attempt, gate = Attempt(tmp_path), threading.Event()
    attempt.keeper._context.messenger = SingleRankMessenger()  # type: ignore[misc]
    attempt.gate.set()
    assert attempt.keeper._saver.wait(20.0)
    attempt.keeper.staging = attempt.keeper._saver._staging = Staging(2, torch.device("cpu"))
    allocate = attempt.keeper.staging._allocate

    def slow(number: int, num_bytes: int) -> torch.Tensor:
        assert gate.wait(20.0)
        if said.text:
            raise CheckpointError("no 9.0 GiB of host memory for a copy")
        return allocate(number, num_bytes)

    monkeypatch.setattr(attempt.keeper.staging, "_allocate", slow)

    def step(number: int) -> None:
        outcome: Any = SimpleNamespace(flags=attempt.keeper.flags(), position=SimpleNamespace(step=number))
        attempt.keeper.after_step(None, outcome, None, 99)  # type: ignore[arg-type]

    for number in (8, 9, 10):
        step(number)
    assert "checkpoint of step 10 is postponed, since the memory for it is not there yet" in said.text
    # An attempt that fails now writes nothing that it had to wait for.
    assert not attempt.keeper._saver.is_saving
    gate.set()
    assert attempt.keeper._saver.wait(20.0)
    with pytest.raises(CheckpointError, match=r"no 9.0 GiB"):
        step(11)


def test_a_storage_that_takes_no_record_ends_every_rank_after_the_same_step(attempt: Attempt) -> None:
    attempt.gate.set()
    away = StorageFailedError("no answer")
    attempt.keeper._recorder.storage_failure = lambda: away  # type: ignore[method-assign]
    flags = attempt.keeper.flags()
    assert flags.ended
    outcome: Any = SimpleNamespace(flags=flags, position=SimpleNamespace(step=8))
    attempt.keeper._is_reserved = True
    with pytest.raises(StorageFailedError, match="no answer"):
        attempt.keeper.after_step(None, outcome, None, 99)  # type: ignore[arg-type]
    # On another rank.
    attempt.keeper._recorder.storage_failure = lambda: None  # type: ignore[method-assign]
    with pytest.raises(PeerError, match="another rank could not save"):
        attempt.keeper.after_step(None, outcome, None, 99)  # type: ignore[arg-type]


def test_a_storage_that_takes_no_state_for_too_long_ends_the_attempt(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "_BUFFER_S", 0.05)
    attempt.keeper._context.messenger = SingleRankMessenger()  # type: ignore[misc]
    attempt.keeper._saver.save(8, shard_of(TENSORS, 0, 1), META, timeout_s=20.0)
    assert not attempt.keeper._comes_free("steps", 10)
    assert not attempt.keeper._comes_free("steps", 11)
    reason, since = attempt.keeper._postponed or ("", 0.0)
    attempt.keeper._postponed = reason, since - 3601.0  # type: ignore[assignment]
    with pytest.raises(CheckpointError, match=r"step 12 could not be begun: .* checkpoint.save_timeout_s=3600 s"):
        attempt.keeper._comes_free("steps", 12)
