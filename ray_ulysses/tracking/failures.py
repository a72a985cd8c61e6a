"""Failures in the journal: those that a run survived, and the one that ended it.

They are written beside the first segment of an attempt by whoever saw the workers end: ``attempt_ended`` with a rank,
``start_failed`` where no attempt had begun, and ``run_failed`` as the last word of a command.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray_ulysses.run_names import JOURNAL_FOLDER
from ray_ulysses.tracking.events import AttemptEnded, AttemptStarted, EndEvent, Event, RunFailed, StartFailed, StepDone
from ray_ulysses.tracking.journal import AttemptJournal, attempt_numbers
from ray_ulysses.tracking.journal_reader import read_edges

TAG_PREFIX = "failure."
"""Of a tracker's tags that tell of a failure; they go when the run goes on."""


def failure_fields(failure: EndEvent) -> dict[str, Any]:
    """Return what the journal and ``inspect --json`` hold of a failure."""
    return {name: getattr(failure, name) for name in ("session", *EndEvent.__annotations__)}


def failure_tags(failure: EndEvent) -> dict[str, str]:
    """Return what a tracker shows of a failure."""
    shown = ("reason", "rank", "node", "committed_step", "lost_steps", "hint")
    return {f"{TAG_PREFIX}{name}": str(value) for name in shown if (value := getattr(failure, name)) is not None}


def failure_in_words(failure: EndEvent) -> str:
    """Return a failure in a line: what happened, what is done about it, and what it cost."""
    words = [failure.reason]
    if failure.restarts:
        step = failure.committed_step
        words.append("restarting" if step is None else f"restarting from step {step:,}")
    if failure.lost_steps is not None:
        words.append(f"{failure.lost_steps:,} step{'' if failure.lost_steps == 1 else 's'} lost")
    if failure.failure is None:
        words.append("not counted as a failure" if failure.restarts else "not started again")
    elif failure.restarts:
        words.append(f"failure {failure.failure} of {failure.max_failures}")
    else:
        words.append(f"failure {failure.failure}, more than elastic.max_failures={failure.max_failures} allows")
    return "; ".join(words)


@dataclass(frozen=True, kw_only=True, slots=True)
class NewestAttempt:
    """What the journal knows of an attempt whose end is not recorded.

    Attributes:
        attempt: Its number.
        session: Its command; None if it had not begun to train.
        nodes: Each rank's node, by rank.
        last_step: The last step that it completed; the one it resumed from if none.
    """

    attempt: int
    session: str | None
    nodes: tuple[str, ...]
    last_step: int | None


def newest_attempt(run_dir: Path) -> NewestAttempt | None:
    """Return what is known of the newest attempt; ``None`` if there has been none."""
    numbers = attempt_numbers(run_dir)
    if not numbers:
        return None
    events = read_edges(run_dir, numbers[-1])
    started = next((event for event in events if isinstance(event, AttemptStarted)), None)
    steps = [event.step for event in events if isinstance(event, StepDone)]
    resumed = None if started is None else started.resumed_step
    return NewestAttempt(
        attempt=numbers[-1],
        session=None if started is None else started.session,
        nodes=() if started is None else started.rank_nodes,
        last_step=steps[-1] if steps else resumed,
    )


def failures_of(events: Sequence[Event], session: str) -> list[AttemptEnded | StartFailed]:
    """Return a command's failures in the order of their times."""
    ends = [event for event in events if isinstance(event, AttemptEnded | StartFailed) and event.restarts is not None]
    return sorted((event for event in ends if event.session == session), key=lambda event: event.time)


def tell_failure(run_dir: Path, failure: AttemptEnded | StartFailed | RunFailed, *, writer: str) -> None:
    """Write a failure into its attempt's journal.

    Args:
        run_dir: The run's directory.
        failure: What happened.
        writer: Names the segment of whoever writes.

    Raises:
        OSError: It can't be written.
    """
    (run_dir / JOURNAL_FOLDER).mkdir(exist_ok=True)
    with closing(AttemptJournal.open(run_dir, failure.attempt, writer=writer)) as journal:
        # One of the records that outlive a power cut as soon as they are written.
        journal.append({"event": failure.event, "time": failure.time, **failure_fields(failure)})
