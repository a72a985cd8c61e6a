"""When a checkpoint is due, and how an attempt treats a save that waits, fails, or is in progress at a failure."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call, patch

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
from ray_ulysses.run.requests import request_save
from ray_ulysses.run_names import SAVE_FILE
from ray_ulysses.storage import background
from ray_ulysses.trainer import saving
from ray_ulysses.trainer.saving import CheckpointKeeper, Reason, due, retry_pause_s, steps_apart, time_is_up
from ray_ulysses.trainer.step import Flags, with_requests
from tests.distributed.run_case import make_config
from tests.polling import wait_until
from tests.stores import MemoryStore, SlowStore
from tests.unit.checkpoint.fakes import META, TENSORS, shard_of

RULES = CheckpointSection(every_steps=10, every_minutes=1.0, save_at_end=True)
SILENT = CheckpointSection(every_steps=None, every_minutes=None, save_at_end=False)


NOTICED = Flags(notice=True, notice_due=True)


@pytest.mark.parametrize(
    ("rules", "agreed", "step", "ends_stage", "reason"),
    [
        (RULES, Flags(), 10, False, "steps"),
        (RULES, Flags(), 11, False, None),
        (RULES, Flags(time_is_up=True), 11, False, "minutes"),
        (RULES, Flags(save_requested=True), 10, False, "request"),
        (RULES, Flags(notice=True), 11, False, None),
        (RULES, NOTICED, 11, False, "preemption"),
        (RULES, replace(NOTICED, saving=True), 11, False, None),
        (RULES, replace(NOTICED, saving=True), 20, False, "steps"),
        (RULES, Flags(stop=True), 11, False, "stop"),
        (RULES, Flags(stop=True, resize=True), 11, False, "resize"),
        (RULES, Flags(), 99, False, "end"),
        (RULES, Flags(failed=True), 11, False, None),
        (RULES, Flags(failed=True, retry_due=True), 11, False, "retry"),
        (RULES, Flags(failed=True), 20, False, "steps"),
        (RULES, Flags(failed=True, retry_due=True, saving=True), 11, False, None),
        (SILENT, Flags(save_requested=True), 5, False, "request"),
        (SILENT, Flags(resize=True, stop=True), 5, False, "resize"),
        (SILENT, Flags(stop=True), 5, False, None),
        (SILENT, Flags(), 99, False, None),
        (SILENT, Flags(), 99, True, "stage"),
        (SILENT, Flags(), 98, True, None),
    ],
)
def test_what_is_due_has_a_reason(
    rules: CheckpointSection, agreed: Flags, step: int, ends_stage: bool, reason: Reason | None
) -> None:
    assert due(rules, agreed, step=step, taken_step=0, last_step=99, ends_stage=ends_stage) == reason
    # A state that was taken is not taken again, except to retry.
    again = due(rules, agreed, step=step, taken_step=step, last_step=99, ends_stage=ends_stage)
    assert again == ("retry" if reason == "retry" else None)


def test_minutes_are_counted_from_the_last_state_taken_and_pauses_between_retries_grow() -> None:
    assert not time_is_up(RULES, last_save=100.0, now=159.9)
    assert time_is_up(RULES, last_save=100.0, now=160.0)
    assert not time_is_up(SILENT, last_save=0.0, now=1e9)
    assert [retry_pause_s(failures, 2) for failures in range(1, 10)] == [0, 0, 1, 2, 4, 8, 16, 30, 30]
    assert retry_pause_s(10**6, 0) == 30


@pytest.mark.parametrize(
    ("step_s", "stall_s", "failures", "apart"),
    [
        pytest.param(1.0, 0.010, 0, 1, id="one-percent"),
        pytest.param(1.0, 0.011, 0, 2, id="more-than-one-percent"),
        pytest.param(0.05, 0.008, 0, 1, id="less-than-ten-milliseconds"),
        pytest.param(1.0, 0.0, 1, 1, id="after-one-failure"),
        pytest.param(1.0, 0.0, 3, 4, id="after-failures"),
        pytest.param(1.0, 0.0, 99, 5, id="at-least-every-five-seconds"),
        pytest.param(60.0, 0.0, 99, 1, id="after-every-long-step"),
        pytest.param(0.0, 0.0, 99, 65536, id="not-for-ever"),
        pytest.param(1.0, 0.3, 1, 30, id="the-rarer-of-both"),
    ],
)
def test_peer_memory_costs_at_most_one_percent(step_s: float, stall_s: float, failures: int, apart: int) -> None:
    assert steps_apart(step_s, stall_s, failures) == apart


class Attempt:
    """An attempt of one rank with a save in progress until a gate opens."""

    def __init__(self, folder: Path) -> None:
        self.store = MemoryStore()
        self.gate = threading.Event()
        slow = SlowStore(self.store, gate=self.gate, kinds=("create",), only=lambda key: key.endswith("manifest.json"))
        config = make_config(folder, folder)
        worker: Any = SimpleNamespace(
            rank=0, world_size=1, device=torch.device("cpu"), clock=SystemClock(), session="one",
            on_event=lambda name, step: None, notice=lambda: None,
        )  # fmt: skip
        alone, run = SingleRankMessenger(), SimpleNamespace(config=config, store=slow)
        context: Any = SimpleNamespace(run=run, worker=worker, attempt=1, messenger=alone, save_messenger=alone)
        self.keeper = CheckpointKeeper(context, Mock(**{"storage_failure.return_value": None}))
        self.keeper._taken_step = 7
        self.keeper._saver.save(7, shard_of(TENSORS, 0, 1), META, timeout_s=20.0)

    def step(self, number: int) -> None:
        assert self.keeper.requests is not None
        flags = with_requests(self.keeper.flags(), self.keeper.requests)
        outcome: Any = SimpleNamespace(flags=flags, position=SimpleNamespace(step=number))
        self.keeper.after_step(None, outcome, None, 99)  # type: ignore[arg-type]

    def is_committed(self) -> bool:
        return newest_committed(self.store).manifest is not None


@pytest.fixture
def attempt(tmp_path: Path) -> Iterator[Attempt]:
    made = Attempt(tmp_path)
    yield made
    made.gate.set()
    assert made.keeper._saver.close(20.0)


def test_a_failure_with_peer_memory_waits_for_no_checkpoint(attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    with monkeypatch.context() as patched:
        patched.setattr(attempt.keeper._saver, "close", waits.append)
        attempt.keeper.abandon(RunError("a rank died"), is_in_memory=True)
    assert waits == [saving.ABANDON_TIMEOUT_S]


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
    monkeypatch.setattr(saving, "_BUFFER_S", 0.05)
    monkeypatch.setattr(saving, "checkpoint_meta", lambda *_: META)
    monkeypatch.setattr(saving, "state_source", lambda _: shard_of(TENSORS, 0, 1))


def test_a_postponed_save_comes_later(attempt: Attempt, ready: None, said: pytest.LogCaptureFixture) -> None:
    attempt.keeper._is_reserved = True
    # Step 7 is being saved, step 10 uses the second buffer, and step 15 has none.
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


@pytest.mark.parametrize("is_busy", [False, True], ids=["at once", "later"])
def test_a_request_remains_until_a_state_of_its_step_or_a_later_one_is_committed(
    attempt: Attempt, ready: None, monkeypatch: pytest.MonkeyPatch, is_busy: bool
) -> None:
    monkeypatch.setattr(background, "PROMPT_S", 60.0)
    keeper, committed, run_dir = attempt.keeper, [], attempt.keeper._config.run_dir
    assert keeper.requests is not None and isinstance(run_dir, Path)
    keeper._is_reserved = True
    run_dir.mkdir()
    if is_busy:
        # Step 7 is being saved, and step 10 uses the second buffer.
        attempt.step(10)
    request_save(run_dir)
    saved = keeper.requests.saved
    with patch.object(keeper.requests, "saved", lambda taken: committed.append(saved(taken) or keeper._taken_step)):
        attempt.step(11)
        attempt.gate.set()
        assert keeper._saver.wait(20.0)
        attempt.step(12)
        assert keeper._saver.wait(20.0)
    # A request at step 11 has to wait for a buffer, until step 12.
    assert committed == [12 if is_busy else 11] and 12 - is_busy not in committed_steps(attempt.store)
    keeper.requests.close()
    assert not (run_dir / SAVE_FILE).exists()


def test_a_request_is_over_if_its_checkpoint_is_committed_while_its_attempt_ends(
    attempt: Attempt, ready: None, said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "PROMPT_S", 60.0)
    run_dir = attempt.keeper._config.run_dir
    assert isinstance(run_dir, Path)
    attempt.keeper._is_reserved = True
    run_dir.mkdir()
    request_save(run_dir)
    attempt.step(8)
    ending = threading.Thread(target=attempt.keeper.abandon, args=(RunError("it"),), kwargs={"is_in_memory": False})
    ending.start()
    wait_until(lambda: "has failed" in said.text, "the failure is reported")
    assert (run_dir / SAVE_FILE).exists()
    attempt.gate.set()
    ending.join(20.0)
    assert committed_steps(attempt.store) == (7, 8) and not (run_dir / SAVE_FILE).exists()


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
    # A failing attempt would not have to wait for a save.
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
    away = CheckpointError("away")
    tries = iter([away, away, away, None])
    worker = Mock(**{"clock.monotonic.return_value": 0.0})
    keeper: Any = object.__new__(CheckpointKeeper)
    keeper._saver, keeper._worker = SimpleNamespace(failure=away), worker
    keeper._context = SimpleNamespace(messenger=SingleRankMessenger())
    monkeypatch.setattr(keeper, "_take", lambda *_: setattr(keeper._saver, "failure", next(tries)))
    monkeypatch.setattr(keeper, "_wait", lambda: None)
    monkeypatch.setattr(keeper, "_is_out_of_patience", lambda: False)
    outcome: Any = SimpleNamespace(position=SimpleNamespace(step=7))
    keeper._save(None, outcome, None, "stop", is_last=True)
    assert worker.beat.mock_calls == [call("save", 7)] * 3
