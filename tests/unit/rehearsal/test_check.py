"""The checks of a rehearsal."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from ray_ulysses.commands.rehearse import render_report
from ray_ulysses.rehearsal.check import TOLERANCES, compare_losses, count_rows, report_rehearsal
from ray_ulysses.rehearsal.recoveries import InjectedFault, RehearsalReport
from ray_ulysses.rehearsal.schedule import Fault
from tests.unit.data.corpora import text_corpus, varied_texts
from tests.unit.inspect.runs import Record, Run, make_run

FAULT = Fault(at_s=2.5, kind="kill-node")


@pytest.mark.parametrize(
    ("ranges", "lost", "repeated"),
    [
        ([(4, 8), (0, 4), (8, 12)], 0, 0),
        ([(0, 4), (8, 12)], 4, 0),
        ([(2, 4)], 2, 0),
        ([(0, 4), (3, 8)], 0, 1),
        ([(0, 4), (0, 4), (4, 8)], 0, 4),
        ([(0, 10), (2, 4), (12, 14)], 2, 2),
    ],
)
def test_lost_and_repeated_rows_are_counted(ranges: list[tuple[int, int]], lost: int, repeated: int) -> None:
    assert count_rows(ranges) == (lost, repeated)


def test_the_largest_loss_difference_is_found() -> None:
    found = compare_losses([(1, 2.0, 2.0), (2, 1.0, 1.25), (3, 4.0, 4.04)])
    assert (found.steps, found.at_step, found.largest) == (3, 2, pytest.approx(0.2))
    assert compare_losses([]).at_step is None
    bad = compare_losses([(1, 2.0, 1.0), (2, math.nan, 2.0), (3, 9.0, 1.0)])
    assert bad.at_step == 2 and not bad.largest <= TOLERANCES["fp32"]


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Run, Run]:
    corpus = text_corpus(tmp_path / "corpus", varied_texts(60)).path
    return make_run(tmp_path / "faults", [corpus]), make_run(tmp_path / "unbroken", [corpus])


def _timed(records: list[Record], begin: float) -> list[Record]:
    return [{**record, "time": begin + number} for number, record in enumerate(records)]


def _rehearsed(runs: tuple[Run, Run], again: list[Record] | None = None, **options: Any) -> RehearsalReport:
    """Report on a run that lost its third step to a fault, 2.5 s after the first step, and trained it again."""
    faulty, unbroken = runs
    faulty.attempt(_timed([faulty.started(), *faulty.steps(1, 3)], 99.0))
    faulty.attempt(_timed([faulty.started(2), *(again or faulty.steps(3, 6))], 105.0))
    unbroken.trained(6, finished=True)
    injected = [InjectedFault(fault=FAULT, at=102.5, what="node 2 is lost")]
    given = {"planned": [FAULT], "injected": injected, "unbroken": unbroken.folder, "tolerance": 1e-5}
    return report_rehearsal(faulty.folder, **given | options)


def test_a_run_without_lost_rows_and_with_equal_losses_passes(runs: tuple[Run, Run]) -> None:
    report = _rehearsed(runs)
    assert report.holds and (report.rows_lost, report.rows_repeated, report.lost_steps) == (0, 0, 1)
    assert report.unbroken is not None and (report.unbroken.steps, report.unbroken.largest) == (6, 0.0)
    assert report.retrained.steps == 1 and report.recoveries[0].first_step_s == pytest.approx(3.5)
    text = render_report(report)
    assert "everything holds" in text and "| 0:02 | kill-node |" in text and "node 2 is lost" in text
    assert json.loads(json.dumps(report.to_json()))["rows_lost"] == 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({3: {"rows": [12, 16]}}, "4 rows were lost, and 4 rows were repeated"),
        ({3: {"loss": 2.1}}, "the loss of step 3 differs from its first training by 5.0e-02"),
        ({5: {"loss": math.nan}}, "the loss of step 5 differs from the unbroken run by nan"),
        ({4: {"digest": "00"}}, "step 4 of attempt 2"),
        ({4: None}, "4 rows were lost, and 0 rows were repeated"),
    ],
)
def test_each_failed_check_is_reported(runs: tuple[Run, Run], changes: dict[int, Record | None], said: str) -> None:
    steps = [record | (changes.get(record["step"], {}) or {}) for record in runs[0].steps(3, 6)]
    report = _rehearsed(runs, [record for record in steps if changes.get(record["step"], {}) is not None])
    assert not report.holds and any(said in problem for problem in report.problems), report.problems
    assert "DOES NOT HOLD" in render_report(report) and said in render_report(report)


def test_missing_faults_missing_recoveries_and_a_low_ettr_are_reported(runs: tuple[Run, Run]) -> None:
    late = InjectedFault(fault=Fault(at_s=20.0, kind="kill-worker"), at=120.0, what="rank 0 is killed")
    report = _rehearsed(
        runs, planned=[FAULT, FAULT], injected=[late], problems=["the command ended with 1"], min_ettr=0.99
    )
    assert report.problems[0] == "the command ended with 1" and len(report.problems) == 4
    assert "only 1 of 2 faults" in report.problems[1] and "20s kill-worker" in report.problems[2]
    assert "at least 99%" in report.problems[3]
