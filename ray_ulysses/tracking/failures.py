"""Records failures in the journal and describes them, whether or not the run recovers.

The workers' supervisor records failures in a separate journal file: ``attempt_ended`` with a rank, ``start_failed`` if
no attempt had started, and ``run_failed`` if a failure ends the command.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray_ulysses.run_names import JOURNAL_FOLDER
from ray_ulysses.storage.place import Place
from ray_ulysses.tracking.events import AttemptEnded, AttemptStarted, EndEvent, Event, RunFailed, StartFailed, StepDone
from ray_ulysses.tracking.journal import open_journal
from ray_ulysses.tracking.journal_files import attempt_numbers
from ray_ulysses.tracking.journal_reader import read_head_and_tail

TAG_PREFIX = "failure."
"""Prefix of the tracker tags that describe a failure. They are deleted when the run resumes."""


def failure_fields(failure: EndEvent) -> dict[str, Any]:
    """Return the fields that describe a failure in the journal and in ``inspect --json``."""
    return {name: getattr(failure, name) for name in ("session", *EndEvent.__annotations__)}


def failure_tags(failure: EndEvent) -> dict[str, str]:
    """Return the tracker tags that describe a failure."""
    shown = ("reason", "rank", "node", "committed_step", "lost_steps", "way_out")
    return {f"{TAG_PREFIX}{name}": str(value) for name in shown if (value := getattr(failure, name)) is not None}


def describe_failure(failure: EndEvent) -> str:
    """Describe a failure in one line: the reason, whether the run restarts, and how many steps were lost."""
    words = [failure.reason]
    if failure.restarts:
        step, memory_step = failure.committed_step, failure.memory_step
        if memory_step is not None and (step is None or memory_step > step):
            words.append(f"restarting from step {memory_step:,} in peer memory")
        else:
            words.append("restarting" if step is None else f"restarting from step {step:,}")
    if failure.lost_steps is not None:
        words.append(f"{failure.lost_steps:,} step{'' if failure.lost_steps == 1 else 's'} lost")
    if failure.failure is None:
        words.append("not counted as a failure" if failure.restarts else "not restarted")
    elif failure.restarts:
        words.append(f"failure {failure.failure} of {failure.max_failures}")
    else:
        words.append(f"failure {failure.failure}, more than elastic.max_failures={failure.max_failures} allows")
    return "; ".join(words)


@dataclass(frozen=True, kw_only=True, slots=True)
class NewestAttempt:
    """Facts about the newest attempt, read from the start and the end of its journal file."""

    attempt: int
    """Number of the attempt."""
    session: str | None
    """Id of the attempt's command; None before ``attempt_started``."""
    nodes: tuple[str, ...]
    """Name of each rank's node, by rank."""
    last_step: int | None
    """Last completed step, or `resumed_step` if the attempt completed none; None if unknown."""
    resumed_step: int | None
    """Step that the attempt resumed from; None before ``attempt_started``."""
    has_ended: bool = False
    """Whether the attempt recorded its own end."""


def newest_attempt(run_dir: Place) -> NewestAttempt | None:
    """Return the newest attempt, or None if there is none."""
    numbers = attempt_numbers(run_dir)
    if not numbers:
        return None
    events = read_head_and_tail(run_dir, numbers[-1])
    started = next((event for event in events if isinstance(event, AttemptStarted)), None)
    steps = [event.step for event in events if isinstance(event, StepDone)]
    resumed = None if started is None else started.resumed_step
    return NewestAttempt(
        attempt=numbers[-1],
        session=None if started is None else started.session,
        nodes=() if started is None else started.rank_nodes,
        last_step=steps[-1] if steps else resumed,
        resumed_step=resumed,
        has_ended=any(isinstance(event, AttemptEnded) for event in events),
    )


def command_failures(events: Sequence[Event], session: str) -> list[AttemptEnded | StartFailed]:
    """Return a command's failures, ordered by time."""
    ends = [event for event in events if isinstance(event, AttemptEnded | StartFailed) and event.restarts is not None]
    return sorted((event for event in ends if event.session == session), key=lambda event: event.time)


def record_hang(run_dir: Place, text: str, stacks: Mapping[int, str], *, writer: str) -> None:
    """Record in the newest attempt's journal that ranks hang. Does nothing if there is no attempt.

    Args:
        run_dir: The run's directory.
        text: The ranks that hang, where they hang, and for how long.
        stacks: Thread stacks, by rank.
        writer: Name of the writer, which selects its journal file.

    Raises:
        OSError: The journal can't be written.
    """
    if (newest := newest_attempt(run_dir)) is not None:
        by_rank = {str(rank): stack for rank, stack in stacks.items()}
        with closing(open_journal(run_dir, newest.attempt, writer=writer)) as journal:
            journal.append({"event": "hang", "text": text, "stacks": by_rank})


def record_failure(run_dir: Place, failure: AttemptEnded | StartFailed | RunFailed, *, writer: str) -> None:
    """Record a failure in its attempt's journal, in the file of a writer.

    Raises:
        OSError: The journal can't be written.
    """
    if isinstance(run_dir, Path):
        (run_dir / JOURNAL_FOLDER).mkdir(exist_ok=True)
    with closing(open_journal(run_dir, failure.attempt, writer=writer)) as journal:
        fields = failure_fields(failure) | {"command_started": failure.command_started}
        if isinstance(failure, AttemptEnded):
            fields |= {"fault_at": failure.fault_at, "detected_at": failure.detected_at}
        journal.append({"event": failure.event, "time": failure.time, **fields})
