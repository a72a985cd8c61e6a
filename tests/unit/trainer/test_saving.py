"""When a checkpoint is due, and what an attempt does about one that waits, fails, or is being written as it fails."""

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
from ray_ulysses.config.running import CheckpointSection
from ray_ulysses.errors import FinalError, PeerError, RunError
from ray_ulysses.trainer import saving
from ray_ulysses.trainer.saving import CheckpointKeeper, Reason, due, retry_pause_s, steps_apart, time_is_up
from ray_ulysses.trainer.step import Flags
from tests.distributed.run_case import make_config
from tests.polling import wait_until
from tests.stores import MemoryStore, SlowStore
from tests.unit.checkpoint.fakes import META, TENSORS, shard_of

RULES = CheckpointSection(every_steps=10, every_minutes=1.0, save_at_end=True)
SILENT = CheckpointSection(every_steps=None, every_minutes=None, save_at_end=False)


@pytest.mark.parametrize(
    ("agreed", "step", "reason"),
    [
        (Flags(), 10, "steps"),
        (Flags(), 11, None),
        (Flags(time_is_up=True), 11, "minutes"),
        (Flags(save_requested=True), 11, "request"),
        (Flags(save_requested=True), 10, "request"),
        (Flags(notice=True), 11, None),
        (Flags(notice=True, notice_due=True), 11, "preemption"),
        (Flags(notice=True, notice_due=True, saving=True), 11, None),
        (Flags(notice=True, notice_due=True, saving=True), 20, "steps"),
        (Flags(stop=True), 11, "stop"),
        (Flags(stop=True, resize=True), 11, "resize"),
        (Flags(), 99, "end"),
        (Flags(failed=True), 11, None),
        (Flags(failed=True, retry_due=True), 11, "retry"),
        (Flags(failed=True), 20, "steps"),
        (Flags(failed=True, retry_due=True, saving=True), 11, None),
    ],
)
def test_what_is_due_has_a_reason(agreed: Flags, step: int, reason: Reason | None) -> None:
    assert due(RULES, agreed, step=step, taken_step=0, last_step=99) == reason


@pytest.mark.parametrize(
    "agreed", [Flags(), Flags(save_requested=True), Flags(stop=True), Flags(notice=True, notice_due=True)]
)
def test_a_state_that_was_taken_is_not_taken_again(agreed: Flags) -> None:
    assert due(RULES, agreed, step=20, taken_step=20, last_step=20) is None


@pytest.mark.parametrize(
    ("agreed", "step", "ends_stage", "reason"),
    [
        (Flags(save_requested=True), 5, False, "request"),
        (Flags(resize=True, stop=True), 5, False, "resize"),
        (Flags(stop=True), 5, False, None),
        (Flags(), 9, False, None),
        (Flags(), 9, True, "stage"),
        (Flags(), 8, True, None),
    ],
)
def test_without_rules_only_requests_and_the_ends_of_stages_are_saved(
    agreed: Flags, step: int, ends_stage: bool, reason: Reason | None
) -> None:
    assert due(SILENT, agreed, step=step, taken_step=0, last_step=9, ends_stage=ends_stage) == reason


def test_minutes_are_counted_from_the_last_state_taken() -> None:
    assert not time_is_up(RULES, last_save=100.0, now=159.9)
    assert time_is_up(RULES, last_save=100.0, now=160.0)
    assert not time_is_up(SILENT, last_save=0.0, now=1e9)


def test_saves_that_go_on_failing_are_tried_ever_less_often() -> None:
    assert [retry_pause_s(failures, 2) for failures in range(1, 10)] == [0, 0, 1, 2, 4, 8, 16, 30, 30]
    assert retry_pause_s(10**6, 0) == 30


@pytest.mark.parametrize(
    ("step_s", "stall_s", "failures", "apart"),
    [
        pytest.param(1.0, 0.0, 0, 1, id="the-first"),
        pytest.param(1.0, 0.010, 0, 1, id="one-percent"),
        pytest.param(1.0, 0.011, 0, 2, id="more-than-one-percent"),
        pytest.param(0.05, 0.008, 0, 1, id="nobody-notices-ten-milliseconds"),
        pytest.param(300.0, 30.0, 0, 10, id="from-a-disk"),
        pytest.param(1.0, 0.0, 1, 1, id="after-one-failure"),
        pytest.param(1.0, 0.0, 3, 4, id="after-failures"),
        pytest.param(1.0, 0.0, 99, 5, id="at-least-every-five-seconds"),
        pytest.param(60.0, 0.0, 99, 1, id="after-every-long-step"),
        pytest.param(0.0, 0.0, 99, 65536, id="not-for-ever"),
        pytest.param(1.0, 0.3, 1, 30, id="the-rarer-of-both"),
    ],
)
def test_peer_memory_costs_a_hundredth_of_the_time_at_most(
    step_s: float, stall_s: float, failures: int, apart: int
) -> None:
    assert steps_apart(step_s, stall_s, failures) == apart


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
            messenger=SingleRankMessenger(),
            save_messenger=SingleRankMessenger(),
        )
        recorder: Any = SimpleNamespace(
            checkpoint_committed=lambda saved: None, checkpoint_deleted=lambda step: None,
            checkpoint_failed=lambda step, error: None, sync=lambda: None, storage_failure=lambda: None,
        )  # fmt: skip
        self.keeper = CheckpointKeeper(context, recorder)
        self.keeper._taken_step = 7
        self.keeper._saver.save(7, shard_of(TENSORS, 0, 1), META, timeout_s=20.0)

    def step(self, number: int) -> None:
        outcome: Any = SimpleNamespace(flags=self.keeper.flags(), position=SimpleNamespace(step=number))
        self.keeper.after_step(None, outcome, None, 99)  # type: ignore[arg-type]

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
    ("error", "is_in_memory", "is_reported"),
    [
        pytest.param(RunError("a rank died"), False, True, id="storage alone has the state"),
        pytest.param(FinalError("the loss is NaN"), True, True, id="the run ends, and peer memory with it"),
        pytest.param(PeerError("another rank is gone"), False, False, id="another rank reports it"),
    ],
)
def test_otherwise_the_checkpoint_is_completed_and_the_failure_reported_before(
    attempt: Attempt, said: pytest.LogCaptureFixture, error: RunError, is_in_memory: bool, is_reported: bool
) -> None:
    waiting = threading.Thread(target=attempt.keeper.abandon, args=(error,), kwargs={"is_in_memory": is_in_memory})
    waiting.start()
    wait_until(lambda: not is_reported or "has failed" in said.text, "the failure is reported")
    assert not attempt.is_committed()
    attempt.gate.set()
    waiting.join(20.0)
    assert not waiting.is_alive() and attempt.is_committed()
    assert (f"has failed ({type(error).__name__}: {error}); waiting up to 20 s for" in said.text) == is_reported


