"""The report of a trial run: a good trial passes every check, and each fault fails its own check."""

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
    num_steps=12, row_tokens=1024, longest_row=1024, step_tokens=[1000] * 13, steps=steps(LOSSES),
    again=steps([LOSSES[-1], 3.7], attempt=2, first=13), committed=[12], unsaved=None, loaded_step=12, failure=None,
    tolerance=1e-5, has_gpu=True, planned_bytes=48 * 2**30, limit_gib=79.0, most_of_limit=0.75, modelled_s=1.8,
    is_compared=True, is_pretrained=False,
)  # fmt: skip


def failed(**changes: Any) -> list[str]:
    return [line.name for line in judge("run", replace(GOOD, **changes)).failed]


def test_a_good_trial_passes_every_check() -> None:
    report = judge("run", GOOD)
    assert not report.failed and all(line.holds for line in report.lines)
    text = render_check(report)
    assert "50.00 of 79 GiB (63%)" in text and "500 tokens/s, 2.00 s per step (1.11 x)" in " ".join(text.split())
    assert text.endswith("ready for the whole run")
    assert report.to_json()["holds"] is True


NAN = [*LOSSES[:6], math.nan, *LOSSES[7:]]
SPIKE = "step 10: the loss of rows 9 to 9 is 9.0, above 5.0 (elastic.loss_spike_mads=6)"
NO_MEMORY = "run 'self-test-run': step 4 ran out of memory: 78.9 GiB were allocated"


def ended(failure: str, num_steps: int = 9) -> dict[str, Any]:
    """Return changes that make the trial fail before its checkpoint."""
    return {"steps": steps(LOSSES[:num_steps]), **UNSAVED, "failure": failure}


UNLOADED: dict[str, Any] = {"again": [], "loaded_step": None}
UNSAVED: dict[str, Any] = {**UNLOADED, "committed": []}
FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "too much": ({"limit_gib": 64.0}, "memory"),
    "unplanned": ({"planned_bytes": 40 * 2**30}, "memory as planned"),
    "out of memory": (ended(NO_MEMORY, 3), "memory"),
    "not apart": (ended("the self-test failed: 0.3", 0), "documents apart"),
    "no worker": (ended("a worker could not be started", 0), "trains"),
    "no data": (ended("shard 3 is gone"), "trains"),
    "spike": (ended(SPIKE), "loss"),
    "not finite": ({"steps": steps(NAN)}, "finite"),
    "ended not finite": (ended("step 8: the loss is not finite", 7), "finite"),
    "rises": ({"steps": steps(LOSSES[::-1]), "again": steps([5.0], attempt=2, first=13)}, "loss"),
    "slow": ({"modelled_s": 0.9}, "speed"),
    "not written": ({**UNSAVED, "failure": "the disk is full"}, "checkpoint written"),
    "not saved": ({**UNSAVED, "unsaved": "the disk is full"}, "checkpoint written"),
    "damaged": ({**UNLOADED, "failure": "the checkpoint of step 12 is damaged"}, "checkpoint loaded"),
    "wrong": ({"again": steps([LOSSES[-1] * 1.001], attempt=2, first=13)}, "checkpoint loaded"),
    "not loaded": (UNLOADED, "checkpoint loaded"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_fails_its_own_check(fault: str) -> None:
    changes, name = FAULTS[fault]
    assert failed(**changes) == [name]
    assert render_check(judge("run", replace(GOOD, **changes))).endswith(f"FAILED: {name}")


def test_checks_that_were_not_reached_do_not_fail() -> None:
    report = judge("run", replace(GOOD, **ended("worker 1 is lost", 3)))
    found = {line.name: line.found for line in report.lines if line.holds is None}
    assert found == dict.fromkeys(["loss", "speed", "checkpoint written", "checkpoint loaded"], "not reached")
    assert {line.name for line in report.lines if line.holds} == {
        "documents apart", "memory", "memory as planned", "finite"
    }  # fmt: skip


def test_a_slow_step_does_not_fail_against_the_data_sheet_of_a_gpu_that_was_never_measured() -> None:
    (line,) = (
        line for line in judge("run", replace(GOOD, modelled_s=0.9, is_compared=False)).lines if line.name == "speed"
    )
    assert line.holds is None and "(2.22 x)" in line.found and "data sheet" in line.rule


def test_the_loss_check_excludes_the_first_step_with_the_most_expensive_rows() -> None:
    """The most expensive rows may contain long documents that are easy to predict."""
    losses = [0.5, *LOSSES[1:]]
    # With the first step, the first third would be below the last third.
    losses[1:] = [3.0 - 0.05 * step for step in range(12)]
    assert sum(losses[:4]) / 4 < sum(losses[-4:]) / 4
    assert failed(steps=steps(losses), again=steps([losses[-1]], attempt=2, first=13)) == []


def test_the_loss_of_a_pretrained_model_may_stay_level_but_not_rise() -> None:
    level = [2.0 + 0.05 * (-1) ** step for step in range(13)]
    stays = {"steps": steps(level), "again": steps([level[-1]], attempt=2, first=13)}
    assert failed(**stays, is_pretrained=True) == []
    drifts = [loss + 0.001 * step for step, loss in enumerate(level)]
    drifting = {"steps": steps(drifts), "again": steps([drifts[-1]], attempt=2, first=13)}
    assert failed(**drifting, is_pretrained=True) == [] and failed(**drifting) == ["loss"]
    rises = {"steps": steps([2.0 + 0.1 * step for step in range(13)]), "again": steps([3.2], attempt=2, first=13)}
    assert failed(**rises, is_pretrained=True) == ["loss"]


def test_checks_without_a_reference_do_not_fail() -> None:
    report = judge("run", replace(GOOD, has_gpu=False, limit_gib=None, modelled_s=None))
    assert not report.failed
    assert [line.name for line in report.lines if line.holds is None] == ["memory", "memory as planned", "speed"]
