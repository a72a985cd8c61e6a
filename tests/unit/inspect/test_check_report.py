"""What `check` says of a trial run: every line holds for a good one, and each fault fails its own line."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from ray_ulysses.commands.check import render_check
from ray_ulysses.inspect.check_report import Trial, judge
from ray_ulysses.tracking.events import StepDone


def steps(losses: list[float], *, attempt: int = 1, first: int = 1, **fields: Any) -> list[StepDone]:
    told = {"seconds": 2.0, "peak_memory_gib": 50.0, "grad_norm": 1.0, **fields}
    return [
        StepDone(
            time=1.0, attempt=attempt, step=step, loss=loss, tokens=90, rows=(step, step + 1), digest="0" * 16, **told
        )
        for step, loss in enumerate(losses, start=first)
    ]


LOSSES = [5.0 - 0.1 * step for step in range(13)]
GOOD = Trial(
    num_steps=12,
    row_tokens=1024,
    longest_row=1024,
    step_tokens=[1000] * 13,
    steps=steps(LOSSES),
    again=steps([LOSSES[-1], 3.7], attempt=2, first=13),
    committed=[12],
    unsaved=None,
    loaded_step=12,
    failure=None,
    tolerance=1e-5,
    has_gpu=True,
    planned_bytes=48 * 2**30,
    limit_gib=79.0,
    most_of_limit=0.75,
    modelled_s=1.8,
    is_pretrained=False,
)


def failed(**changes: Any) -> list[str]:
    return [line.name for line in judge("run", replace(GOOD, **changes)).failed]


def test_a_good_trial_holds_in_every_line() -> None:
    report = judge("run", GOOD)
    assert not report.failed and all(line.holds for line in report.lines)
    text = render_check(report)
    assert "50.00 of 79 GiB (63%)" in text and "500 tokens/s, 2.00 s per step (1.11 x)" in " ".join(text.split())
    assert text.endswith("ready for the whole run")
    assert report.to_json()["holds"] is True


NAN = [*LOSSES[:6], math.nan, *LOSSES[7:]]


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"limit_gib": 64.0}, ["memory"]),
        ({"planned_bytes": 40 * 2**30}, ["memory as planned"]),
        ({"steps": [], "again": [], "committed": [], "loaded_step": None, "failure": "the self-test failed: 0.3"},
         ["documents apart"]),
        ({"steps": [], "again": [], "committed": [], "loaded_step": None, "failure": "a worker could not be started"},
         ["trains"]),
        ({"steps": steps(LOSSES[:9]), "again": [], "committed": [], "loaded_step": None, "failure": "shard 3 is gone"},
         ["trains"]),
        ({"steps": steps(LOSSES[:9]), "again": [], "committed": [], "loaded_step": None,
          "failure": "step 10: the loss of rows 9 to 9 is 9.0, above 5.0 (elastic.loss_spike_mads=6)"}, ["loss"]),
        ({"steps": steps(NAN)}, ["finite"]),
        ({"steps": steps(LOSSES[::-1]), "again": steps([5.0], attempt=2, first=13)}, ["loss"]),
        ({"modelled_s": 0.9}, ["speed"]),
        ({"committed": [], "again": [], "loaded_step": None, "failure": "the disk is full"},
         ["checkpoint written"]),
        ({"committed": [], "again": [], "loaded_step": None, "unsaved": "the disk is full"}, ["checkpoint written"]),
        ({"again": [], "loaded_step": None, "failure": "the checkpoint of step 12 is damaged"}, ["checkpoint loaded"]),
        ({"again": steps([LOSSES[-1] * 1.001], attempt=2, first=13)}, ["checkpoint loaded"]),
        ({"loaded_step": None, "again": []}, ["checkpoint loaded"]),
    ],
    ids=["too much", "unplanned", "not apart", "no worker", "no data", "spike", "not finite", "rises", "slow",
         "not written", "not saved", "damaged", "wrong", "not loaded"],
)  # fmt: skip
def test_each_fault_fails_the_line_that_names_it(changes: dict[str, Any], names: list[str]) -> None:
    found = failed(**changes)
    assert found == names
    assert render_check(judge("run", replace(GOOD, **changes))).endswith(f"FAILED: {', '.join(found)}")


def test_an_attempt_that_ends_for_a_loss_that_is_not_finite_says_so() -> None:
    few = {"steps": steps(LOSSES[:7]), "again": [], "committed": [], "loaded_step": None}
    names = failed(**few, failure="step 8: the loss is not finite")
    assert names == ["finite"]


def test_a_step_without_memory_fails_the_memory_whatever_the_run_is_called() -> None:
    few = {"steps": steps(LOSSES[:3]), "again": [], "committed": [], "loaded_step": None}
    names = failed(**few, failure="run 'self-test-run': step 4 ran out of memory: 78.9 GiB were allocated")
    assert names == ["memory"]


def test_what_was_not_reached_says_so_and_fails_nothing() -> None:
    few = {"steps": steps(LOSSES[:3]), "again": [], "committed": [], "loaded_step": None, "failure": "worker 1 is lost"}
    report = judge("run", replace(GOOD, **few))
    found = {line.name: line.found for line in report.lines if line.holds is None}
    assert found == dict.fromkeys(["loss", "speed", "checkpoint written", "checkpoint loaded"], "not reached")
    assert {line.name for line in report.lines if line.holds} == {
        "documents apart", "memory", "memory as planned", "finite"
    }  # fmt: skip


def test_the_first_step_of_the_costliest_rows_is_not_held_against_the_others() -> None:
    """Long documents of one kind, say, that are easy to predict."""
    losses = [0.5, *LOSSES[1:]]
    # With it, the first third would be below the last one.
    losses[1:] = [3.0 - 0.05 * step for step in range(12)]
    assert sum(losses[:4]) / 4 < sum(losses[-4:]) / 4
    assert failed(steps=steps(losses), again=steps([losses[-1]], attempt=2, first=13)) == []


def test_the_loss_of_a_trained_model_may_stay_where_it_is_and_may_not_rise() -> None:
    level = [2.0 + 0.05 * (-1) ** step for step in range(13)]
    stays = {"steps": steps(level), "again": steps([level[-1]], attempt=2, first=13)}
    assert failed(**stays, is_pretrained=True) == []
    drifts = [loss + 0.001 * step for step, loss in enumerate(level)]
    drifting = {"steps": steps(drifts), "again": steps([drifts[-1]], attempt=2, first=13)}
    assert failed(**drifting, is_pretrained=True) == [] and failed(**drifting) == ["loss"]
    rises = {"steps": steps([2.0 + 0.1 * step for step in range(13)]), "again": steps([3.2], attempt=2, first=13)}
    assert failed(**rises, is_pretrained=True) == ["loss"]


def test_what_can_not_be_compared_is_told_and_fails_nothing() -> None:
    report = judge("run", replace(GOOD, has_gpu=False, limit_gib=None, modelled_s=None))
    assert not report.failed
    assert [line.name for line in report.lines if line.holds is None] == ["memory", "memory as planned", "speed"]
