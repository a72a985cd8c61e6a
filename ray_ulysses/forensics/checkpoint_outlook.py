"""What the next attempt would do about the checkpoints of a run, told before it is started (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ray_ulysses.checkpoint.fence import Lineage
from ray_ulysses.forensics.checkpoint_report import CheckpointReport
from ray_ulysses.run.start_point import commits_that_count
from ray_ulysses.tracking.step_runs import Entry


@dataclass(frozen=True, kw_only=True, slots=True)
class Outlook:
    """Where the next attempt starts, by the rules of `trainer.resume` and as far as sizes tell.

    Attributes:
        resumes_from: Step of the checkpoint that it starts from; None for none.
        unless: Newer steps that the storage does not give now: the newest that it gives by then is taken instead.
        refusal: Why it refuses to start; None if it does not.
    """

    resumes_from: int | None = None
    unless: tuple[int, ...] = ()
    refusal: str | None = None


def outlook(reports: Sequence[CheckpointReport], events: Iterable[Entry], lineage: Lineage, location: str) -> Outlook:
    """Return what the next attempt would do.

    Args:
        reports: Every checkpoint directory, by step.
        events: The run's journal.
        lineage: The run's attempts.
        location: Root of the store, for a person.
    """
    whole = max((report.step for report in reports if report.condition == "whole"), default=None)
    newer = [report for report in reports if whole is None or report.step > whole]
    foreign, unread, damaged = (
        tuple(report.step for report in newer if report.condition == condition)
        for condition in ("foreign", "unreadable", "damaged")
    )
    if foreign:
        version = "the version of ray-ulysses that wrote it goes on with the run"
        return Outlook(refusal=f"the checkpoint of step {max(foreign)} is of another version; {version}")
    if whole is not None:
        return Outlook(resumes_from=whole, unless=unread)
    if unread:
        return Outlook(
            unless=unread, refusal="no checkpoint can be read; see that the storage is there and may be read"
        )
    if damaged:
        way_out = f"restore the files in {location}, or start a new run under another run.name"
        return Outlook(refusal=f"no checkpoint is whole, and the run does not begin anew by itself; {way_out}")
    return Outlook(refusal=lost_commits(events, lineage, location))


def lost_commits(events: Iterable[Entry], lineage: Lineage, location: str) -> str | None:
    """Return what is to be said of a run of which no checkpoint is found; None if it has none that counts.

    Args:
        events: The run's journal.
        lineage: The run's attempts, as far as the store knows of them.
        location: Root of the store, for a person.
    """
    steps = commits_that_count(events, lineage)
    if not steps:
        return None
    commits = f"{len(steps)} checkpoint{'' if len(steps) == 1 else 's'}"
    return (
        f"the journal knows of {commits} up to step {max(steps)}, but there is none in {location}; mount or correct "
        "the storage of the run (checkpoint.storage)"
    )
