"""Failures in the journal: those that a run survived, and the one that ended it.

They are written beside the first segment of an attempt by whoever saw the workers end: ``attempt_ended`` with a rank,
``start_failed`` where no attempt had begun, and ``run_failed`` as the last word of a command.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ray_ulysses.clock import Clock
from ray_ulysses.tracking.events import AttemptEnded, AttemptStarted, Event, OfEnd, StartFailed, StepDone
from ray_ulysses.tracking.journal import JOURNAL_FOLDER, AttemptJournal, attempt_numbers
from ray_ulysses.tracking.journal_reader import read_edges

TAG_PREFIX = "failure."
"""Of a tracker's tags that tell of a failure; they go when the run goes on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """One failure, as the journal has it.

    Attributes:
        session: The command.
        kind: Which kind it was; see `elastic.causes`.
        reason: In one line.
        rank: The rank that it began on; None where it was none's.
        node: That rank's node; None where it is not known.
        committed_step: The newest committed step; None where it is not known.
        lost_steps: Steps that were trained beyond it; None where that is not known.
        way_out: What a person can do.
        failure: How many failures count, with this one; None for one that is not charged.
        max_failures: How many the run survives.
        restarts: Whether the workers are started again.
    """

    session: str
    kind: str
    reason: str
    rank: int | None
    node: str | None
    committed_step: int | None
    lost_steps: int | None
    way_out: str
    failure: int | None
    max_failures: int
    restarts: bool

    @classmethod
    def from_event(cls, event: OfEnd) -> Failure:
        """Return the failure that an event of the journal tells of."""
        known = {name: getattr(event, name) for name in cls.__dataclass_fields__}
        return cls(**{**known, "session": event.session or "", "restarts": event.restarts is True})

    def to_tags(self) -> dict[str, str]:
        """Return what a tracker shows of it."""
        shown = ("reason", "rank", "node", "committed_step", "lost_steps", "way_out")
        return {f"{TAG_PREFIX}{name}": str(value) for name in shown if (value := getattr(self, name)) is not None}

    def in_words(self) -> str:
        """Return it in a line: what happened, what is done about it, and what it cost."""
        words = [self.reason]
        if self.restarts:
            words.append(
                "restarting" if self.committed_step is None else f"restarting from step {self.committed_step:,}"
            )
        if self.lost_steps is not None:
            words.append(f"{self.lost_steps:,} step{'' if self.lost_steps == 1 else 's'} lost")
        if self.failure is None:
            words.append("not counted as a failure" if self.restarts else "not started again")
        elif self.restarts:
            words.append(f"failure {self.failure} of {self.max_failures}")
        else:
            words.append(f"failure {self.failure}, more than elastic.max_failures={self.max_failures} allows")
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


def failures_of(events: Sequence[Event], session: str) -> list[tuple[float, Failure]]:
    """Return a command's failures with their times, in order."""
    ends = [event for event in events if isinstance(event, AttemptEnded | StartFailed) and event.restarts is not None]
    return sorted(
        ((event.time, Failure.from_event(event)) for event in ends if event.session == session),
        key=lambda told: told[0],
    )


def tell_failure(
    run_dir: Path, failure: Failure, *, attempt: int, has_begun: bool, writer: str, clock: Clock | None = None
) -> None:
    """Write a failure into an attempt's journal.

    Args:
        run_dir: The run's directory.
        failure: What happened.
        attempt: The attempt that it ended, or the newest one if it ended none; 1 if there has been none.
        has_begun: Whether it ended that attempt.
        writer: Names the segment of whoever writes.
        clock: Where the record's time comes from.

    Raises:
        OSError: It can't be written.
    """
    _write(run_dir, attempt, writer, clock, {"event": "attempt_ended" if has_begun else "start_failed"}, failure)


def tell_end(run_dir: Path, failure: Failure, *, attempt: int, writer: str, clock: Clock | None = None) -> None:
    """Write that a failure has ended the run; raises `OSError` if that can't be done."""
    _write(run_dir, attempt, writer, clock, {"event": "run_failed"}, failure)


def _write(
    run_dir: Path, attempt: int, writer: str, clock: Clock | None, event: Mapping[str, Any], failure: Failure
) -> None:
    (run_dir / JOURNAL_FOLDER).mkdir(exist_ok=True)
    journal = AttemptJournal.open(run_dir, attempt, writer=writer, clock=clock)
    try:
        journal.append({**event, **asdict(failure)})
        journal.sync()
    finally:
        journal.close()
