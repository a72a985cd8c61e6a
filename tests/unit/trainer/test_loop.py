"""What the loop does after a step, in which order, and which warnings it forwards."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from ray_ulysses.logging import get_logger
from ray_ulysses.trainer import loop
from ray_ulysses.trainer.loop import warnings_forwarded
from ray_ulysses.trainer.saving import StepOutcome
from ray_ulysses.trainer.step import Flags

_log = get_logger(__name__)


def order_of(monkeypatch: pytest.MonkeyPatch, flags: Flags) -> list[str]:
    """Take the step that ends in these flags, which an evaluation is due after, and return what was done."""
    done: list[str] = []
    position: Any = SimpleNamespace(step=4)

    def take_step(attempt: Any, source: Any, position: Any) -> StepOutcome:
        done.append("step")
        after: Any = SimpleNamespace(step=position.step + 1)
        return StepOutcome(position=after, metrics={}, flags=flags)

    def evaluate(attempt: Any, outcome: StepOutcome) -> StepOutcome:
        done.append("evaluation")
        return StepOutcome(position=outcome.position, metrics={"eval_loss": 1.0}, flags=outcome.flags)

    def saver(name: str) -> Any:
        return SimpleNamespace(after_step=lambda engine, outcome, *_: done.append(f"{name} {sorted(outcome.metrics)}"))

    monkeypatch.setattr(loop, "_take_step", take_step)
    monkeypatch.setattr(loop, "_evaluate", evaluate)
    monkeypatch.setattr(loop, "memory_explained", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(loop, "last_step_of", lambda *_: 5)
    settings = SimpleNamespace(run=SimpleNamespace(eval_every_steps=5, profile=None))
    attempt: Any = SimpleNamespace(
        context=SimpleNamespace(
            worker=SimpleNamespace(beat=lambda *_: None, device=None),
            run=SimpleNamespace(config=settings),
            diagnostics=SimpleNamespace(profiled=lambda *_: contextlib.nullcontext()),
        ),
        memory=SimpleNamespace(step_done=lambda: None),
        plan=SimpleNamespace(cursor=lambda step: step),
        stage=SimpleNamespace(ends_the_run=True),
        recorder=SimpleNamespace(time=SimpleNamespace(saving=contextlib.nullcontext)),
        watch=SimpleNamespace(after_step=lambda flags: None),
        engine=None,
        peer_memory=saver("memory"),
        keeper=saver("storage"),
    )
    assert loop._train(attempt, None, position).step == 5  # type: ignore[arg-type]
    return done


@pytest.mark.parametrize("flags", [Flags(stop=True), Flags(notice=True)], ids=["stop", "notice"])
def test_a_checkpoint_has_the_loss_of_its_evaluation(monkeypatch: pytest.MonkeyPatch, flags: Flags) -> None:
    assert order_of(monkeypatch, flags) == ["step", "evaluation", "memory ['eval_loss']", "storage ['eval_loss']"]


@pytest.mark.parametrize(
    "flags",
    [Flags(notice=True, notice_due=True), Flags(stop=True, resize=True), Flags(notice=True, stop=True)],
    ids=["notice", "resize", "stop"],
)
def test_what_a_node_may_take_with_it_is_saved_before_an_evaluation(
    monkeypatch: pytest.MonkeyPatch, flags: Flags
) -> None:
    assert order_of(monkeypatch, flags) == ["step", "memory []", "storage []", "evaluation"]


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


def test_a_warning_that_can_not_be_forwarded_ends_nothing() -> None:
    def full(text: str) -> None:
        _log.warning("and while it is forwarded, another: %s", text)
        raise OSError("the disk is full")

    with warnings_forwarded(full):
        _log.warning("something")


def test_a_flood_of_warnings_has_a_bound() -> None:
    told: list[str] = []
    with warnings_forwarded(told.append):
        for number in range(1500):
            _log.warning("step %d is slow", number)
    assert len(told) == 1000
