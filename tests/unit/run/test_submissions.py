"""Jobs of runs: a run has one at a time, is found by its name, and its job's end is the command's."""

from __future__ import annotations

from typing import Any

import pytest

from ray_ulysses.commands.submit import render_run, render_runs
from ray_ulysses.errors import RunError, UserError
from ray_ulysses.run.submissions import Submission, check_outcome, find, newest_of_each_run, next_submission


def job(run: str = "a", number: int = 1, status: Any = "SUCCEEDED", **known: Any) -> Submission:
    return Submission(run=run, run_dir=f"/runs/{run}", number=number, job=f"{run}-{number:03d}", status=status, **known)


def test_a_submission_is_numbered_after_the_newest_of_its_run_and_found_again_by_what_ray_stores() -> None:
    first = next_submission("a", "/runs/a", [job("b", 7)])
    assert (first.job, first.number) == ("a-001", 1)
    after = next_submission("a", "/runs/a", [job(number=2, status="FAILED"), job(number=1), job("b", 7, "RUNNING")])
    assert after.job == "a-003"
    assert Submission.from_metadata(after.metadata, job="a-003", status="PENDING") == after
    for other in (None, {}, {"ray_ulysses_run": "a"}):
        assert Submission.from_metadata(other, job="raysubmit_1", status="RUNNING") is None
    for status in ("PENDING", "RUNNING"):
        with pytest.raises(UserError, match=rf"run\.name='a': job a-002 .*{status}"):
            next_submission("a", "/elsewhere/a", [job(number=1, status="FAILED"), job(number=2, status=status)])


def test_a_run_is_found_by_its_name_before_a_job_of_the_same_id() -> None:
    every = [job("a", 2), job("a-002", 1), job("a", 1)]
    assert [one.job for one in find("a", every)] == ["a-001", "a-002"]
    assert [one.job for one in find("a-002", every)] == ["a-002-001"]
    assert [one.job for one in find("a-001", every)] == ["a-001"]
    with pytest.raises(UserError, match="RUN='c'"):
        find("c", every)


@pytest.mark.parametrize(
    ("ended", "error", "words"),
    [
        (job(status="STOPPED"), RunError, "stopped"),
        (job(status="FAILED", exit_code=2), UserError, "refused"),
        (job(status="FAILED", exit_code=1), RunError, "exit code 1"),
        (job(status="FAILED", exit_code=-9), RunError, "signal 9"),
        (job(status="FAILED", exit_code=137), RunError, "signal 9"),
        (job(status="FAILED", message="its node died\n"), RunError, "its node died"),
        (job(status="FAILED", exit_code=1, message="No module named ray_ulysses"), RunError, "--upload-package"),
    ],
    ids=["stopped", "refused", "failed", "killed", "killed-under-a-shell", "node", "not-installed"],
)
def test_a_commands_exit_is_that_of_its_job(ended: Submission, error: type[Exception], words: str) -> None:
    check_outcome(job())
    with pytest.raises(error, match=f"job a-001.*{words}"):
        check_outcome(ended)


def test_status_shows_the_newest_job_of_each_run_or_a_runs_jobs_and_its_newest_step() -> None:
    jobs = [job(number=2, status="RUNNING"), job(number=1, status="FAILED", exit_code=1, started=500.0, ended=575.0)]
    every = [job("b", started=1000.0, ended=1005.0), *jobs]
    assert [one.job for one in newest_of_each_run(every)] == ["a-002", "b-001"]
    assert "  b  SUCCEEDED    5s     1  /runs/b" in render_runs(newest_of_each_run(every), now=1090.0)
    text = render_run(jobs[::-1], "step=1/9 loss=3\nstep=2/9 loss=2\na\nb\nc\n", now=9.0)
    assert "  a-001   FAILED  1m15s  1" in text and text.endswith("  | step=2/9 loss=2\n  | a\n  | b\n  | c")
