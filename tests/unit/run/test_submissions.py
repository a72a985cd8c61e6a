"""Jobs of runs: a run has one at a time, is found by its name, and its job's end is the command's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ray_ulysses.commands.submit import render_run, render_runs, render_submitted
from ray_ulysses.errors import RunError, UserError
from ray_ulysses.run.submissions import (
    Submission,
    check_outcome,
    find,
    newest_of_each_run,
    next_submission,
)


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


def test_a_submission_says_whether_it_resumes_a_run_or_begins_one_of_the_same_name() -> None:
    first = job(status="PENDING")
    assert render_submitted(first, [job("b")]) == "submitted run 'a' as job a-001"
    again = job(number=2, status="PENDING")
    assert render_submitted(again, [job("b"), first]) == "submitted run 'a' as job a-002, which resumes it"
    elsewhere = replace(again, run_dir="/scratch/a")
    assert render_submitted(elsewhere, [first, job("b")]) == (
        "submitted run 'a' as job a-002: a new run in /scratch/a, beside that of this name in /runs/a"
    )


@pytest.mark.parametrize("status", ["PENDING", "RUNNING"])
def test_a_run_whose_job_has_not_ended_is_not_submitted_again(status: str) -> None:
    with pytest.raises(UserError) as error:
        next_submission("a", "/elsewhere/a", [job(number=1, status="FAILED"), job(number=2, status=status)])
    assert str(error.value) == (
        f"run.name='a': job a-002 of this run is {status}, in /runs/a; follow it with `ray-ulysses logs a --follow`, "
        "stop it with `ray-ulysses stop a`, or choose another run.name"
    )


def test_a_run_is_found_by_its_name_before_a_job_of_the_same_id() -> None:
    every = [job("a", 2), job("a-002", 1), job("a", 1)]
    assert [one.job for one in find("a", every)] == ["a-001", "a-002"]
    assert [one.job for one in find("a-002", every)] == ["a-002-001"]
    assert [one.job for one in find("a-001", every)] == ["a-001"]
    with pytest.raises(UserError, match=r"RUN='c': no run of this name .* \(submitted: a, a-002\)"):
        find("c", every)
    with pytest.raises(UserError, match="submitted: none"):
        find("c", [])


@pytest.mark.parametrize(
    ("ended", "error", "said"),
    [
        (job(status="STOPPED"), RunError, "job a-001 was stopped; submit it again, and the run resumes"),
        (job(status="FAILED", exit_code=2), UserError, "job a-001 was refused, as its log says"),
        (job(status="FAILED", exit_code=1), RunError, "job a-001 failed with 1, as its log says; submit it again"),
        (job(status="FAILED", exit_code=-9), RunError, "job a-001 was killed by signal 9; look at the memory"),
        (job(status="FAILED", exit_code=137), RunError, "job a-001 was killed by signal 9; look at the memory"),
        (job(status="FAILED", message="its node died\n"), RunError, "job a-001 failed: its node died; submit it again"),
        (
            job(status="FAILED", exit_code=1, message="python: No module named ray_ulysses"), RunError,
            "job a-001: the cluster's nodes lack ray-ulysses; install it there, or submit with --upload-package",
        ),
    ],
    ids=["stopped", "refused", "failed", "killed", "killed-under-a-shell", "node", "not-installed"],
)  # fmt: skip
def test_a_commands_exit_is_that_of_its_job(ended: Submission, error: type[Exception], said: str) -> None:
    with pytest.raises(error) as raised:
        check_outcome(ended)
    assert str(raised.value).startswith(said)


def test_a_job_that_succeeded_is_no_error() -> None:
    check_outcome(job())


def test_status_shows_the_newest_job_of_each_run_with_its_time() -> None:
    every = [
        job("b", 2, "RUNNING", started=1000.0), job("b", 1, "FAILED", started=10.0, ended=20.0),
        job("a", 1, started=500.0, ended=575.0),
    ]  # fmt: skip
    assert render_runs(newest_of_each_run(every), now=1090.0).splitlines() == [
        "run     status   time  jobs  directory",
        "  a  SUCCEEDED  1m15s     1  /runs/a",
        "  b    RUNNING  1m30s     2  /runs/b",
    ]
    assert "submit one with `ray-ulysses submit CONFIG`" in render_runs([], now=0.0)


def test_status_of_a_run_shows_its_jobs_and_its_newest_step() -> None:
    jobs = [job(number=1, status="FAILED", exit_code=1, started=0.0, ended=5.0), job(number=2, status="RUNNING")]
    log = "step=1/9 loss=3\nstep=2/9 loss=2\na\nb\nc\n"
    assert render_run(jobs, log, now=9.0).splitlines() == [
        "run a  /runs/a",
        "    job   status  time  exit code",
        "  a-001   FAILED    5s  1",
        "  a-002  RUNNING",
        "  | step=2/9 loss=2",
        "  | a",
        "  | b",
        "  | c",
    ]
    assert render_run(jobs, "step=1/9 loss=3\n", now=9.0).count("step=") == 1