@pytest.fixture
def ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for the engine's state, and shorten the wait for a buffer."""
    monkeypatch.setattr(saving, "_BUFFER_S", 0.05)
    monkeypatch.setattr(saving, "checkpoint_meta", lambda *_: META)
    monkeypatch.setattr(saving, "state_source", lambda _: shard_of(TENSORS, 0, 1))


def test_a_save_that_the_storage_keeps_waiting_is_taken_after_a_later_step(
    attempt: Attempt, ready: None, said: pytest.LogCaptureFixture
) -> None:
    attempt.keeper._is_reserved = True
    # Step 7 is being written, the second buffer takes step 10, and there is none for step 15.
    for number in range(8, 23):
        attempt.step(number)
    assert attempt.keeper._taken_step == 10 and "checkpoint of step 15 is postponed" in said.text
    attempt.gate.set()
    assert attempt.keeper._saver.wait(20.0)
    attempt.step(23)
    attempt.step(24)
    assert attempt.keeper._saver.wait(20.0) and committed_steps(attempt.store) == (7, 10, 23)
    attempt.step(25)
    assert attempt.keeper._saver.wait(20.0) and committed_steps(attempt.store)[-2:] == (23, 25)


def test_training_does_not_wait_for_the_memory_of_a_copy(
    attempt: Attempt, ready: None, monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture
) -> None:
    gate = threading.Event()
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
    for number in (8, 9, 10):
        attempt.step(number)
    assert "checkpoint of step 10 is postponed" in said.text
    # An attempt that fails now writes nothing that it had to wait for.
    assert not attempt.keeper._saver.is_saving
    gate.set()
    assert attempt.keeper._saver.wait(20.0)
    with pytest.raises(CheckpointError, match=r"no 9.0 GiB"):
        attempt.step(11)


@pytest.mark.parametrize(
    ("own", "raised"), [(StorageFailedError("no answer"), StorageFailedError), (None, PeerError)], ids=["own", "other"]
)
def test_a_storage_that_takes_no_record_ends_every_rank_after_the_same_step(
    attempt: Attempt, own: StorageFailedError | None, raised: type[Exception]
) -> None:
    attempt.gate.set()
    attempt.keeper._is_reserved = True
    attempt.keeper._recorder.storage_failure = lambda: own  # type: ignore[method-assign]
    assert attempt.keeper.flags().ended == (own is not None)
    outcome: Any = SimpleNamespace(flags=Flags(ended=True), position=SimpleNamespace(step=8))
    with pytest.raises(raised):
        attempt.keeper.after_step(None, outcome, None, 99)  # type: ignore[arg-type]


def test_a_storage_that_takes_no_state_for_too_long_ends_the_attempt(attempt: Attempt, ready: None) -> None:
    attempt.keeper._saver.save(8, shard_of(TENSORS, 0, 1), META, timeout_s=20.0)
    assert not attempt.keeper._comes_free("steps", 10)
    assert not attempt.keeper._comes_free("steps", 11)
    reason, since = attempt.keeper._postponed or ("", 0.0)
    attempt.keeper._postponed = reason, since - 3601.0  # type: ignore[assignment]
    with pytest.raises(CheckpointError, match=r"step 12 .* checkpoint.save_timeout_s=3600"):
        attempt.keeper._comes_free("steps", 12)


def test_each_try_of_the_last_save_is_a_sign_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    """All tries together may take longer than a rank may go without one."""
    beats: list[tuple[str, int]] = []
    tries: list[int] = []
    keeper: Any = object.__new__(CheckpointKeeper)
    keeper._saver = SimpleNamespace(failure=CheckpointError("away"))
    clock = SimpleNamespace(monotonic=lambda: 0.0, sleep=lambda seconds: None)
    keeper._worker = SimpleNamespace(clock=clock, beat=lambda *beat: beats.append(beat))
    keeper._context = SimpleNamespace(messenger=SingleRankMessenger())

    def take(*_: object) -> None:
        tries.append(1)
        keeper._saver.failure = None if len(tries) == 4 else CheckpointError("away")

    monkeypatch.setattr(keeper, "_take", take)
    monkeypatch.setattr(keeper, "_wait", lambda: None)
    monkeypatch.setattr(keeper, "_is_out_of_patience", lambda: False)
    outcome: Any = SimpleNamespace(position=SimpleNamespace(step=7))
    keeper._save(None, outcome, None, "stop", is_last=True)
    assert len(tries) == 4 and beats == [("save", 7)] * 3
