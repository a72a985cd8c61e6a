"""Maps Ray jobs created by ``ray-ulysses submit`` to their runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ray_ulysses.errors import RunError, UserError

Status = Literal["PENDING", "RUNNING", "SUCCEEDED", "FAILED", "STOPPED"]
_ENDED = ("SUCCEEDED", "FAILED", "STOPPED")
_RUN, _RUN_DIR, _NUMBER = "ray_ulysses_run", "ray_ulysses_run_dir", "ray_ulysses_number"
_KILLED = 137
"""Exit code of a shell whose command was killed by SIGKILL."""
_NOT_INSTALLED = "No module named ray_ulysses"


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """One submission of a run, which is a Ray job."""

    run: str
    """The run's name."""
    run_dir: str
    number: int
    """Sequence number among the run's submissions, starting at 1."""
    job: str
    """Ray's submission id."""
    status: Status
    """Status of the Ray job."""
    message: str = ""
    """Ray's explanation of the status."""
    exit_code: int | None = None
    """Exit code of the job's command, or None if the command has not exited."""
    started: float | None = None
    """Time of submission, in seconds since the epoch."""
    ended: float | None = None
    """End time of the job, in seconds since the epoch."""

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str] | None, **known: Any) -> Submission | None:
        """Return the submission described by a job's metadata, or None if ``submit`` did not create the job."""
        if metadata is None or not {_RUN, _RUN_DIR, _NUMBER} <= metadata.keys():
            return None
        return cls(run=metadata[_RUN], run_dir=metadata[_RUN_DIR], number=int(metadata[_NUMBER]), **known)

    @property
    def is_ended(self) -> bool:
        """Whether the job has ended."""
        return self.status in _ENDED

    @property
    def metadata(self) -> Mapping[str, str]:
        """Metadata stored with the Ray job, from which `from_metadata` restores the submission."""
        return {_RUN: self.run, _RUN_DIR: self.run_dir, _NUMBER: str(self.number)}

    def to_json(self) -> dict[str, Any]:
        """Return the fields for ``status --json``."""
        return {name: getattr(self, name) for name in self.__slots__}


def next_submission(run: str, run_dir: str, earlier: Iterable[Submission]) -> Submission:
    """Return a run's next submission.

    Args:
        run: The run's name.
        run_dir: The run's directory.
        earlier: All earlier submissions on the cluster.

    Raises:
        UserError: A job of a run with this name has not ended.
    """
    own = [one for one in earlier if one.run == run]
    for one in own:
        if not one.is_ended:
            raise UserError(
                f"run.name={run!r}: job {one.job} of this run, in {one.run_dir}, is {one.status}; follow the job with "
                f"`ray-ulysses logs {run} --follow`, stop it with `ray-ulysses stop {run}`, or set another run.name"
            )
    # Ray refuses an existing submission id, so only one of two concurrent commands succeeds.
    number = 1 + max((one.number for one in own), default=0)
    return Submission(run=run, run_dir=run_dir, number=number, job=f"{run}-{number:03d}", status="PENDING")


def find(name: str, submissions: Iterable[Submission]) -> list[Submission]:
    """Return all submissions of the run with this name, newest last, or the job with this submission id.

    Raises:
        UserError: No run or job matches.
    """
    every = sorted(submissions, key=lambda one: (one.run, one.number))
    found = [one for one in every if one.run == name] or [one for one in every if one.job == name]
    if not found:
        known = ", ".join(dict.fromkeys(one.run for one in every)) or "none"
        raise UserError(
            f"RUN={name!r}: no run with this name was submitted to this cluster (submitted runs: {known}); use one of "
            "these, or submit the run with `ray-ulysses submit CONFIG`"
        )
    return found


def newest_of_each_run(submissions: Iterable[Submission]) -> list[Submission]:
    """Return each run's newest submission, ordered by submission time."""
    newest = {one.run: one for one in sorted(submissions, key=lambda one: one.number)}
    return sorted(newest.values(), key=lambda one: (one.started or 0.0, one.run))


def check_outcome(ended: Submission) -> None:
    """Raise an error if a job has ended without success.

    Raises:
        UserError: The job's command refused its input.
        RunError: The job failed or was stopped.
    """
    if ended.status == "SUCCEEDED":
        return
    again = "submit the run again to resume it"
    if ended.status == "STOPPED":
        raise RunError(f"job {ended.job} was stopped; {again}")
    if _NOT_INSTALLED in ended.message:
        raise RunError(
            f"job {ended.job}: ray-ulysses is not installed on the cluster's nodes; install it there, or submit with "
            "--upload-package"
        )
    if ended.exit_code == 2:
        raise UserError(f"job {ended.job} was refused for its configuration or options; see the job's log")
    if ended.exit_code is None:
        # The job's command did not start, or its node was lost.
        raise RunError(f"job {ended.job} failed: {ended.message.strip()}; {again}")
    if ended.exit_code < 0 or ended.exit_code == _KILLED:
        # The job's log does not mention the signal.
        number = -ended.exit_code if ended.exit_code < 0 else _KILLED - 128
        raise RunError(
            f"job {ended.job} was killed by signal {number}; check whether the node that ran its command was out of "
            f"memory, or {again}"
        )
    raise RunError(f"job {ended.job} failed with exit code {ended.exit_code}; see the job's log, or {again}")
