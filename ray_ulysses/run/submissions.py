"""Maps the jobs that ``submit`` has given to a Ray cluster to their runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ray_ulysses.errors import RunError, UserError

Status = Literal["PENDING", "RUNNING", "SUCCEEDED", "FAILED", "STOPPED"]
_ENDED = ("SUCCEEDED", "FAILED", "STOPPED")
_RUN, _RUN_DIR, _NUMBER = "ray_ulysses_run", "ray_ulysses_run_dir", "ray_ulysses_number"
_KILLED = 137
"""A shell's exit code for a command that was killed by SIGKILL."""
_NOT_INSTALLED = "No module named ray_ulysses"


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """One job of a run; each submission of a run is a job."""

    run: str
    """The run's name."""
    run_dir: str
    """The run's directory."""
    number: int
    """The submission's number, from 1."""
    job: str
    """Ray's submission id."""
    status: Status
    """Ray's status of the job."""
    message: str = ""
    """Ray's explanation of the status."""
    exit_code: int | None = None
    """Exit code of the job's command, if it exited."""
    started: float | None = None
    """When the job was submitted, in seconds since the epoch."""
    ended: float | None = None
    """When it ended."""

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str] | None, **known: Any) -> Submission | None:
        """Return the submission described by a job's metadata; ``None`` if ``submit`` did not submit it."""
        if metadata is None or not {_RUN, _RUN_DIR, _NUMBER} <= metadata.keys():
            return None
        return cls(run=metadata[_RUN], run_dir=metadata[_RUN_DIR], number=int(metadata[_NUMBER]), **known)

    @property
    def is_ended(self) -> bool:
        """Whether the job has ended."""
        return self.status in _ENDED

    @property
    def metadata(self) -> Mapping[str, str]:
        """The job's metadata in Ray, by which it is found again."""
        return {_RUN: self.run, _RUN_DIR: self.run_dir, _NUMBER: str(self.number)}

    def to_json(self) -> dict[str, Any]:
        """Return the submission as ``status --json`` prints it."""
        return {name: getattr(self, name) for name in self.__slots__}


def next_submission(run: str, run_dir: str, earlier: Iterable[Submission]) -> Submission:
    """Return the submission that follows the earlier ones of a run.

    Args:
        run: The run's name.
        run_dir: The run's directory.
        earlier: All submissions of the cluster.

    Raises:
        UserError: A job of a run of this name has not ended.
    """
    own = [one for one in earlier if one.run == run]
    for one in own:
        if not one.is_ended:
            raise UserError(
                f"run.name={run!r}: job {one.job} of this run is {one.status}, in {one.run_dir}; follow it with "
                f"`ray-ulysses logs {run} --follow`, stop it with `ray-ulysses stop {run}`, or choose another run.name"
            )
    # Ray refuses an id that was used before: of two simultaneous commands, one succeeds.
    number = 1 + max((one.number for one in own), default=0)
    return Submission(run=run, run_dir=run_dir, number=number, job=f"{run}-{number:03d}", status="PENDING")


def find(name: str, submissions: Iterable[Submission]) -> list[Submission]:
    """Return the submissions of a run by its name, newest last, or the one job of this id.

    Raises:
        UserError: There is neither.
    """
    every = sorted(submissions, key=lambda one: (one.run, one.number))
    found = [one for one in every if one.run == name] or [one for one in every if one.job == name]
    if not found:
        known = ", ".join(dict.fromkeys(one.run for one in every)) or "none"
        raise UserError(
            f"RUN={name!r}: no run of this name was submitted to this cluster (submitted: {known}); give one of these, "
            "or submit it with `ray-ulysses submit CONFIG`"
        )
    return found


def newest_of_each_run(submissions: Iterable[Submission]) -> list[Submission]:
    """Return the newest submission of each run, in the order in which they were submitted."""
    newest = {one.run: one for one in sorted(submissions, key=lambda one: one.number)}
    return sorted(newest.values(), key=lambda one: (one.started or 0.0, one.run))


def check_outcome(ended: Submission) -> None:
    """Raise the error of a job that has ended, for the command that followed it.

    Args:
        ended: The job, which has ended.

    Raises:
        UserError: The job's command refused its input.
        RunError: The job failed, or somebody stopped it.
    """
    if ended.status == "SUCCEEDED":
        return
    again = "submit it again, and the run resumes"
    if ended.status == "STOPPED":
        raise RunError(f"job {ended.job} was stopped; {again}")
    if _NOT_INSTALLED in ended.message:
        raise RunError(
            f"job {ended.job}: the cluster's nodes lack ray-ulysses; install it there, or submit with --upload-package"
        )
    if ended.exit_code == 2:
        raise UserError(f"job {ended.job} was refused, as its log says")
    if ended.exit_code is None:
        # Its command did not exit: it did not start, or its node was lost.
        raise RunError(f"job {ended.job} failed: {ended.message.strip()}; {again}")
    if ended.exit_code < 0 or ended.exit_code == _KILLED:
        # The log says nothing about it.
        number = -ended.exit_code if ended.exit_code < 0 else _KILLED - 128
        raise RunError(
            f"job {ended.job} was killed by signal {number}; look at the memory of the node that ran its command, "
            f"or {again}"
        )
    raise RunError(f"job {ended.job} failed with {ended.exit_code}, as its log says; {again}")
