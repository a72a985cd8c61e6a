"""The data of two runs is compared step by step."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from ray_ulysses.errors import UserError
from ray_ulysses.inspect.journal_checks import Comparison
from ray_ulysses.inspect.verification import verify_run
from tests.unit.data.corpora import text_corpus, varied_texts
from tests.unit.inspect.runs import SETTINGS, Run, make_run


@pytest.fixture
def other(tmp_path: Path, corpus: Path) -> Run:
    """A run with the same plan and a copy of the corpus at another path."""
    shutil.copytree(corpus, tmp_path / "copy")
    return make_run(tmp_path / "other", [tmp_path / "copy"])


def compared(run: Run, other: Run) -> tuple[Comparison, list[str]]:
    found = verify_run(run.folder, other=other.folder, read=False)
    assert found.comparison is not None
    assert found.comparison.other == str(other.folder)
    assert {finding.kind for finding in found.findings} <= {"comparison"}
    return found.comparison, [str(finding) for finding in found.findings]


def test_equal_runs_are_the_same_and_a_longer_run_is_the_same_so_far(run: Run, other: Run) -> None:
    run.trained(8)
    other.attempt([other.started(), *other.steps(1, 5)])
    comparison, findings = compared(run, other)
    assert (comparison.answer, comparison.common_steps, findings) == ("same_so_far", 5, [])
    assert (comparison.own_steps, comparison.other_steps) == (8, 5)
    other.attempt([other.started(3), *other.steps(4, 8)])
    comparison, findings = compared(run, other)
    assert (comparison.answer, comparison.common_steps, comparison.first_different_step) == ("same", 8, None)
    assert findings == []


def test_the_first_different_step_is_reported(run: Run, other: Run) -> None:
    run.trained(8)
    wrong = [other.step(step, digest=f"{step:016x}") for step in (5, 6)]
    other.attempt([other.started(), *other.steps(1, 4), *wrong, *other.steps(7, 8)])
    comparison, (finding,) = compared(run, other)
    assert (comparison.answer, comparison.first_different_step) == ("different", 5)
    assert finding.startswith("step 5 of attempt 1, the first difference: received data with digest")
    assert f"{other.folder} received 0000000000000005" in finding


def test_different_rows_or_token_counts_are_differences(run: Run, other: Run, tmp_path: Path, corpus: Path) -> None:
    run.trained(3)
    other.attempt([other.started(), other.step(1), other.step(2, rows=[4, 7]), other.step(3)])
    _, (finding,) = compared(run, other)
    assert f"trained rows 4 to 7, but {other.folder} trained rows 4 to 6" in finding
    third = make_run(tmp_path / "third", [corpus])
    third.attempt([third.started(), third.step(1, tokens=1)])
    _, (finding,) = compared(run, third)
    assert f"{third.folder} counted 1;" in finding


def test_another_seed_is_another_plan(run: Run, tmp_path: Path, corpus: Path) -> None:
    run.trained(3)
    seeded = make_run(tmp_path / "seeded", [corpus], replace(SETTINGS, seed=4))
    seeded.trained(3)
    comparison, (finding,) = compared(run, seeded)
    assert (comparison.answer, comparison.common_steps, comparison.first_different_step) == ("other_plan", 0, 1)
    assert run.plan.plan_id in finding and seeded.plan.plan_id in finding
    assert "another data setting is different" in finding


def test_runs_are_compared_up_to_a_branch(run: Run, other: Run, corpus: Path, tmp_path: Path) -> None:
    run.trained(5)
    other.trained(5)
    more = text_corpus(tmp_path / "more", varied_texts(20, seed=5)).path
    other.branch(5, replace(SETTINGS, rows_per_step=3), [corpus, more])
    # Neither run has trained beyond the branch, so the data is the same so far.
    comparison, findings = compared(run, other)
    assert (comparison.answer, findings) == ("same", [])
    other.attempt([other.started(5), *other.steps(6, 8)])
    comparison, findings = compared(run, other)
    assert (comparison.answer, comparison.common_steps, findings) == ("same_so_far", 5, [])
    run.attempt([run.started(5), *run.steps(6, 7)])
    comparison, (finding,) = compared(run, other)
    assert (comparison.answer, comparison.common_steps, comparison.first_different_step) == ("other_plan", 5, 6)
    assert f"{other.plan.segments[0].plan_id} > {other.plan.plan_id}" in finding


def test_an_invalid_second_run_is_refused(run: Run, tmp_path: Path) -> None:
    run.trained(2)
    with pytest.raises(UserError, match=r"OTHER=.*is not a run directory"):
        verify_run(run.folder, other=tmp_path, read=False)
    (tmp_path / "empty/journal").mkdir(parents=True)
    with pytest.raises(UserError, match=r"OTHER=.*the run has no data plan yet"):
        verify_run(run.folder, other=tmp_path / "empty", read=False)
