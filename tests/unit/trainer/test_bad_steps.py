"""Which steps end an attempt, with which words, and what is recorded of them."""

from __future__ import annotations

from typing import Any

import pytest

from ray_ulysses.config.running import ElasticSection
from ray_ulysses.errors import FinalError, RunError
from ray_ulysses.trainer.step import BadStepError, Flags, StepGuard, StepResult

NAN, INF = float("nan"), float("inf")


class Record:
    def __init__(self, error: Exception | None = None) -> None:
        self.bad: list[Any] = []
        self.error = error

    def bad_step(self, *fields: Any) -> None:
        self.bad.append(fields)
        if self.error is not None:
            raise self.error


def result(loss: float, **fields: Any) -> StepResult:
    defaults: dict[str, Any] = {"grad_norm": 1.0, "is_finite": True, "bad_rows": (), "tokens": 9, "digest": 1}
    defaults["z_loss"] = defaults["router_loss"] = 0.0
    return StepResult(loss=loss, flags=Flags(), **{**defaults, **fields})


def guard(record: Record, **settings: Any) -> StepGuard:
    return StepGuard(ElasticSection(**settings), record.bad_step)


def ended(guard: StepGuard, found: StepResult, step: int = 7) -> str:
    with pytest.raises(BadStepError) as error:
        guard.judge(step, range(12, 18), "p", found)
    assert isinstance(error.value, FinalError)
    return str(error.value)


def test_a_loss_that_is_not_finite_names_its_row_and_the_ways_out() -> None:
    record = Record()
    assert ended(guard(record), result(NAN, is_finite=False, bad_rows=(14,))) == (
        "step 7: the loss of row 14 of 12 to 17 is not finite. Nothing of the step is saved; a restart would meet the "
        "same. Look at its documents (`ray-ulysses inspect RUN --row 14`), leave its rows out (elastic.bad_steps: "
        "skip), or lower optimizer.lr or raise schedule.warmup_steps in a new run"
    )
    assert record.bad == [(7, range(12, 18), "p", "step 7: the loss of row 14 of 12 to 17 is not finite")]
    text = ended(guard(Record(), bad_steps="skip"), result(NAN, is_finite=False, bad_rows=(12, 13)))
    assert text == (
        "step 7: the loss of 2 rows, the first of them row 12, of 12 to 17 is not finite. Nothing of the step is "
        "saved; its rows are left out from now on (elastic.bad_steps=skip) where that is possible"
    )


def test_a_gradient_that_is_not_finite_is_bad_under_any_loss() -> None:
    text = ended(guard(Record()), result(2.5, is_finite=False, grad_norm=INF))
    assert text.startswith("step 7: the gradient of rows 12 to 17 is not finite (their loss is 2.5000). Nothing")


def test_a_journal_that_can_not_be_written_changes_nothing_of_the_error() -> None:
    assert "is not finite" in ended(guard(Record(RunError("full"))), result(NAN, is_finite=False))


def test_a_spike_is_bad_only_where_it_is_asked_for() -> None:
    for mads in (None, 5.0):
        record = Record()
        judged = guard(record, loss_spike_mads=mads)
        for step in range(1, 30):
            judged.judge(step, range(6), "p", result(2.0 + 0.1 * (step % 3)))
        if mads is None:
            judged.judge(30, range(6), "p", result(99.0))
            continue
        text = ended(judged, result(3.0), step=30)
        assert text.startswith(
            "step 30: the loss of rows 12 to 17 is 3.0000, above 2.6000 (elastic.loss_spike_mads=5 of the last 29 "
            "steps)"
        )
        assert len(record.bad) == 1
