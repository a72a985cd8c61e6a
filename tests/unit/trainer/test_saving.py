"""What an attempt that has failed does about the checkpoint that it was writing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ray_ulysses.checkpoint import newest_committed
from ray_ulysses.checkpoint.exchange import SingleExchange
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
            on_event=lambda name, step: None,
        )  # fmt: skip
        context: Any = SimpleNamespace(
            run=SimpleNamespace(config=config, store=slow), worker=worker, attempt=1, save_exchange=SingleExchange()
        )
        recorder: Any = SimpleNamespace(
            checkpoint_committed=lambda saved: None, checkpoint_deleted=lambda step: None,
            checkpoint_failed=lambda step, error: None,
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
