"""Early stopping counts evaluations without a lower loss, whatever was recorded twice or later."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from ray_ulysses.config.learning import EarlyStoppingSection
from ray_ulysses.run.early_stopping import EarlyStopping
from ray_ulysses.tracking.events import Evaluated, EvaluatedCorpus, event_adapter
from ray_ulysses.tracking.journal_lines import encode_event
from tests.unit.tracking import journals

PLAN: Any = SimpleNamespace(segments=[SimpleNamespace(branch=None)])


def stopping(losses: dict[int, float], step: int | None = None, plan: Any = PLAN, **settings: object) -> EarlyStopping:
    section = EarlyStoppingSection.model_validate({"patience": 2, **settings})
    recorded = [
        Evaluated(
            time=1.0, attempt=1, step=at, loss=loss, tokens=1,
            corpora=(EvaluatedCorpus(name="books", path="/books", loss=10 - loss, tokens=1),),
        )
        for at, loss in losses.items()
    ]  # fmt: skip
    return EarlyStopping(section).recall(recorded, plan, step)


@pytest.mark.parametrize(
    ("losses", "settings", "wanted"),
    [
        ([5.0, 4.0, 4.1, 3.9, 3.9], {}, None),
        ([5.0, 4.0, 4.1, 4.0, 1.0], {}, (30, 10, 4.0)),
        ([5.0, 4.0, math.nan, 4.0], {}, (30, 10, 4.0)),
        ([5.0, 4.9, 4.8, 4.7], {"min_delta": 0.5}, (20, 0, 5.0)),
        ([5.0, 4.9, 4.4, 4.3], {"min_delta": 0.5}, None),
        ([5.0, 5.0], {"patience": 1}, (10, 0, 5.0)),
        ([5.0, 4.0, 3.0], {"corpus": "books"}, (20, 0, 5.0)),
    ],
)
def test_the_run_ends_after_as_many_evaluations_without_a_lower_loss(
    losses: list[float], settings: dict[str, object], wanted: tuple[int, int, float] | None
) -> None:
    found = stopping({10 * number: loss for number, loss in enumerate(losses)}, **settings).stop()
    assert (found and (found.step, found.best_step, found.best_loss)) == wanted


def test_held_out_documents_alone_are_named_like_a_corpus() -> None:
    recorded = [Evaluated(time=1.0, attempt=1, step=step, loss=loss, tokens=1) for step, loss in ((0, 5.0), (2, 4.0))]
    section = EarlyStoppingSection(patience=1, corpus="held_out")
    assert EarlyStopping(section).recall(recorded, PLAN).stop() is None


def test_evaluations_after_the_resumed_step_do_not_count_and_a_repeated_one_counts_once() -> None:
    resumed = stopping({0: 5.0, 10: 6.0, 20: 6.0}, step=10)
    assert resumed.stop() is None
    resumed.add(10, 6.5, {})
    assert resumed.stop() is None
    resumed.add(20, 4.0, {})
    assert resumed.stop() is None
    assert EarlyStopping(None).stop() is None


def test_a_branch_counts_anew_but_rows_that_are_left_out_do_not_matter() -> None:
    def plan(skipped: Any) -> Any:
        branch = SimpleNamespace(step=10, skipped=skipped)
        return SimpleNamespace(segments=[SimpleNamespace(branch=None), SimpleNamespace(branch=branch)])

    losses = {0: 3.0, 10: 4.0, 20: 5.0, 30: 4.5}
    found = stopping(losses, plan=plan((0, 4))).stop()
    assert found is not None and (found.step, found.best_step) == (20, 0)
    assert stopping(losses, plan=plan(None)).stop() is None
    found = stopping({**losses, 40: 4.5, 50: 4.6}, plan=plan(None)).stop()
    assert found is not None and (found.step, found.best_step) == (50, 30)


def test_a_branch_at_step_0_counts_the_evaluation_before_its_first_step() -> None:
    plan = SimpleNamespace(segments=[SimpleNamespace(branch=SimpleNamespace(step=0, skipped=None))])
    found = stopping({0: 3.0, 10: 3.1, 20: 3.2}, plan=plan).stop()
    assert found is not None and (found.step, found.best_step) == (20, 0)


def test_evaluations_of_a_state_that_was_discarded_do_not_count() -> None:
    def evaluated(step: int, loss: float) -> Evaluated:
        return Evaluated(time=1.0, attempt=1, step=step, loss=loss, tokens=1)

    # The first attempt was resumed from step 30, with evaluations at other steps from then on.
    started = journals.started(30, time=1.0, attempt=2, session="s")
    resumed = event_adapter().validate_json(encode_event(started))
    recorded = [evaluated(30, 3.0), evaluated(40, 2.0), evaluated(45, 2.2), resumed, evaluated(50, 2.9)]
    section = EarlyStoppingSection(patience=2)
    assert EarlyStopping(section).recall([*recorded, evaluated(75, 2.8)], PLAN).stop() is None
    found = EarlyStopping(section).recall([*recorded, evaluated(75, 2.95), evaluated(100, 2.9)], PLAN).stop()
    assert found is not None and (found.step, found.best_step) == (100, 50)


def test_losses_that_are_never_finite_are_named_so() -> None:
    reason = str(stopping({0: math.nan, 10: math.nan}).stop())
    assert reason == "the validation loss was not finite in 2 evaluations"


def test_an_evaluation_without_the_corpus_does_not_count() -> None:
    other = stopping({0: 3.0, 10: 4.0, 20: 5.0}, corpus="code")
    assert other.stop() is None
    other.add(30, 9.0, {"books": 9.0, "code": 1.0})
    assert other.stop() is None


def test_the_reason_names_the_loss_that_counted() -> None:
    reason = str(stopping({0: 5.0, 10: 4.9, 20: 4.8}, min_delta=0.5).stop())
    assert reason == "the validation loss was 5.0000 at step 0 and not lower by more than 0.5 in the next 2 evaluations"
