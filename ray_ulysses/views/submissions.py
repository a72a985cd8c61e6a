"""Formats the runs that were submitted to a cluster, and the jobs of one."""

from __future__ import annotations

from collections.abc import Sequence

from ray_ulysses.report.words import as_text, duration, table
from ray_ulysses.run.submissions import Submission

_STEP = "step="
_MOST_LINES = 3


def render_runs(newest: Sequence[Submission], now: float) -> str:
    """Return a table of runs.

    Args:
        newest: The newest job of each run.
        now: The time, in seconds since the epoch.
    """
    if not newest:
        return "no run was submitted to this cluster; submit one with `ray-ulysses submit CONFIG`"
    rows = [(one.run, one.status, _age(one, now), str(one.number), one.run_dir) for one in newest]
    return as_text(table(("run", "status", "time", "jobs", "directory"), rows, indent=""))


def render_submitted(job: Submission, earlier: Sequence[Submission]) -> str:
    """Return what a submission does: it resumes a run, or begins one.

    Args:
        job: The submission.
        earlier: All submissions of the cluster before it.
    """
    text = f"submitted run {job.run!r} as job {job.job}"
    own = [one for one in earlier if one.run == job.run]
    if any(one.run_dir == job.run_dir for one in own):
        return f"{text}, which resumes it"
    others = ", ".join(dict.fromkeys(one.run_dir for one in own))
    return f"{text}: a new run in {job.run_dir}, beside that of this name in {others}" if own else text


def render_run(jobs: Sequence[Submission], log: str, now: float) -> str:
    """Return the jobs of one run, the newest line of its log that is about a step, and its last lines.

    Args:
        jobs: The run's jobs, newest last; at least one.
        log: The log of the newest.
        now: The time, in seconds since the epoch.
    """
    rows = [(one.job, one.status, _age(one, now), "" if one.exit_code is None else str(one.exit_code)) for one in jobs]
    lines = log.rstrip("\n").split("\n")
    step = next((line for line in reversed(lines) if line.startswith(_STEP)), None)
    end = lines[-_MOST_LINES:]
    return as_text(
        (
            f"run {jobs[-1].run}  {jobs[-1].run_dir}",
            *table(("job", "status", "time", "exit code"), rows),
            *(f"  | {line}" for line in ([] if step is None or step in end else [step]) + end),
        )
    )


def _age(one: Submission, now: float) -> str:
    """Return for how long a job ran, or has been running."""
    return "" if one.started is None else duration((one.ended or now) - one.started)
