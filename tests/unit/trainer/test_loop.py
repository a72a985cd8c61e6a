"""What the loop does after a step, and in which order."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from ray_ulysses.checkpoint import CheckpointError
from ray_ulysses.trainer import loop
from ray_ulysses.trainer.saving import CheckpointKeeper, StepOutcome
from ray_ulysses.trainer.step import Flags


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
    worker = SimpleNamespace(beat=lambda *_: None, device=None)
    attempt: Any = SimpleNamespace(
        context=SimpleNamespace(
            worker=worker,
            run=SimpleNamespace(config=SimpleNamespace(run=RUN)),
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


RUN = SimpleNamespace(eval_every_steps=5, profile=None)


@pytest.mark.parametrize("flags", [Flags(), Flags(stop=True), Flags(notice=True)])
def test_a_checkpoint_has_the_loss_of_its_evaluation(monkeypatch: pytest.MonkeyPatch, flags: Flags) -> None:
    assert order_of(monkeypatch, flags) == ["step", "evaluation", "memory ['eval_loss']", "storage ['eval_loss']"]


@pytest.mark.parametrize(
    "flags", [Flags(notice=True, notice_due=True), Flags(stop=True, resize=True), Flags(notice=True, stop=True)]
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


def test_each_try_of_the_last_save_is_a_sign_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    """All tries together may take longer than a rank may go without one."""
    beats: list[tuple[str, int]] = []
    tries: list[int] = []
    keeper: Any = object.__new__(CheckpointKeeper)
    keeper._saver = SimpleNamespace(failure=CheckpointError("away"))
    keeper._worker = SimpleNamespace(
        clock=SimpleNamespace(monotonic=lambda: 0.0, sleep=lambda seconds: None), beat=lambda *beat: beats.append(beat)
    )
    keeper._context = SimpleNamespace(messenger=SimpleNamespace(broadcast=lambda value: value))

    def take(*_: object) -> None:
        tries.append(1)
        keeper._saver.failure = None if len(tries) == 4 else CheckpointError("away")

    monkeypatch.setattr(keeper, "_take", take)
    monkeypatch.setattr(keeper, "_wait", lambda: None)
    monkeypatch.setattr(keeper, "_is_out_of_patience", lambda: False)
    outcome: Any = SimpleNamespace(position=SimpleNamespace(step=7))
    keeper._save(None, outcome, None, "stop", is_last=True)
    assert len(tries) == 4 and beats == [("save", 7)] * 3
