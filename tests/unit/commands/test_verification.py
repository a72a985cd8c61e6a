"""What a person is told of a verification."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ray_ulysses.commands.inspect import ReadingReport
from ray_ulysses.commands.inspect_checks import render_verification
from ray_ulysses.inspect.journal_checks import Comparison, Finding
from ray_ulysses.inspect.row_checks import Reading, ReadingProgress
from ray_ulysses.inspect.verification import Verification


def make_verification(**changes: Any) -> Verification:
    fields: dict[str, Any] = {
        "name": "demo",
        "status": "finished",
        "plan_ids": ("aaaa", "bbbb"),
        "last_step": 12,
        "planned_steps": 12,
        "steps": 12,
        "rows": 48,
        "tokens": 12_000,
        "data_digest": "00000000deadbeef",
        "lost_steps": 2,
        "num_manifests": 3,
        "num_commits": 5,
        "reading": Reading(steps=12, rows=48, tokens=12_288, digest=0xDEADBEEF),
        "findings": (),
        "notes": (),
        "comparison": None,
    }
    return Verification(**{**fields, **changes})


def finding(step: int) -> Finding:
    return Finding(kind="digest", step=step, where=f"step {step}", what="what was found", meaning="what it means")


def compared(answer: Any, first: int | None = None) -> Verification:
    comparison = Comparison(
        other="runs/b", answer=answer, common_steps=12, own_steps=12, other_steps=20, first_different_step=first
    )
    return make_verification(comparison=comparison)


def test_a_sound_run_is_said_to_be_one() -> None:
    text = render_verification(make_verification())
    assert text.splitlines()[0] == (
        "run 'demo' (finished): every planned row was trained on once, with the right tokens"
    )
    assert "plan         aaaa > bbbb" in text
    assert "steps        12 that count, 2 discarded" in text
    assert "digest       00000000deadbeef in the journal" in text
    assert "corpus       00000000deadbeef from 48 rows of 12 steps" in text
    assert "checkpoints  3 on disk, 5 recorded in the journal" in text


def test_a_part_of_the_plan_is_not_said_to_be_the_whole() -> None:
    part = make_verification(last_step=48, planned_steps=1270)
    said = "every planned row up to step 48 of 1,270 was trained on once"
    assert f"): {said}, with the right tokens\n" in render_verification(part)
    assert f"): {said}; the corpus" in render_verification(replace(part, reading=None))


def test_what_was_not_read_is_not_said_to_be_proved() -> None:
    text = render_verification(make_verification(reading=None))
    assert "the corpus was not read again" in text.splitlines()[0]
    assert "corpus       not read again (--no-read)" in text
    assert "nothing to verify yet" in render_verification(make_verification(steps=0, reading=None)).splitlines()[0]


def test_each_finding_says_what_where_and_what_it_means() -> None:
    text = render_verification(make_verification(findings=(finding(3),), notes=("a note",)))
    assert "DOES NOT HOLD: 1 finding" in text.splitlines()[0]
    assert "  digest: step 3\n    what was found\n    what it means" in text
    assert "  note: a note" in text


def test_many_findings_of_a_kind_are_counted() -> None:
    text = render_verification(make_verification(findings=tuple(finding(step) for step in range(1, 26))))
    assert "DOES NOT HOLD: 25 findings" in text
    assert text.count("what was found") == 10
    assert "and more, which --json lists: 15 of digest" in text


def test_a_comparison_is_said() -> None:
    assert "runs/b trained the same rows and tokens in all 12 steps" in render_verification(compared("same"))
    so_far = render_verification(compared("same_so_far"))
    assert "in the 12 steps that both have (12 here, 20 there)" in so_far
    assert "runs/b differs from step 7 on" in render_verification(compared("different", 7))
    assert "runs/b follows another plan from step 9 on" in render_verification(compared("other_plan", 9))


class Ticking:
    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def monotonic(self) -> float:
        return self.time


def test_a_long_reading_says_how_far_it_is_and_a_short_one_nothing() -> None:
    clock, said = Ticking(), list[str]()
    watch = ReadingReport(said.append, clock).rows
    for rows in range(1, 21):
        watch(ReadingProgress(rows=rows, num_rows=40, tokens=rows * 1000))
        clock.time += 1.0
    assert said == [
        "read 6 of 40 rows (15.00%), 1.20k tokens/s, about 28s left",
        "read 11 of 40 rows (27.50%), 1.10k tokens/s, about 26s left",
        "read 16 of 40 rows (40.00%), 1.07k tokens/s, about 22s left",
    ]
    quiet = list[str]()
    ReadingReport(quiet.append, Ticking()).rows(ReadingProgress(rows=1, num_rows=1, tokens=8))
    assert quiet == []
