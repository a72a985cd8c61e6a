"""What a person is told of a verification."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ray_ulysses.commands.inspect import ReadingReport
from ray_ulysses.commands.inspect_checks import render_verification
from ray_ulysses.inspect.journal_checks import Comparison, Finding
from ray_ulysses.inspect.row_checks import Reading, ReadingProgress
from ray_ulysses.inspect.verification import Verification
from tests.unit.commands.histories import HandClock

SOUND = Verification(
    name="demo", status="finished", plan_ids=("aaaa", "bbbb"), last_step=12, planned_steps=12, steps=12, rows=48,
    tokens=12_000, data_digest="00000000deadbeef", lost_steps=2, num_manifests=3, num_commits=5,
    reading=Reading(steps=12, rows=48, tokens=12_288, digest=0xDEADBEEF), findings=(), notes=(), comparison=None,
)  # fmt: skip


def finding(step: int) -> Finding:
    return Finding(kind="digest", step=step, where=f"step {step}", what="what was found", meaning="what it means")


@pytest.mark.parametrize(
    ("changes", "claim"),
    [
        ({}, "every planned row was trained on once, with the right tokens"),
        ({"last_step": 48, "planned_steps": 1270}, "every planned row up to step 48 of 1,270"),
        ({"reading": None}, "the corpus was not read again"),
        ({"steps": 0, "reading": None}, "nothing to verify yet"),
        ({"findings": (finding(3),)}, "DOES NOT HOLD: 1 finding"),
    ],
    ids=["whole", "part", "unread", "empty", "finding"],
)
def test_the_first_line_claims_no_more_than_was_verified(changes: dict[str, Any], claim: str) -> None:
    assert claim in render_verification(replace(SOUND, **changes)).splitlines()[0]


@pytest.mark.parametrize(
    ("answer", "first", "said"),
    [
        ("same", None, "in all 12 steps"),
        ("same_so_far", None, "in the 12 steps of both runs (12 here, 20 there)"),
        ("different", 7, "runs/b differs from step 7 on"),
        ("other_plan", 9, "runs/b follows another plan from step 9 on"),
    ],
)
def test_a_comparison_is_said(answer: Any, first: int | None, said: str) -> None:
    compared = Comparison(
        other="runs/b", answer=answer, common_steps=12, own_steps=12, other_steps=20, first_different_step=first
    )
    assert said in render_verification(replace(SOUND, comparison=compared))


def test_a_long_reading_says_how_far_it_is_and_a_short_one_nothing() -> None:
    clock, said = HandClock(), list[str]()
    report = ReadingReport(said.append, clock)
    for rows in range(1, 21):
        report.rows(ReadingProgress(rows=rows, num_rows=40, tokens=rows * 1000))
        clock.at += 1.0
    assert len(said) == 3
    assert said[0] == "read 6 of 40 rows (15.00%), 1.20k tokens/s, about 28s left"
    quiet, gib = list[str](), 1 << 30
    ReadingReport(quiet.append, HandClock()).rows(ReadingProgress(rows=1, num_rows=1, tokens=8))
    assert quiet == []
    clock = HandClock()
    report = ReadingReport(quiet.append, clock)
    for second in range(21):
        clock.at = float(second)
        report.bytes(second * gib, 40 * gib)
    assert len(quiet) == 4 and quiet[0] == "read 5.00 GiB of 40.0 GiB (12.50%), 1.00 GiB/s, about 35s left"
