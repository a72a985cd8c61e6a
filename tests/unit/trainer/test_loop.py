"""The order of the loop's actions after a step, and the warnings that it forwards."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from ray_ulysses.logging import get_logger
from ray_ulysses.run.early_stopping import EarlyStop, EarlyStopping
from ray_ulysses.run.start_point import RunPosition
from ray_ulysses.trainer import loop
from ray_ulysses.trainer.loop import warnings_forwarded
from ray_ulysses.trainer.saving import StepOutcome
from ray_ulysses.trainer.step import Flags

_log = get_logger(__name__)


def order_of(
    monkeypatch: pytest.MonkeyPatch, flags: Flags, first: int = 4, early: EarlyStop | None = None
) -> list[str]:
    """Train from a step with these flags to step 5, when an evaluation is due, and return the actions in order.

    With ``early``, the evaluation ends the run, which has more steps.
    """
    done: list[str] = []
    position: Any = SimpleNamespace(step=5)

    def take_step(*_: Any) -> StepOutcome:
        done.append("step")
        return StepOutcome(position=position, metrics={}, flags=flags)

    def evaluate(attempt: Any, outcome: StepOutcome) -> StepOutcome:
        done.append("evaluation")
        attempt.stopping.stop = lambda: early
        return replace(outcome, metrics={"eval_loss": 1.0})

    attempt = MagicMock(stage=SimpleNamespace(ends_the_run=True), sampler=None, stopping=EarlyStopping(None))
    attempt.context.run.config.run = SimpleNamespace(eval_every_steps=5, profile=None)
    attempt.keeper.committed = []
    for name in ("peer_memory", "keeper"):
        saver = getattr(attempt, name)
        saver.after_step = lambda engine, outcome, cursor, last=0, name=name: done.append(
            f"{name} {sorted(outcome.metrics)}{' last' * (early is not None and last == 5)}"
        )
    monkeypatch.setattr(loop, "_take_step", take_step)
    monkeypatch.setattr(loop, "_evaluate", evaluate)
    monkeypatch.setattr(loop, "memory_explained", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(loop, "last_step_of", lambda *_: 5 if early is None else 9)
    assert loop._train(attempt, None, RunPosition(step=first)).step == 5  # type: ignore[arg-type]
    return done


def test_a_run_is_evaluated_before_its_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    assert order_of(monkeypatch, Flags(), first=0)[:2] == ["evaluation", "step"]


@pytest.mark.parametrize("flags", [Flags(stop=True), Flags(notice=True)], ids=["stop", "notice"])
def test_a_checkpoint_has_the_loss_of_its_evaluation(monkeypatch: pytest.MonkeyPatch, flags: Flags) -> None:
    assert order_of(monkeypatch, flags) == ["step", "evaluation", "peer_memory ['eval_loss']", "keeper ['eval_loss']"]


@pytest.mark.parametrize(
    "flags",
    [Flags(notice=True, notice_due=True), Flags(stop=True, resize=True), Flags(notice=True, stop=True)],
    ids=["notice", "resize", "stop"],
)
def test_a_node_that_leaves_is_saved_before_an_evaluation(monkeypatch: pytest.MonkeyPatch, flags: Flags) -> None:
    assert order_of(monkeypatch, flags) == ["step", "peer_memory []", "keeper []", "evaluation"]


def test_a_run_that_ends_early_saves_its_state_even_after_a_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    early = EarlyStop(step=5, best_step=1, best_loss=1.0, patience=1, min_delta=0.0)
    evaluated = ["step", "evaluation", "peer_memory ['eval_loss']", "keeper ['eval_loss'] last"]
    assert order_of(monkeypatch, Flags(), early=early) == evaluated
    late = order_of(monkeypatch, Flags(notice=True, notice_due=True), early=early)
    assert late == ["step", "peer_memory []", "keeper []", "evaluation", "keeper [] last"]


def test_a_rank_says_when_it_waits_for_a_row() -> None:
    seen: list[Any] = []
    worker = SimpleNamespace(wait_for_row=lambda waits: seen.append(waits), beat=lambda *beat: seen.append(beat))
    attempt: Any = SimpleNamespace(context=SimpleNamespace(worker=worker))
    for row in loop._beating(attempt, "step", 3, iter("ab")):  # type: ignore[arg-type]
        seen.append(row)
    assert seen == [True, False, ("step", 3), "a", True, False, ("step", 3), "b", True, False]


def test_each_warning_of_the_package_is_forwarded_once_for_the_time_of_the_block() -> None:
    forwarded: list[str] = []
    with warnings_forwarded(forwarded.append):
        _log.warning("the disk is %s", "slow")
        _log.warning("the disk is %s", "slow")
        _log.info("no news")
        thread = threading.Thread(target=_log.error, args=("MLflow is away",))
        thread.start()
        thread.join()
    _log.warning("too late")
    assert forwarded == ["the disk is slow", "MLflow is away"]


def test_warnings_that_can_not_be_forwarded_end_nothing_and_are_bounded() -> None:
    forwarded: list[str] = []

    def full(text: str) -> None:
        forwarded.append(text)
        if len(forwarded) < 3:
            _log.warning("another warning")
            raise OSError("the disk is full")

    with warnings_forwarded(full):
        for number in range(1500):
            _log.warning("step %d is slow", number)
    assert len(forwarded) == 1000
